"""hung: the state, as a finding, with the silence and the limit it is judged by.

The rule is the state's own (supervise/health.py): no sign of life for max(3 x p99 of the attempt's own intervals,
the floor of its stage); loading and compiling have limits of their own (supervise/learned.py).
"""

from __future__ import annotations

from dflash_ops.contracts import Finding, State
from dflash_ops.supervise.detect.history import History, Skipped

NAME = "hung"


def detect(h: History) -> list[Finding] | Skipped:
    if not h.snapshots:
        return Skipped(NAME, "no snapshot")
    newest = h.snapshots[-1]
    if newest.state is not State.HUNG:
        return []
    return [Finding(NAME, newest.detail, h.now, newest.since, severity="alarm")]
