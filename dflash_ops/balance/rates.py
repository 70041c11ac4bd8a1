"""What is measured of a run, and what is predicted from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dflash_ops.errors import UsageError

Limit = Literal["targets", "drafters", "ring", "averaging"]


@dataclass(frozen=True, order=True)
class Split:
    """How many devices are targets and how many are drafters."""

    targets: int
    drafters: int

    @property
    def devices(self) -> int:
        return self.targets + self.drafters

    def __str__(self) -> str:
        return f"{self.targets}+{self.drafters}"


@dataclass(frozen=True)
class Timing:
    """Seconds of one thing that is done again and again.

    Attributes:
        mean: seconds. sd: standard deviation of one, not of the mean, in seconds.
        count: of how many it was taken; 0 = assumed.
        spread: relative half-width of the interval of the mean where it is not known by counting (records that tell
            shares only), 0 to 1.
    """

    mean: float
    sd: float = 0.0
    count: int = 0
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mean", "sd", "count", "spread"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise UsageError(
                    f"a stage's {name} is {value!r}", "balance", "give a finite number of seconds, not below 0"
                )

    @property
    def error(self) -> float:
        """Standard error of the mean, in seconds; without a count all that is known is `spread`."""
        counted = self.sd / math.sqrt(self.count) if self.count > 1 else 0.0
        return math.hypot(counted, self.spread * self.mean)


@dataclass(frozen=True)
class Bucket:
    """Batches of one padded length.

    Attributes:
        length: padded tokens of a sequence. share: of all batches, 0 to 1.
        target: seconds of a target's forward for a batch. drafter: of a drafter's step.
    """

    length: int
    share: float
    target: Timing
    drafter: Timing


@dataclass(frozen=True)
class StageRates:
    """Seconds of each stage, as measured at one split.

    Attributes:
        split: at which it was measured.
        target: a target's (reader's) forward for a batch, over the mix of lengths. target_copy: into the ring.
        drafter: a drafter's step. drafter_copy: out of the ring, before the slot is free (0 on the CPU).
        target_hop, drafter_hop: the way of its answer to the launcher and of the next order back, with work at hand.
        average: one averaging, at the measured number of drafters; the slowest drafter's.
        block_tokens, ctx_tokens: of a batch, mean.
        average_every: steps between averagings. slots: of the ring; None = two for each worker.
        slot_through_step: the drafter holds its slot to the end of its step (CPU), not only while it copies (GPU).
        schedule: "ready" or "fixed". sync: "average" or "step". reduce: of a common step (sync "step"), the sum itself.
        readers: processes that read features from disk when there are no targets; 0 = there are no features.
        checkpoint: writing one. checkpoint_every: in steps.
        remaining: batches left; None = not known.
        measured: block tokens a second of the run itself, all drafters together; None where it is not known.
        buckets: target and drafter by padded length, which `simulate` draws from.
        exact: stage times were counted by the trainer; False: worked out from shares.
        notes: what a reader of the prediction should know of the measurement.
    """

    split: Split
    target: Timing
    drafter: Timing
    average: Timing
    block_tokens: float
    ctx_tokens: float
    average_every: int
    target_copy: Timing = Timing(0.0)
    drafter_copy: Timing = Timing(0.0)
    target_hop: Timing = Timing(0.0)
    drafter_hop: Timing = Timing(0.0)
    slots: int | None = None
    slot_through_step: bool = False
    schedule: str = "ready"
    sync: str = "average"
    reduce: Timing = Timing(0.0)
    readers: int = 0
    checkpoint: Timing = Timing(0.0)
    checkpoint_every: int = 0
    remaining: int | None = None
    measured: Timing | None = None
    buckets: tuple[Bucket, ...] = ()
    exact: bool = True
    notes: tuple[str, ...] = ()

    def slots_at(self, split: Split) -> int:
        """Ring slots that the trainer makes at a split."""
        return self.slots or 2 * (self.producers_at(split) + split.drafters)

    def producers_at(self, split: Split) -> int:
        """Who fills slots: targets, or readers where there are none."""
        return split.targets or self.readers


@dataclass(frozen=True)
class Prediction:
    """What a split would do.

    Attributes:
        block_tok_s, ctx_tok_s: tokens a second, all drafters together. low, high: interval of block_tok_s (95 %).
        target_busy, drafter_busy: share of the time, 0 to 1; a drafter's averaging is not counted as busy.
        ring_fill: ready batches / slots, mean.
        eta_s: seconds for what is left; None where that is not known.
        limit: which side limits. why: one sentence for people.
    """

    split: Split
    block_tok_s: float
    ctx_tok_s: float
    low: float
    high: float
    target_busy: float
    drafter_busy: float
    ring_fill: float
    eta_s: float | None
    limit: Limit
    why: str
