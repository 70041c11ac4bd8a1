"""Many progress lines as few points: each stands for as many lines, with mean, least and most of every number.

The rules here: memory is bounded whatever comes; a number that is not finite is counted and never averaged away; a life
that begins, a step back and a stretch without lines end a point, so that nobody draws a line across them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

#: Numbers of a line that become curves.
KEYS = ("loss", "acc", "tau", "block_tok_s", "ctx_tok_s", "lr", "grad_norm", "rate", "ring_ready")

#: Numbers of which it is told where they are none.
_JUDGED = frozenset({"loss", "tau"})

#: Parts of a worker's time, in the order in which a point has them.
SHARES = ("compute", "copy", "sync", "wait")

#: Single things that are kept, such as a worker's restarts; of more only the count is told.
MOST = 100

#: Workers of one run whose shares are kept.
WORKERS = 64

#: A stretch without lines is one of so many usual distances (of steps, or of seconds and more than so many).
GAP = 10.0
GAP_S = 60.0

#: Distances that "usual" is the middle of, and how often it is found anew.
_RECENT = 65
_ANEW = 32


class _Point:
    __slots__ = ("cut", "lines", "numbers", "step", "t", "workers")

    def __init__(self, step: int, t: float | None, cut: bool) -> None:
        self.step, self.t, self.cut, self.lines = [step, step], [t, t], cut, 0
        self.numbers: dict[str, list[float]] = {}  # count, sum, least, most
        self.workers: dict[str, list[float]] = {}  # count, then the sum of each share

    def add(self, step: int, t: float | None) -> None:
        self.step[1], self.t[1] = step, t
        self.lines += 1

    def number(self, key: str, value: float) -> None:
        known = self.numbers.get(key)
        if known is None:
            self.numbers[key] = [1, value, value, value]
            return
        known[0] += 1
        known[1] += value
        if value < known[2]:
            known[2] = value
        elif value > known[3]:
            known[3] = value

    def merge(self, other: _Point) -> None:
        self.step[1], self.t[1] = other.step[1], other.t[1]
        self.lines += other.lines
        for key, (count, total, least, most) in other.numbers.items():
            mine = self.numbers.setdefault(key, [0, 0.0, least, most])
            mine[:] = [mine[0] + count, mine[1] + total, min(mine[2], least), max(mine[3], most)]
        for name, sums in other.workers.items():
            known = self.workers.setdefault(name, [0.0] * len(sums))
            known[:] = [a + b for a, b in zip(known, sums, strict=True)]

    def told(self) -> dict[str, Any]:
        out: dict[str, Any] = {"step": self.step, "t": self.t, "lines": self.lines}
        if self.cut:
            out["cut"] = True
        for key, (count, total, least, most) in self.numbers.items():
            # a sum of numbers at a double's edge may be none any more
            mean = total / count if math.isfinite(total) else least / 2 + most / 2
            out[key] = [_short(mean), _short(least), _short(most)]
        if self.workers:
            out["workers"] = {
                name: [_short(value / sums[0]) for value in sums[1:]] for name, sums in self.workers.items() if sums[0]
            }
        return out


def _short(value: float) -> float:
    return min(max(float(f"{value:.5g}"), -1.79e308), 1.79e308)


class Thin:
    """Lines in, in the order of the file; at most `points` points out.

    Args:
        points: at least 2.
    """

    def __init__(self, points: int) -> None:
        self._most = max(2, points)
        self._width = 1  # lines that make a point
        self._points: list[_Point] = []
        self._last: tuple[int, float | None, int] | None = None  # step, t, life
        self._usual = [_Usual(), _Usual()]
        self._names: set[str] = set()
        self.lines = 0
        self.bad_lines = 0
        self.not_finite: dict[str, list[int]] = {}  # key -> count, first step
        self.lives: list[dict[str, Any]] = []
        self.lives_count = 0
        self.gaps: list[dict[str, Any]] = []
        self.gaps_count = 0
        self._skipped = False
        self._newest: Mapping[str, Any] = {}

    def skip(self) -> None:
        """What follows is no neighbour of what was (a part of the file was left out)."""
        self._skipped = True

    def add(self, record: Mapping[str, Any]) -> None:
        """One line; what has no step tells nothing."""
        step, t, life = _whole(record.get("step")), _time(record.get("t")), _whole(record.get("life")) or 0
        if step is None:
            self.bad_lines += 1
            return
        self.lines += 1
        cut = self._cut(step, t, life)
        self._last = (step, t, life)
        if cut or not self._points or self._points[-1].lines >= self._width:
            if len(self._points) >= 2 * self._most:
                self._halve()
            if cut or not self._points or self._points[-1].lines >= self._width:
                self._points.append(_Point(step, t, cut))
        self._newest = record
        point = self._points[-1]
        point.add(step, t)
        for key in KEYS:
            if key not in record:
                continue
            value = record[key]
            if type(value) is not float or value - value != 0.0:  # the common case first, without a call
                value = _number(value)
            if value is not None:
                point.number(key, value)
            elif key in _JUDGED:
                self._odd(key, step)
        # shares cost the most to add up, and are the least sharp: of wide points every so many lines will do
        if self._width < 8 or self.lines % (self._width // 4) == 0:
            self._shares(point, record.get("workers"))

    def _cut(self, step: int, t: float | None, life: int) -> bool:
        if self._skipped:
            self._skipped = False
            self._last = None
            return bool(self._points)
        if self._last is None:
            return False
        before, before_t, before_life = self._last
        steps = step - before
        seconds = t - before_t if t is not None and before_t is not None else 0.0
        if life > before_life or steps < 0:
            self.lives_count += 1
            if len(self.lives) < MOST:
                self.lives.append({"step": step, "from": before, "t": t, "life": life})
            return True
        wide = self._usual[0].far(steps, 0.0)
        long = self._usual[1].far(seconds, GAP_S)
        if wide or long:
            self.gaps_count += 1
            if len(self.gaps) < MOST:
                self.gaps.append({"steps": [before, step], "t": [before_t, t], "seconds": round(seconds, 3)})
        return wide

    def _odd(self, key: str, step: int) -> None:
        known = self.not_finite.setdefault(key, [0, step])
        known[0] += 1

    def _shares(self, point: _Point, workers: Any) -> None:
        if not isinstance(workers, dict):
            return
        for name, shares in workers.items():
            if name not in self._names:
                if len(self._names) >= WORKERS:
                    continue
                self._names.add(name)
            if not isinstance(shares, dict):
                continue
            sums = point.workers.setdefault(name, [0.0] * (1 + len(SHARES)))
            values = [_number(shares.get(share)) for share in SHARES]
            if all(value is not None and 0.0 <= value <= 1.0 for value in values):
                sums[0] += 1
                for at, value in enumerate(values, 1):
                    sums[at] += value or 0.0

    def _halve(self) -> None:
        """Two neighbours become one, unless a cut lies between them; where cuts are too many they go, too."""
        self._width *= 2
        kept: list[_Point] = []
        for point in self._points:
            if kept and not point.cut and kept[-1].lines + point.lines <= self._width:
                kept[-1].merge(point)
            else:
                kept.append(point)
        self._points = kept if len(kept) <= self._most * 3 // 2 else _pairs(kept)

    def last(self) -> dict[str, float | None]:
        """What the newest line says beside the curves."""
        return {key: _number(self._newest.get(key)) for key in ("step", "total", "epoch", "samples", "t")}

    def points(self) -> list[dict[str, Any]]:
        """At most as many as were asked for."""
        if len(self._points) > self._most:
            self._halve()
        if len(self._points) > self._most:
            self._points = _pairs(self._points)
        return [point.told() for point in self._points]


def _pairs(points: list[_Point]) -> list[_Point]:
    """Every two become one, cuts or not."""
    for at in range(0, len(points) - 1, 2):
        points[at].merge(points[at + 1])
    return points[::2]


class _Usual:
    """The middle of the last distances."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._middle: float | None = None
        self._left = 0

    def far(self, distance: float, least: float) -> bool:
        """Whether it is far from what is usual (then it is not remembered)."""
        far = self._middle is not None and distance > max(GAP * self._middle, least)
        if not far and distance > 0:
            self._recent.append(distance)
        self._left -= 1
        if self._left <= 0 and len(self._recent) >= 8:
            self._middle = sorted(self._recent)[len(self._recent) // 2]
            self._left = _ANEW
        return far


def _number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if -(10**300) < value < 10**300 else None
    return None


def _time(value: Any) -> float | None:
    """Seconds since the epoch, of a clock that can be meant."""
    t = _number(value)
    return t if t is not None and 0.0 <= t < 1e11 else None


def _whole(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
        return value
    return None
