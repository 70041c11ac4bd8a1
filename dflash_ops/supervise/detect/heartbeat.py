"""watcher_blind: the supervisor itself does not look any more (dead-man).

The rule: its last completed pass is longer ago than 10 of its intervals and 15 s. Only who is not the supervisor can
know that; the loop skips it. The watch from outside tells the same as `resident dead` (supervise/outside.py).
"""

from __future__ import annotations

from dflash_ops.contracts import Finding
from dflash_ops.supervise.detect.history import History, Skipped

NAME = "watcher_blind"
INTERVALS, LEAST_S = 10.0, 15.0


def detect(h: History) -> list[Finding] | Skipped:
    if h.pass_t is None:
        return Skipped(NAME, "nobody says when it last looked")
    silent = h.now - h.pass_t
    if silent <= max(LEAST_S, INTERVALS * h.every_s):
        return []
    text = f"the supervisor has not looked for {silent:.0f} s: what is said of the job may be old"
    return [Finding(NAME, text, h.now, h.pass_t, severity="alarm", numbers={"seconds": silent})]
