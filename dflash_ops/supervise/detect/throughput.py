"""perf_degraded_silent: the run became slower than itself.

The rule: the median speed of the newest 6 progress lines is more than 30 % below the median of all lines of this
attempt, of which there are 24 at least. Speed is block tokens a second, else the foreign trainer's own rate. (Below
the job's `slow_factor` the state itself says `slow`.)
"""

from __future__ import annotations

from dflash_ops.contracts import Finding
from dflash_ops.supervise.detect.history import History, Skipped, middle

NAME = "perf_degraded_silent"
NEEDS, NEWEST, FALL = 24, 6, 0.3


def detect(h: History) -> list[Finding] | Skipped:
    lines = h.progress()
    points = [(p.t, speed) for p in lines if (speed := p.block_tok_s if p.block_tok_s is not None else p.rate)]
    if len(points) < NEEDS:
        return Skipped(NAME, f"{len(points)} speeds so far, {NEEDS} are needed")
    usual = middle(v for _, v in points)
    recent = middle(v for _, v in points[-NEWEST:])
    if recent >= (1.0 - FALL) * usual:
        return []
    text = f"{recent:.4g} a second, {1 - recent / usual:.0%} below this run's median of {usual:.4g}"
    return [Finding(NAME, text, h.now, points[-NEWEST][0], numbers={"recent": recent, "median": usual})]
