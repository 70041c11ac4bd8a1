"""Where a worker's time goes: every moment since it was ready belongs to exactly one of four kinds."""

from __future__ import annotations

import time
from collections.abc import Callable

#: wait: for work, or for a slot. compute: the target or the drafter itself. copy: to and from the ring.
#: sync: with the other drafters, and writing the average.
SHARES = ("wait", "compute", "copy", "sync")


class Stopwatch:
    """Seconds of each kind, together all that have passed since it was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds = dict.fromkeys(SHARES, 0.0)

    def lap(self, kind: str) -> None:
        """All since the last call was of this kind."""
        now = self._clock()
        self._seconds[kind] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """For a message: the launcher adds what has passed since."""
        return dict(self._seconds)
