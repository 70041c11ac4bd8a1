"""A terminal that counts what it is told, so that slow work can last until it has shown itself: no clock decides.

A stand-in for something slow (a host, a loader, a server) calls `until_told()`: it goes on once the command has written
three times more. A command that is silent while it waits makes that fail.
"""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import termios
import threading
from collections.abc import Iterator
from typing import TextIO


class Counting:
    """A pseudo-terminal: `stream` writes into it, `text` is what a person saw, `writes` how often something came."""

    def __init__(self, terminal: bool = True) -> None:
        self._outer, inner = pty.openpty() if terminal else os.pipe()
        if terminal:
            termios.tcsetwinsize(inner, (24, 100))
        self.stream: TextIO = open(inner, "w", encoding="utf-8")  # noqa: SIM115
        self.text, self.writes = "", 0
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end of a pseudo-terminal was closed
            while piece := os.read(self._outer, 1 << 16):
                with self._more:
                    self.text += piece.decode("utf-8", "replace")
                    self.writes += 1
                    self._more.notify_all()

    def until_told(self, times: int = 3, seconds: float = 20.0) -> None:
        """Returns once something was written `times` more; fails where nothing comes."""
        with self._more:
            enough = self.writes + times
            assert self._more.wait_for(lambda: self.writes >= enough, seconds), f"silent after: {self.text!r}"

    def close(self) -> str:
        """All that was told."""
        self.stream.close()
        self._reader.join(20.0)  # it ends with what was on its way
        with contextlib.suppress(OSError):
            os.close(self._outer)
        return self.text


@contextlib.contextmanager
def standard_error(terminal: bool = True) -> Iterator[Counting]:
    """Standard error is such a terminal (or a pipe that counts) meanwhile; standard output stays what it is."""
    counting, before = Counting(terminal), sys.stderr
    sys.stderr = counting.stream
    try:
        yield counting
    finally:
        sys.stderr = before
        counting.close()
