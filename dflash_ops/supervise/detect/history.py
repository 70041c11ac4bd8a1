"""What a detector looks at, and what it answers. No detector reads anything else; none has a clock of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from dflash_ops.contracts import Finding, Progress, Snapshot, WorkerShares


@dataclass(frozen=True)
class DiskSample:
    """Free and total bytes of the file system that holds `path`, at time `t`."""

    t: float
    path: str
    free: int
    total: int


@dataclass(frozen=True)
class History:
    """Looks at one attempt, oldest first. A source that failed is None, never empty.

    Attributes:
        now: seconds since the epoch.
        snapshots: one for each look that brought a new progress line, or fewer; the newest last.
        disks: samples of the job's disks. kernel: lines of the kernel log since the attempt began.
        pass_t: when the supervisor last completed a pass; every_s: how often it should.
    """

    now: float
    snapshots: tuple[Snapshot, ...] = ()
    disks: tuple[DiskSample, ...] | None = None
    kernel: tuple[str, ...] | None = None
    pass_t: float | None = None
    every_s: float = 1.0

    def progress(self) -> list[Progress]:
        """Progress lines, each once, of the newest attempt."""
        found: list[Progress] = []
        newest = self.snapshots[-1].attempt if self.snapshots else None
        for snapshot in self.snapshots:
            p = snapshot.progress
            if snapshot.attempt == newest and p is not None and (not found or p.t > found[-1].t):
                found.append(p)
        return found

    def shares(self, last: int) -> list[dict[str, WorkerShares]]:
        """Workers' shares, newest `last` records that have any."""
        return [s.workers for s in self.snapshots if s.workers][-last:]


@dataclass(frozen=True)
class Skipped:
    """A detector could not look: its source failed, or there is too little of it yet."""

    detector: str
    reason: str


@dataclass(frozen=True)
class Report:
    """All detectors' answers. `skipped` are those that could not look: silence of theirs says nothing."""

    findings: tuple[Finding, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Line:
    """A least-squares line: its slope a second, and how much of the variation it explains (0 to 1)."""

    slope: float
    fit: float


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """The line through (seconds, value) points; None of fewer than two different times."""
    if len(points) < 2:
        return None
    t0 = points[0][0]
    xs, ys = [t - t0 for t, _ in points], [y for _, y in points]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    sxx = sum((x - mx) ** 2 for x in xs)
    syy = sum((y - my) ** 2 for y in ys)
    if sxx == 0:
        return None
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sxx
    explained = slope * slope * sxx / syy if syy else 1.0
    return Line(slope, min(1.0, explained))


def middle(values: Iterable[float]) -> float:
    """The median; 0 of nothing."""
    kept = list(values)
    return median(kept) if kept else 0.0
