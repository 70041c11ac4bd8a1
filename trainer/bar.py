"""How far a command has come, on standard error: a bar on a terminal, a plain line every two seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_EVERY_S = 2.0
TERMINAL_EVERY_S = 0.1
_WIDTH = 24


class Bar:
    """Shows `done` of `total` units with rate and time left. Nothing appears before the first unit; close it.

    Args:
        label: what is being done, a few words.
        total: units in all; 0 where there is nothing to count, only something to wait for. unit: their name, plural.
        done: units that an earlier run had done already; the rate counts only this run's.
        stream, clock: standard error and the monotonic clock, passed in by tests.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._first, self._done = done, done
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._start = clock()
        self._shown = float("-inf")
        self._text = ""
        self._lock = threading.RLock()

    def update(self, done: int, text: str = "") -> None:
        """`done` units are done now; `text` is what else is worth knowing (a loss, tokens a second)."""
        self._done, self._text = done, text
        every = TERMINAL_EVERY_S if self._terminal else PLAIN_EVERY_S
        if self._clock() - self._shown >= every or done == self._total:
            self._show(text)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Within it the bar speaks every two seconds also while a single step (loading, a long forward) lasts longer;
        it is closed at the end, whatever happened."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(PLAIN_EVERY_S / 4):
                with self._lock:
                    if self._clock() - self._shown >= PLAIN_EVERY_S:
                        waited = duration(self._clock() - self._start)
                        self._show(f"{self._text}  ({waited})" if self._done == self._first else self._text)

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

    def _show(self, text: str) -> None:
        with self._lock:
            self._show_now(text)

    def _show_now(self, text: str) -> None:
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
        if text:
            parts.append(text)
        line = f"{self._label}: " + "  ".join(parts)
        if self._terminal:
            filled = _WIDTH * self._done // max(1, self._total)
            bar = "█" * filled + "░" * (_WIDTH - filled)
            self._stream.write(f"\r\x1b[K{bar} {line}")
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
