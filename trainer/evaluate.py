"""Held-out evaluation: the real speculative loop beside the target's own greedy decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from trainer.drafter import Drafter
from trainer.errors import DataError
from trainer.speculate import check_pair, greedy, speculate
from trainer.target import Target

#: New tokens of a run of both ways that is not counted: what is done once (kernels chosen, memory taken) is in it.
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Mismatch:
    """Where an output is not the target's own.

    Attributes:
        prompt: its index. position: of the first different new token.
        speculative, plain: the two tokens; None where that output had ended.
        gap: by how much the target's logit of the plain token is above the other's, over the same context; next to
            nothing means rounding of a forward over a block, more means a fault. None where a token is missing.
    """

    prompt: int
    position: int
    speculative: int | None
    plain: int | None
    gap: float | None


@dataclass(frozen=True)
class Report:
    """What an evaluation found. Reports of several prompt sets add up (`merged`).

    Attributes:
        prompts: how many were continued. tokens: new tokens of the speculative outputs.
        block_size: W. verifications: of all prompts. accepted: W - 1 counts; entry k - 1 is how often slots 1..k were
            all accepted.
        mismatches: outputs that are not the target's own, token for token.
        speculative_forwards, plain_forwards: of the target, prefills included.
        speculative_seconds, plain_seconds: wall-clock of each way, on whatever device this is, prefills included.
    """

    prompts: int
    tokens: int
    block_size: int
    verifications: int
    accepted: list[int]
    mismatches: list[Mismatch] = field(default_factory=list)
    speculative_forwards: int = 0
    plain_forwards: int = 0
    speculative_seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Mean tokens that a verification emits, bonus token included."""
        return 1 + sum(self.accepted) / self.verifications if self.verifications else 0.0

    @property
    def slot_acceptance(self) -> list[float]:
        """W - 1 shares: how often slots 1..k were all accepted (cumulative)."""
        return [n / self.verifications if self.verifications else 0.0 for n in self.accepted]

    @property
    def slot_conditional(self) -> list[float | None]:
        """W - 1 shares: how often slot k was accepted where slots 1..k-1 were; None where they never were."""
        before = [self.verifications, *self.accepted[:-1]]
        return [n / m if m else None for n, m in zip(self.accepted, before, strict=True)]

    @property
    def lossless(self) -> bool:
        return not self.mismatches

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """New tokens a second, speculatively and plainly; a plain token is one forward."""
        return _rate(self.tokens, self.speculative_seconds), _rate(self.plain_forwards, self.plain_seconds)

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON takes, with the shares and ratios that follow from the counts."""
        fast, plain = self.tokens_per_s
        return {
            **asdict(self),
            "tau": self.tau,
            "slot_acceptance": self.slot_acceptance,
            "slot_conditional": self.slot_conditional,
            "lossless": self.lossless,
            "speculative_tokens_per_s": fast,
            "plain_tokens_per_s": plain,
            "speedup": _rate(fast, plain),
            "speedup_forwards": _rate(self.plain_forwards, self.speculative_forwards),
        }


def merged(reports: Sequence[Report]) -> Report:
    """All of them as one; `Mismatch.prompt` counts on through the sets.

    Raises:
        DataError: none, or of drafters of different block sizes.
    """
    if len({r.block_size for r in reports}) != 1:
        raise DataError("reports of different block sizes, or none, do not add up", "reports")
    mismatches: list[Mismatch] = []
    before = 0
    for report in reports:
        mismatches += [Mismatch(**{**asdict(m), "prompt": m.prompt + before}) for m in report.mismatches]
        before += report.prompts
    return Report(
        prompts=before,
        tokens=sum(r.tokens for r in reports),
        block_size=reports[0].block_size,
        verifications=sum(r.verifications for r in reports),
        accepted=[sum(counts) for counts in zip(*(r.accepted for r in reports), strict=True)],
        mismatches=mismatches,
        speculative_forwards=sum(r.speculative_forwards for r in reports),
        plain_forwards=sum(r.plain_forwards for r in reports),
        speculative_seconds=sum(r.speculative_seconds for r in reports),
        plain_seconds=sum(r.plain_seconds for r in reports),
    )


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    eos_ids: Collection[int] = (),
    *,
    progress: Callable[[int, int, float], None] | None = None,
    each: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Report:
    """Continues every prompt both ways, greedily.

    Args:
        prompts: token ids of each prompt.
        max_new: new tokens a prompt, at most.
        eos_ids: end tokens.
        progress: called after each prompt with (prompts done, prompts in all, tau so far).
        each: called after each forward of the target, either way, with the new tokens that it gave.
        clock: seconds; passed in by tests.

    Raises:
        DataError: no prompts. ConfigError: a drafter of another target.
    """
    if not prompts:
        raise DataError("no prompts to evaluate on", "prompts", "give a file with at least one prompt")
    check_pair(target, drafter)
    width = drafter.config.block_size
    lengths: list[int] = []
    mismatches: list[Mismatch] = []
    tokens = speculative_forwards = plain_forwards = 0
    speculative_seconds = plain_seconds = 0.0
    for index, prompt in enumerate(prompts):
        start = clock()
        fast = speculate(target, drafter, prompt, max_new, eos_ids, each=each)
        middle = clock()
        plain = greedy(target, prompt, max_new, eos_ids, each=each)
        plain_seconds += clock() - middle
        speculative_seconds += middle - start
        lengths += fast.acceptance_lengths
        tokens += len(fast.tokens)
        speculative_forwards += fast.target_forwards
        plain_forwards += len(plain)
        if fast.tokens != plain:
            mismatches.append(_mismatch(target, index, prompt, fast.tokens, plain))
        if progress is not None:
            progress(index + 1, len(prompts), sum(lengths) / len(lengths) if lengths else 0.0)
    return Report(
        prompts=len(prompts),
        tokens=tokens,
        block_size=width,
        verifications=len(lengths),
        accepted=[sum(n > slot for n in lengths) for slot in range(1, width)],
        mismatches=mismatches,
        speculative_forwards=speculative_forwards,
        plain_forwards=plain_forwards,
        speculative_seconds=speculative_seconds,
        plain_seconds=plain_seconds,
    )


def warm_up(target: Target, drafter: Drafter, prompt: Sequence[int], max_new: int) -> None:
    """Both ways over a few tokens, uncounted: the first forward of a process pays for all later ones."""
    few = min(max_new, WARM_UP_TOKENS)
    speculate(target, drafter, prompt, few)
    greedy(target, prompt, few)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length if one continues the other."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _mismatch(target: Target, index: int, prompt: Sequence[int], fast: Sequence[int], plain: Sequence[int]) -> Mismatch:
    at = first_difference(fast, plain)
    left = fast[at] if at < len(fast) else None
    right = plain[at] if at < len(plain) else None
    gap = None
    if left is not None and right is not None:
        ids = torch.tensor([[*prompt, *plain[:at]]], dtype=torch.int64, device=target.device)
        hidden, _ = target.step(ids, target.new_cache())
        logits = F.linear(hidden[0, -1], target.head_weight).float()
        gap = float(logits[right] - logits[left]) if 0 <= left < len(logits) and 0 <= right < len(logits) else None
    return Mismatch(index, at, left, right, gap)


def _rate(amount: float, of: float) -> float:
    return amount / of if of else 0.0
