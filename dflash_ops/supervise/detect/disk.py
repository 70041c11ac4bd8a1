"""disk_filling: when the disk will be full.

The rule: a line through the free bytes of the last hour (5 samples and 2 minutes at least) falls, explains half of
their variation, and reaches zero within 6 hours: a warning; within 30 minutes, or less than 1 % and 1 GiB free: an
alarm.
"""

from __future__ import annotations

from collections.abc import Iterable

from dflash_ops.contracts import Finding
from dflash_ops.supervise.detect.history import DiskSample, History, Skipped, fit

NAME = "disk_filling"
WINDOW_S, SPAN_S, NEEDS = 3600.0, 120.0, 5
WARN_S, ALARM_S = 6 * 3600.0, 1800.0
FIT, LOW = 0.5, 1 << 30


def detect(h: History) -> list[Finding] | Skipped:
    if h.disks is None:
        return Skipped(NAME, "the disks could not be asked")
    names = dict.fromkeys(s.path for s in h.disks)
    paths = {path: samples for path in names if (samples := of_path(h.disks, path, h.now))}
    if not paths:
        return Skipped(NAME, "no sample of a disk yet")
    return [finding for path, samples in paths.items() if (finding := _one(path, samples, h.now)) is not None]


def _one(path: str, samples: list[DiskSample], now: float) -> Finding | None:
    newest = samples[-1]
    left = time_to_full(samples)
    low = newest.free < LOW and newest.free < newest.total * 0.01
    if not low and (left is None or left > WARN_S):
        return None
    alarm = low or (left is not None and left <= ALARM_S)
    when = f", full in {_span(left)} at this pace" if left is not None else ""
    text = f"{path}: {newest.free / (1 << 30):.1f} GiB free of {newest.total / (1 << 30):.0f}{when}"
    numbers = {"free": float(newest.free), **({"seconds_to_full": left} if left is not None else {})}
    return Finding(NAME, text, now, worker=path, severity="alarm" if alarm else "warn", numbers=numbers)


def of_path(samples: Iterable[DiskSample], path: str, now: float) -> list[DiskSample]:
    """The samples of one disk that are young enough to judge by."""
    return [s for s in samples if s.path == path and now - s.t <= WINDOW_S]


def time_to_full(samples: list[DiskSample]) -> float | None:
    """Seconds from the newest sample on; None where the free bytes do not fall steadily."""
    if len(samples) < NEEDS or samples[-1].t - samples[0].t < SPAN_S:
        return None
    line = fit([(s.t, float(s.free)) for s in samples])
    if line is None or line.slope >= 0 or line.fit < FIT:
        return None
    return max(0.0, samples[-1].free / -line.slope)


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"
