"""How far a command has come, on standard error: a bar on a terminal, a plain line every two seconds elsewhere.

The rule here: one bar a command, from its first moment to its last; what it does changes by `phase`, and within
`alive` nothing is silent for more than two seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_EVERY_S = 2.0
TERMINAL_EVERY_S = 0.1
#: On a terminal a line that nobody has moved is drawn anew after this, with the seconds it has waited.
TERMINAL_BEAT_S = 0.5
_WIDTH = 24


class Bar:
    """Shows `done` of `total` units with rate and time left. Nothing appears before the first unit; close it.

    Args:
        label: what is being done, a few words.
        total: units in all; 0 where there is nothing to count, only something to wait for. unit: their name, plural.
        done: units that an earlier run had done already; the rate counts only this run's.
        text: what is done at first, where nothing is counted yet.
        stream, clock: standard error and the monotonic clock, passed in by tests.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str,
        *,
        done: int = 0,
        text: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = float("-inf")
        self._lock = threading.RLock()
        self._begin(label, total, unit, done, text)

    def _begin(self, label: str, total: int, unit: str, done: int, text: str = "") -> None:
        self._label, self._total, self._unit = label, total, unit
        self._first, self._done = done, done
        self._start = self._clock()
        self._text = text
        self._bytes = 0
        self._poll: Callable[[], int] | None = None

    def phase(
        self, label: str, total: int, unit: str, *, done: int = 0, text: str = "", poll: Callable[[], int] | None = None
    ) -> None:
        """Something else is being done from now on, in other units.

        Args:
            poll: asked within `alive` how many units are done, where nobody says it (the size of a file being written).
        """
        with self._lock:
            self._begin(label, total, unit, done, text)
            self._poll = poll

    def update(self, done: int, text: str = "") -> None:
        """`done` units are done now; `text` is what else is worth knowing (a loss, tokens a second)."""
        with self._lock:
            self._done, self._text = done, text
            every = TERMINAL_EVERY_S if self._terminal else PLAIN_EVERY_S
            if self._clock() - self._shown >= every or (done == self._total and not self._poll):
                self._show()

    def count(self, done: int, total: int, text: str) -> None:
        """`update` for those who tell the total each time; a new one is a new count."""
        with self._lock:
            if total != self._total:
                self._begin(self._label, total, self._unit, done)
        self.update(done, text)

    def add(self, more: int) -> None:
        """`more` bytes are done; the phase's units are MiB. Shown within `alive`, if it lasts."""
        with self._lock:
            self._bytes += more
            self._done = self._bytes >> 20

    def clear(self) -> None:
        """Takes the line off a terminal, so that something else can stand there."""
        with self._lock:
            if self._terminal and self._shown > float("-inf"):
                self._stream.write("\r\x1b[K")
                self._stream.flush()
                self._shown = float("-inf")

    def say(self, text: str) -> None:
        """A line of its own, kept; the bar goes on below it."""
        with self._lock:
            self.clear()
            self._stream.write(text + "\n")
            self._stream.flush()

    def weights(self, done: int, of: int) -> None:
        """What `load_target` tells, as words behind the present count."""
        self.update(self._done, f"loading the target: {done} of {of} weights")

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Within it the bar speaks every two seconds also while a single step (loading, a long forward) lasts longer;
        it is closed at the end, whatever happened."""
        ended = threading.Event()
        every = TERMINAL_BEAT_S if self._terminal else PLAIN_EVERY_S

        def beat() -> None:
            while not ended.wait(every / 20):
                with self._lock:
                    if self._clock() - max(self._shown, self._start) >= every:
                        if self._poll is not None:
                            self._done = self._poll()
                        self._show()

        thread = threading.Thread(target=beat, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(5)
            self.close()

    def start(self, done: int | None = None) -> None:
        """The work itself begins now: what came before (loading; `done` units) does not count for the rate."""
        self._start = self._clock()
        if done is not None:
            self._first = self._done = done

    def close(self) -> None:
        """Ends the line on a terminal, so that what follows does not overwrite it."""
        if self._terminal and self._shown > float("-inf"):
            self._stream.write("\n")
            self._stream.flush()
            self._shown = float("-inf")

    def _show(self) -> None:
        """Draws what is known; under the lock."""
        now = self._clock()
        self._shown = now
        elapsed = now - self._start
        new = self._done - self._first
        rate = new / elapsed if elapsed > 0 and new else 0.0
        parts = [f"{self._done}/{self._total} {self._unit}"] if self._total else []
        if rate:
            parts.append(f"{rate:.1f}/s" if rate >= 0.1 else f"{1 / rate:.0f} s each")
            left = (self._total - self._done) / rate
            parts.append(f"{duration(left)} left" if self._done < self._total else f"took {duration(elapsed)}")
        if self._text:
            parts.append(self._text)
        if not rate and elapsed >= 1:
            parts.append(f"({duration(elapsed)})")
        line = f"{self._label}: " + "  ".join(parts)
        if self._terminal:
            filled = _WIDTH * self._done // max(1, self._total)
            drawn = f"{'█' * filled}{'░' * (_WIDTH - filled)} {line}"
            # A line that is wider than the terminal would be drawn below itself again and again.
            self._stream.write(f"\r\x1b[K{drawn[: max(20, shutil.get_terminal_size().columns - 1)]}")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """12 -> '12s', 75 -> '1m15s', 4000 -> '1h06m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
