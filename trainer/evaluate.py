"""Held-out evaluation: the real speculative loop beside the target's own greedy decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.drafter import Drafter
from trainer.errors import DataError
from trainer.speculate import check_pair, greedy, speculate
from trainer.target import Target


@dataclass(frozen=True)
class Report:
    """What an evaluation found.

    Attributes:
        prompts: how many were continued. tokens: new tokens of the speculative outputs.
        tau: mean tokens a verification emits, bonus token included, over all verifications of all prompts.
        slot_acceptance: W - 1 shares; entry k - 1 is how often slots 1..k were all accepted.
        lossless: every output equals the target's own, token for token.
        mismatches: (prompt index, index of the first different new token) of those that do not.
        speculative_forwards, plain_forwards: of the target, prefills included.
        speculative_seconds, plain_seconds: wall-clock of each way, on whatever device this is.
    """

    prompts: int
    tokens: int
    tau: float
    slot_acceptance: list[float]
    lossless: bool
    mismatches: list[tuple[int, int]]
    speculative_forwards: int
    plain_forwards: int
    speculative_seconds: float
    plain_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON takes."""
        return asdict(self)


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    eos_ids: Collection[int] = (),
    *,
    progress: Callable[[int, int, float], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Report:
    """Continues every prompt both ways, greedily.

    Args:
        prompts: token ids of each prompt.
        max_new: new tokens a prompt, at most.
        eos_ids: end tokens.
        progress: called after each prompt with (prompts done, prompts in all, tau so far).
        clock: seconds; passed in by tests.

    Raises:
        DataError: no prompts. ConfigError: a drafter of another target.
    """
    if not prompts:
        raise DataError("no prompts to evaluate on", "prompts", "give a file with at least one prompt")
    check_pair(target, drafter)
    lengths: list[int] = []
    mismatches: list[tuple[int, int]] = []
    tokens = speculative_forwards = plain_forwards = 0
    speculative_seconds = plain_seconds = 0.0
    for index, prompt in enumerate(prompts):
        start = clock()
        fast = speculate(target, drafter, prompt, max_new, eos_ids)
        middle = clock()
        plain = greedy(target, prompt, max_new, eos_ids)
        plain_seconds += clock() - middle
        speculative_seconds += middle - start
        lengths += fast.acceptance_lengths
        tokens += len(fast.tokens)
        speculative_forwards += fast.target_forwards
        plain_forwards += len(plain)
        if fast.tokens != plain:
            mismatches.append((index, first_difference(fast.tokens, plain)))
        if progress is not None:
            progress(index + 1, len(prompts), _mean(lengths))
    return Report(
        prompts=len(prompts),
        tokens=tokens,
        tau=_mean(lengths),
        slot_acceptance=[_mean([float(n > slot) for n in lengths]) for slot in range(1, drafter.config.block_size)],
        lossless=not mismatches,
        mismatches=mismatches,
        speculative_forwards=speculative_forwards,
        plain_forwards=plain_forwards,
        speculative_seconds=speculative_seconds,
        plain_seconds=plain_seconds,
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length if one continues the other."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
