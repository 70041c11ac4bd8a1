"""ring_starved, ring_full: targets or drafters are the bottleneck, for long.

The rule: over the last 5 minutes, and 10 progress lines at least, no slot was ready (starved: drafters wait for
targets) or all were (full: targets wait for drafters). A note, no fault: `dflash-ops rebalance` shows a better
split.
"""

from __future__ import annotations

from dflash_ops.contracts import Finding
from dflash_ops.supervise.detect.history import History, Skipped

NAME = "ring"
LONG_S, NEEDS = 300.0, 10


def detect(h: History) -> list[Finding] | Skipped:
    points = [(p.t, p.ring_ready, p.ring_slots) for p in h.progress() if p.ring_ready is not None and p.ring_slots]
    if len(points) < NEEDS:
        return Skipped(NAME, f"the ring's state of {len(points)} lines so far, {NEEDS} are needed")
    found: list[Finding] = []
    for name, wait, full in (
        ("ring_starved", "drafters wait for targets", False),
        ("ring_full", "targets wait for drafters", True),
    ):
        run: list[float] = []
        for t, ready, slots in reversed(points):
            if ready != (slots if full else 0):
                break
            run.append(t)
        if len(run) >= NEEDS and run[0] - run[-1] >= LONG_S:
            text = f"for {(run[0] - run[-1]) / 60:.0f} minutes {wait}"
            numbers = {"seconds": run[0] - run[-1]}
            found.append(Finding(name, text, h.now, run[-1], severity="note", numbers=numbers))
    return found
