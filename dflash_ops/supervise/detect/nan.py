"""nan_loss: the loss is no number any more.

The rule: the newest progress line's loss is NaN or infinite; or it has no loss although earlier lines of the same
attempt had one, twice in a row (JSON has no NaN: it arrives as null). Its number `last_good_step` is the newest step
that was seen with a finite loss, where one was.
"""

from __future__ import annotations

import math

from dflash_ops.contracts import Finding, Progress
from dflash_ops.supervise.detect.history import History, Skipped

NAME = "nan_loss"


def detect(h: History) -> list[Finding] | Skipped:
    lines = h.progress()
    if not lines:
        return Skipped(NAME, "no progress line yet")
    had = any(map(_good, lines))
    newest = lines[-1]
    surely = newest.loss is not None and not math.isfinite(newest.loss)
    gone = had and len(lines) > 2 and lines[-1].loss is None and lines[-2].loss is None
    if not (surely or gone):
        return []
    since = newest.t
    numbers: dict[str, float] = {}
    for p in reversed(lines):
        if _good(p):
            # What was saved up to here holds finite numbers; what was saved later may hold none.
            numbers = {"last_good_step": p.step} if p.step is not None else {}
            break
        since = p.t
    shown = newest.loss if newest.loss is not None else "not a number"
    return [
        Finding(NAME, f"the loss is {shown} at step {newest.step}", h.now, since, severity="alarm", numbers=numbers)
    ]


def _good(p: Progress) -> bool:
    return p.loss is not None and math.isfinite(p.loss)
