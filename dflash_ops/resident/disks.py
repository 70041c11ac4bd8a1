"""Free bytes of the job's disks, asked by a process of their own.

The rule here: a dead mount holds whoever asks for it, in a sleep that nobody can end; so the loop asks by a child that
it can leave alone. A child holds nothing of the loop's, its lock above all.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Seconds that the loop waits for an answer that comes at once; what takes longer is read at a later look.
QUICK_S = 0.05

#: Seconds after which a child is killed, and a disk counts as one that does not answer.
PATIENCE_S = 10.0


@dataclass(frozen=True)
class Room:
    """The file system of `path`: its device, bytes free and in all; no device where it could not be asked."""

    path: str
    device: int | None = None
    free: int = 0
    total: int = 0


class Disks:
    """
    Args:
        places: folders; what is not there is left out of the answer. clock: monotonic seconds.
    """

    def __init__(self, places: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._pid = 0
        self._pipe = -1
        self._begun = 0.0
        self._killed = False

    @property
    def silent(self) -> bool:
        """Whether one of them does not answer."""
        return bool(self._pid) and (self._killed or self._clock() - self._begun > PATIENCE_S)

    def ask(self) -> list[Room] | None:
        """Ask, unless a question is still open; the answer if it comes at once."""
        if not self._pid:
            self._begin()
            return self.look(QUICK_S)
        return self.look()

    def look(self, seconds: float = 0.0) -> list[Room] | None:
        """The answer to an open question, once it is there; None: there is none yet, or no question."""
        if not self._pid:
            return None
        if not self._killed and select.select([self._pipe], [], [], seconds)[0]:
            said = os.read(self._pipe, 1 << 16)  # one write of less than a pipe's size: it comes whole
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)  # it has said all, or ended: nothing can hold it any more
            self._end()
            return [Room(*one) for one in json.loads(said)] if said else [Room(str(self._places[-1]))]
        if self.silent:
            self._kill()
        return None

    def close(self) -> None:
        """Leave an open question alone."""
        if self._pid:
            self._kill()
            if self._pid:
                self._end()

    def _begin(self) -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        self._begun, self._killed = self._clock(), False
        self._pid = os.fork()
        if self._pid == 0:
            _answer(self._places, write)
        os.close(write)
        self._pipe = read

    def _kill(self) -> None:
        """It may be beyond that: then it stays the open question until it is gone."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                return
        self._end()

    def _end(self) -> None:
        os.close(self._pipe)
        self._pid = 0


def _answer(places: Sequence[Path], write: int) -> None:
    """In the child; never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if fd != write:
                with contextlib.suppress(OSError):
                    os.close(fd)
        found: list[tuple[str, int | None, int, int]] = []
        for place in places:
            try:
                device, info = place.stat().st_dev, os.statvfs(place)
            except FileNotFoundError:
                continue
            except OSError:
                found.append((str(place), None, 0, 0))
                continue
            found.append((str(place), device, info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize))
        os.write(write, json.dumps(found).encode())
    finally:
        os._exit(0)
