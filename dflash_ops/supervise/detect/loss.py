"""loss_spike: the loss explodes.

The rule: of the last 100 losses before the newest three, median M and spread S = 1.4826 x the median of |loss - M|;
all of the newest three lie above M + 8 S and above 1.5 M. At least 20 lines come before them; while the loss still
falls in its first lines nothing is said.
"""

from __future__ import annotations

import math

from dflash_ops.contracts import Finding
from dflash_ops.supervise.detect.history import History, Skipped, middle

NAME = "loss_spike"
NEEDS, KEPT, NEWEST = 20, 100, 3
TIMES_SPREAD, TIMES_MEDIAN = 8.0, 1.5


def detect(h: History) -> list[Finding] | Skipped:
    points = [(p, p.loss) for p in h.progress() if p.loss is not None and math.isfinite(p.loss)]
    if len(points) < NEEDS + NEWEST:
        return Skipped(NAME, f"{len(points)} losses so far, {NEEDS + NEWEST} are needed")
    before = [loss for _, loss in points[-KEPT - NEWEST : -NEWEST]]
    newest = points[-NEWEST:]
    usual = middle(before)
    spread = 1.4826 * middle(abs(x - usual) for x in before)
    limit = max(usual + TIMES_SPREAD * spread, TIMES_MEDIAN * usual)
    if usual <= 0 or any(loss <= limit for _, loss in newest):
        return []
    worst = max(loss for _, loss in newest)
    text = f"the loss is {worst:.4g}, the run's median is {usual:.4g}, for {NEWEST} lines in a row"
    numbers = {"loss": worst, "median": usual, "limit": limit}
    return [Finding(NAME, text, h.now, newest[0][0].t, numbers=numbers)]
