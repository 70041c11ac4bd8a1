"""How fast something goes, and how long it still takes: `12.0 MiB of 40.0 MiB, 3.1 MiB/s, 9 s left`. Pure.

The rule here: a rate is told once there is one to tell (something moved, for a while), and never guessed from nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dflash_ops.view.text import duration, size

#: Seconds that a rate looks back: an upload that slows down shows it soon.
LOOK_BACK_S = 20.0

#: Seconds before a first rate: what the buffers swallow at once is no rate.
SETTLE_S = 0.5


class Pace:
    """What was done when, of something with an end.

    Args:
        unit: what is counted, plural; empty for bytes. clock: seconds, monotonic.
    """

    def __init__(self, unit: str, clock: Callable[[], float]) -> None:
        self.unit = unit
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque()
        self.done = self.total = 0.0

    def update(self, done: float, total: float) -> None:
        """`done` of `total` now; a step back (another file, a second try) begins anew."""
        now = self._clock()
        if done < self.done or total != self.total:
            self._seen.clear()
        self.done, self.total = done, total
        if not self._seen or now - self._seen[-1][0] >= 0.1:  # a few points a second are enough
            self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > LOOK_BACK_S:
            self._seen.popleft()

    @property
    def share(self) -> float | None:
        """0 to 1, None where the end is not known."""
        return min(1.0, self.done / self.total) if self.total > 0 else None

    @property
    def rate(self) -> float | None:
        """Units a second over the last 20 s; None where there is none to tell. A stand-still lowers it."""
        if not self._seen:
            return None
        since, begun = self._seen[0]
        passed = self._clock() - since
        return (self.done - begun) / passed if passed >= SETTLE_S and self.done > begun else None

    def text(self) -> str:
        """How far, how fast, how long still."""
        if self.unit:
            parts = [f"{self.done:.0f} of {self.total:.0f} {self.unit}"]
        else:
            parts = [f"{size(int(self.done))} of {size(int(self.total))}"]
        if self.done < self.total and (rate := self.rate) is not None:
            parts.append(f"{rate:.1f} {self.unit}/s" if self.unit else f"{size(int(rate))}/s")
            parts.append(f"{duration((self.total - self.done) / rate + 0.5)} left")
        return ", ".join(parts)
