"""The loop's guard: a process that does nothing but wait for the loop's death, and then starts it again.

    loop --(pipe, written once at a clean end)--> guard        loop dead, pipe silent: guard becomes the loop's starter
    guard dead: the loop forks another at its next look

The rule here: it costs nothing while all is well (it sleeps in a read), holds no lock, and cannot be mistaken: end of
file without the farewell byte is a loop that was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

#: Seconds before a killed loop is started again, and between two guards that died.
PAUSE_S = 0.3
FORK_EVERY_S = 5.0


class Guard:
    """
    Args:
        argv: what starts a loop (it makes a daemon of itself, and ends at once where one runs).
        needed: asked when the loop was killed: is there still something to watch?
    """

    def __init__(self, argv: list[str], needed: Callable[[], bool]) -> None:
        self._argv = argv
        self._needed = needed
        self._pid = 0
        self._pipe = -1
        self._forked = float("-inf")

    def keep(self) -> None:
        """Called at every look: has a guard if there is none."""
        if self._pid:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                    return
            os.close(self._pipe)
            self._pid = 0
        if time.monotonic() - self._forked < FORK_EVERY_S:
            return
        self._forked = time.monotonic()
        read, self._pipe = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            _guard(read, self._argv, self._needed)
        os.close(read)

    def farewell(self) -> None:
        """A clean end: nobody is to be started."""
        if self._pid:
            with contextlib.suppress(OSError):
                os.write(self._pipe, b".")
            os.close(self._pipe)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


def _guard(read: int, argv: list[str], needed: Callable[[], bool]) -> None:
    """In the child; never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # meant for the loop; its end is what counts
        # The loop's lock above all: held here it would keep the next loop out.
        for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if fd > 2 and fd != read:
                with contextlib.suppress(OSError):
                    os.close(fd)
        if os.read(read, 1):
            os._exit(0)
        time.sleep(PAUSE_S)
        if not needed():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.execv(argv[0], argv)
    finally:
        os._exit(1)
