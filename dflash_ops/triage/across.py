"""From the diagnoses of a job's nodes to the one that came first (laws of supervision, 3). Pure.

Order: what a node says of itself (a kind that is a root, or an error that no playbook names) -> a cause that is not
shown -> what follows from a failure elsewhere. Inside one of these the earliest wins, by clocks made equal; of two that
are nearer to each other than the clocks are known, the surer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_ops.contracts.diagnosis import Diagnosis

_NOT_SHOWN = "root_cause_not_shown"


@dataclass(frozen=True)
class NodeCase:
    """One node's attempt.

    Attributes:
        label: how the node is called. cascade: its kind is one that follows from a failure elsewhere.
        failed: when it failed, seconds since the epoch by the asker's clock; None where that is not known.
        clock_s: seconds that its clock is ahead of the asker's. unsure_s: by which `failed` and `clock_s` may be wrong.
    """

    rank: int
    label: str
    attempt: int
    alive: bool
    diagnosis: Diagnosis
    cascade: bool = False
    failed: float | None = None
    clock_s: float = 0.0
    unsure_s: float = 1.0


def level(case: NodeCase) -> int:
    """Its place in the order of causes; smaller is nearer to the cause."""
    if case.diagnosis.kind == "healthy":
        return 3
    if case.cascade:
        return 2
    return 1 if case.diagnosis.kind == _NOT_SHOWN else 0


def first(cases: Sequence[NodeCase]) -> tuple[NodeCase, tuple[str, ...]]:
    """The node whose failure came first, and why we think so. `cases` has one at least."""
    best = min(level(c) for c in cases)
    same = [c for c in cases if level(c) == best]
    known = [c for c in same if c.failed is not None]
    if not known:
        chosen = max(same, key=lambda c: (c.diagnosis.confidence, -c.rank))
    else:
        early = min(known, key=lambda c: (c.failed or 0.0, c.rank))
        tied = [c for c in known if _gap(early, c) <= early.unsure_s + c.unsure_s or c is early]
        chosen = max(tied, key=lambda c: (c.diagnosis.confidence, -(c.failed or 0.0)))
    return chosen, tuple(_why(chosen, cases)) if best < 3 else ()


def _gap(one: NodeCase, other: NodeCase) -> float:
    """Seconds from one's failure to the other's."""
    assert one.failed is not None
    assert other.failed is not None
    return other.failed - one.failed


def _why(chosen: NodeCase, cases: Sequence[NodeCase]) -> list[str]:
    said = []
    for other in cases:
        if other is chosen:
            continue
        kind = other.diagnosis.kind
        if kind == "healthy":
            said.append(f"{other.label} {'still runs' if other.alive else 'has no fault of its own'}")
        elif chosen.failed is None or other.failed is None:
            said.append(f"{other.label} has {kind}; when is not known{_follows(chosen, other)}")
        else:
            gap = _gap(chosen, other)
            if abs(gap) <= chosen.unsure_s + other.unsure_s:
                when = "failed at the same time, as far as the clocks tell"
            else:
                when = f"failed {_seconds(abs(gap))} {'later' if gap > 0 else 'earlier'}"
            said.append(f"{other.label} {when}: {kind}{_follows(chosen, other)}")
    return [*said, clocks(cases)]


def _follows(chosen: NodeCase, other: NodeCase) -> str:
    if level(other) <= level(chosen):
        return ""
    return ", which follows a failure elsewhere" if other.cascade else ", and its cause is not shown there"


def clocks(cases: Sequence[NodeCase]) -> str:
    """How the nodes' clocks differ: `clocks: node 0 (a) 3.1 s ahead, node 1 (b) as ours, compared to within 1.2 s`."""
    parts = []
    for case in cases:
        if abs(case.clock_s) <= case.unsure_s:
            parts.append(f"{case.label} as ours")
        else:
            way = "ahead" if case.clock_s > 0 else "behind"
            parts.append(f"{case.label} {_seconds(abs(case.clock_s))} {way}")
    return f"clocks: {', '.join(parts)}, compared to within {max(c.unsure_s for c in cases):.1f} s"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
