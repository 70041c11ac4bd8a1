"""Where the trainer's bytes go: the log, which must be whole, and the pane, which is only for looking.

The rule here: neither ever blocks for long and neither ever raises. Bytes that a full disk refuses are counted.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Log:
    """The attempt's raw log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.kept_bytes = 0
        self.lost_bytes = 0
        self._open()

    def _open(self) -> None:
        # A log that cannot be opened is lost bytes, not a reason to end a trainer; it is tried again at each write.
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        if self._fd < 0:
            self._open()
        view = memoryview(data)
        while view:
            try:
                done = os.write(self._fd, view) if self._fd >= 0 else 0
            except OSError:
                done = 0
            if done <= 0:
                self.lost_bytes += len(view)
                return
            self.kept_bytes += done
            view = view[done:]

    def sync(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd >= 0:
                os.fsync(self._fd)


class Mirror:
    """The pane. Its terminal may be stopped (Ctrl-S, a frozen tmux) or gone: what does not fit is dropped, and told."""

    LIMIT = 1 << 18

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._backlog = bytearray()
        self._dropped = 0
        self._gone = False
        with contextlib.suppress(OSError):
            os.set_blocking(fd, False)

    @property
    def waiting(self) -> bool:
        return bool(self._backlog) and not self._gone

    def write(self, data: bytes) -> None:
        if self._gone:
            return
        room = self.LIMIT - len(self._backlog)
        if len(data) > room:
            self._dropped += len(data) - max(room, 0)
            data = data[: max(room, 0)]
        self._backlog += data
        self.flush()

    def flush(self) -> None:
        """Give the terminal what it takes now."""
        while self._backlog and not self._gone:
            try:
                done = os.write(self._fd, self._backlog)
            except BlockingIOError:
                return
            except OSError:  # EIO: the tmux server is gone, and with it the terminal
                self._gone = True
                self._backlog.clear()
                return
            del self._backlog[:done]
            if not self._backlog and self._dropped:
                self._backlog += f"\n[{self._dropped} bytes are in the log only]\n".encode()
                self._dropped = 0
