"""Was it worth it? Pace before and after a change of the split, from the trainer's own records. Pure.

The rule here: what is compared is the pace of whole intervals between two records, weighted by their seconds; the first
steps of an attempt (caches are cold, kernels compile, the ring fills) are in neither number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_ops.errors import UsageError

#: Fewest intervals of which a pace is told.
FEWEST = 3

#: Share of the pace before below which nothing is told apart, however narrow the intervals are.
MARGIN = 0.02

#: Student's t for 95 %, by degrees of freedom; beyond the table the normal's.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Pace:
    """Block tokens a second, all drafters together; `low` to `high` is the interval of the mean (95 %).

    `ctx_tok_s` = context tokens a second; `intervals`, `seconds`, `steps` = of how much it was taken.
    """

    block_tok_s: float
    low: float
    high: float
    ctx_tok_s: float
    intervals: int
    seconds: float
    steps: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def to_json(self) -> dict[str, Any]:
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in vars(self).items()}


def pace_of(records: Sequence[Mapping[str, Any]], *, after_step: int = 0) -> Pace:
    """The pace of the records whose whole interval lies behind `after_step`.

    Raises:
        UsageError: there are too few.
    """
    rows = [r for r in map(_numbers, records) if r is not None]
    parts: list[tuple[float, float, float]] = []
    steps = 0
    for before, now in itertools.pairwise(rows):
        seconds, done = now[0] - before[0], now[1] - before[1]
        # A step that came again (drafters that started anew) or a clock that jumped: no interval of ours.
        if before[1] < after_step or seconds <= 0 or done <= 0:
            continue
        parts.append((seconds, now[2], now[3]))
        steps += int(done)
    if len(parts) < FEWEST:
        raise UsageError(
            f"{len(parts)} whole intervals between progress lines were seen, {FEWEST} are needed",
            "metrics.jsonl",
            "wait for more progress lines (train.log_every steps lie between two)",
        )
    total = sum(s for s, _, _ in parts)
    block, ctx = (sum(p[0] * p[i] for p in parts) / total for i in (1, 2))
    n = len(parts)
    # Of a weighted mean: intervals of very different length are not taken for equal.
    spread = math.sqrt(sum((p[0] * (p[1] - block)) ** 2 for p in parts) * n / (n - 1)) / total
    half = (_T[n - 2] if n - 2 < len(_T) else 1.96) * spread
    return Pace(block, max(0.0, block - half), block + half, ctx, n, total, steps)


def worse(before: Pace, after: Pace) -> bool:
    """Whether it is slower than before by more than both intervals together (and by more than `MARGIN`)."""
    allowed = max(math.hypot(before.half, after.half), MARGIN * before.block_tok_s)
    return after.block_tok_s < before.block_tok_s - allowed


def _numbers(record: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    values = [record.get(k) for k in ("t", "step", "block_tok_s", "ctx_tok_s")]
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values):
        return None
    t, step, block, ctx = (float(v) for v in values if v is not None)
    return t, step, block, ctx


@dataclass(frozen=True)
class Settling:
    """How long a new split is given: `settle` steps until its caches are warm, then `measure` steps that count.

    `first` = the step that it went on from.
    """

    first: int
    settle: int
    measure: int

    @property
    def warm(self) -> int:
        return self.first + self.settle

    @property
    def end(self) -> int:
        return self.warm + self.measure

    def text(self, step: int | None) -> str:
        """`settling: 12 of 50 steps`."""
        done = max(0, (step if step is not None else self.first) - self.first)
        if done < self.settle:
            return f"settling: {done} of {self.settle} steps"
        return f"measuring: {min(done - self.settle, self.measure)} of {self.measure} steps"


def settling(config: Mapping[str, Any], first: int, settle: int | None, measure: int | None) -> Settling:
    """Steps by the trainer's config: a whole round between two averagings to settle, two to measure, and never so few
    that there would not be enough progress lines.
    """
    train = config.get("train") or {}
    every, log = int(train.get("average_every", 50)), int(train.get("log_every", 10))
    enough = (FEWEST + 2) * log
    return Settling(
        first,
        max(every, 2 * log) if settle is None else settle,
        -(-max(2 * every, enough) // every) * every if measure is None else max(measure, (FEWEST + 1) * log),
    )
