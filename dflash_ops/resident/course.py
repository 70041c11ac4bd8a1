"""The course of an attempt: curves of at most POINTS points, medians and means since its start, in bounded memory.

The rule here: every progress line costs the same, however long the attempt; what a loop that was killed knew is in
run/curves.json, so that the next one does not begin its curves anew.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field
from typing import ClassVar

from dflash_ops.contracts import Progress

#: What has a curve; the rates of these have a median and a mean.
KEYS = ("loss", "tau", "block_tok_s", "ctx_tok_s")
RATES = ("block_tok_s", "ctx_tok_s")

#: Points of a curve at most; then two of them become one.
POINTS = 120

#: Values kept for a median at most; then every other one is dropped, and every other new one is not taken.
KEPT = 2048

#: Values beyond this are no measurement, and their sums would be infinite, which JSON has not.
LARGEST = 1e100


@dataclass(frozen=True)
class Kept:
    """run/curves.json: `lines` progress lines make a point; `until` = time of the last line that is in it.

    `seconds`, `sums`: what the means are made of: for each rate the seconds that it stands for, and rate x seconds.
    """

    SCHEMA: ClassVar[int] = 1

    attempt: int
    lines: int
    until: float
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    schema: int = 1


class _Curve:
    def __init__(self) -> None:
        self.points: list[float] = []
        self._sum, self._count = 0.0, 0

    def add(self, value: float, lines: int) -> None:
        self._sum += value
        self._count += 1
        if self._count >= lines:
            self.points.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0

    def halve(self, lines: int) -> None:
        """Every two points become one; an odd last one goes back to what is being gathered."""
        if len(self.points) % 2:
            self._sum += self.points[-1] * lines
            self._count += lines
        self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=False)]

    def shown(self) -> tuple[float, ...]:
        rest = [self._sum / self._count] if self._count else []
        return tuple(float(f"{point:.5g}") for point in (*self.points, *rest))


class _Median:
    """The middle of all values so far, of at most KEPT of them, evenly chosen."""

    def __init__(self) -> None:
        self._sorted: list[float] = []
        self._every, self._skipped = 1, 0

    def add(self, value: float) -> None:
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        insort(self._sorted, value)
        if len(self._sorted) > KEPT:
            self._sorted = self._sorted[::2]
            self._every *= 2

    def recall(self, points: list[float], lines: int) -> None:
        """Points that stand for `lines` values each."""
        times = min(lines, KEPT // POINTS - 1)
        self._sorted = sorted(point for point in points for _ in range(times))
        self._every = max(1, lines // times)

    def value(self) -> float | None:
        n = len(self._sorted)
        return None if not n else (self._sorted[(n - 1) // 2] + self._sorted[n // 2]) / 2


class Course:
    """Progress lines in, oldest first; curves and rates since the attempt's start out."""

    def __init__(self) -> None:
        self._lines = 1
        self._until = self._known = float("-inf")
        self._curves = {key: _Curve() for key in KEYS}
        self._medians = {key: _Median() for key in RATES}
        self._seconds = dict.fromkeys(RATES, 0.0)
        self._sums = dict.fromkeys(RATES, 0.0)
        self._first: dict[str, float] = {}
        self.changed = 0

    def add(self, progress: Progress) -> None:
        """One line more. After `recall` those that are known already change nothing, until a newer one comes."""
        if progress.t <= self._known:
            return
        self._known = float("-inf")
        seconds = max(0.0, progress.t - self._until)  # a clock may be set back
        self._until = progress.t
        for key, curve in self._curves.items():
            value = getattr(progress, key)
            if value is None or not abs(value) < LARGEST:  # NaN neither
                continue
            curve.add(value, self._lines)
            if key in self._medians:
                self._medians[key].add(value)
                self._first.setdefault(key, value)
                if math.isfinite(seconds):  # how long the very first one stands for is not known
                    self._seconds[key] += seconds
                    self._sums[key] += value * seconds
        if max(len(curve.points) for curve in self._curves.values()) >= POINTS:
            for curve in self._curves.values():
                curve.halve(self._lines)
            self._lines *= 2
        self.changed += 1

    @property
    def until(self) -> float:
        """Time of the newest line that is in it."""
        return self._until

    def curves(self) -> dict[str, tuple[float, ...]]:
        """Those that have points."""
        return {key: shown for key, curve in self._curves.items() if (shown := curve.shown())}

    def rates(self) -> dict[str, float | None]:
        """`<rate>_median`, `<rate>_mean` (by time), tokens a second; None where no line had the rate."""
        found: dict[str, float | None] = {}
        for key in RATES:
            seconds = self._seconds[key]
            found[f"{key}_median"] = self._medians[key].value()
            found[f"{key}_mean"] = self._sums[key] / seconds if seconds else self._first.get(key)
        return found

    def keep(self, attempt: int) -> Kept:
        return Kept(attempt, self._lines, self._until, self.curves(), dict(self._seconds), dict(self._sums))

    def recall(self, kept: Kept) -> None:
        """Go on from what an earlier loop knew; to be called before the first line."""
        self._lines = max(1, kept.lines)
        self._until = self._known = kept.until
        for key, curve in self._curves.items():
            curve.points = list(kept.curves.get(key, ()))[: POINTS - 1]
        for key in RATES:
            self._seconds[key], self._sums[key] = kept.seconds.get(key, 0.0), kept.sums.get(key, 0.0)
            self._medians[key].recall(self._curves[key].points, self._lines)
