"""TERM and INT as bytes on a socket, so that the launcher's loop meets them where it waits. Imports no torch: they are
owned from the first moment on, also while data is read and torch is imported."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import TracebackType

STOP = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context in which TERM and INT do nothing but wait to be read."""

    def __enter__(self) -> StopSignals:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _nothing) for number in STOP}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()

    def read(self) -> list[signal.Signals]:
        """Those that came since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(n) for n in self.reader.recv(64) if n in STOP]
        return []

    def waiting(self) -> bool:
        """Whether there are any to be read; they stay."""
        with contextlib.suppress(BlockingIOError):
            return any(n in STOP for n in self.reader.recv(64, socket.MSG_PEEK))
        return False


def _nothing(number: int, frame: object) -> None:
    """A handler must exist for the wakeup descriptor to be written to."""
