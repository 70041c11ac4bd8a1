"""One child process with its three pipes, moved by one loop under deadlines: what the local host is made of.

The rule here: no read, write or wait blocks. The loop returns when there is something to tell, and a child that is
given up is ended with all of its process group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import IO

from dflash_ops.errors import UsageError
from dflash_ops.hosts.base import PASSPHRASE
from dflash_ops.hosts.wrap import Held

#: Read and write sizes; a pipe holds 64 KiB.
PIECE = 65_536

#: Seconds that a child gets between TERM and KILL once it is given up.
TERM_S = 1.0

#: Seconds to wait for end-of-file once the child itself has exited: a daemon that it left may hold the pipes for ever.
ORPHAN_S = 0.5

#: Seconds between looks at the child where the system has no pidfd.
POLL_S = 0.05


class Child:
    """A running command. `stdout` and `stderr` are what came and was not yet taken.

    Raises:
        OSError: it cannot be started (as subprocess.Popen).
        UsageError: an argument holds a NUL character, which no system can pass on.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] | None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        if not argv or any("\0" in a for a in argv) or any("\0" in k + v for k, v in (env or {}).items()):
            raise UsageError("a command is empty or holds a NUL character", repr(list(argv))[:200], "take it out")
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._source = _pieces(stdin)
        self._held = isinstance(stdin, Held)
        self._unsent = memoryview(b"")
        self.process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**inherited(), **(env or {})},
            cwd=cwd,
            start_new_session=True,  # a process group of its own, so that giving up ends its children too
            bufsize=0,
        )
        self._exited_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._pidfd = _pidfd(self.process.pid)
        for pipe, buffer in ((self.process.stdout, self.stdout), (self.process.stderr, self.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, buffer)
        if self.process.stdin is not None:
            os.set_blocking(self.process.stdin.fileno(), False)
            self._selector.register(self.process.stdin, selectors.EVENT_WRITE)
        if self._pidfd is not None:
            self._selector.register(self._pidfd, selectors.EVENT_READ)

    def say(self, source: Iterator[bytes], *, last: bool) -> None:
        """More input, for a child that was begun with `Held`; with `last` its end comes behind it."""
        self._source, self._held = chain(self._source, source), not last  # behind what is still to be said
        pipe = self.process.stdin
        if pipe is not None and pipe not in self._selector.get_map():
            self._selector.register(pipe, selectors.EVENT_WRITE)

    def turn(self, until: float) -> bool:
        """Move what can be moved, waiting no longer than the monotonic time `until`; False once all is over."""
        if self._over():
            return False
        wait = until - time.monotonic()
        if self._exited_at is not None:
            wait = min(wait, self._exited_at + ORPHAN_S - time.monotonic())
        elif self._pidfd is None:
            wait = min(wait, POLL_S)
        for key, _ in self._selector.select(max(wait, 0.0)):
            if key.fileobj is self.process.stdin:
                self._write()
            elif isinstance(key.data, bytearray):
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        if self._exited_at is None and _gone(self.process):
            self._exited_at = time.monotonic()
            self._drop_pidfd()
        return not self._over()

    def _over(self) -> bool:
        if self._exited_at is None:
            return False
        reading = any(isinstance(k.data, bytearray) for k in self._selector.get_map().values())
        return not reading or time.monotonic() >= self._exited_at + ORPHAN_S

    @property
    def rc(self) -> int:
        """As a shell gives it; only once it is over."""
        code = self.process.wait(TERM_S)
        return 128 - code if code < 0 else code

    def close(self) -> None:
        """End it and its process group if it still runs (TERM, then KILL), and give the pipes back."""
        try:
            if self._exited_at is None:
                self._signal(signal.SIGTERM)
                end = time.monotonic() + TERM_S
                while self._exited_at is None and time.monotonic() < end:
                    self.turn(end)  # keeps the pipes moving: a child that writes its last words must not block
                self._signal(signal.SIGKILL)
            # What still hangs now hangs inside the kernel (a dead mount): nobody can end it, and nobody need wait.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TERM_S)
        finally:
            self._drop_pidfd()
            self._selector.close()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()
            _close_source(self._source)

    def _signal(self, number: signal.Signals) -> None:
        """To the group. Its leader is our own child and not reaped yet, so that the number cannot be another's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all are gone (macOS says EPERM for zombies)
            os.killpg(self.process.pid, number)

    def _drop_pidfd(self) -> None:
        if self._pidfd is not None:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _read(self, pipe: IO[bytes], buffer: bytearray) -> None:
        try:
            piece = os.read(pipe.fileno(), PIECE)
        except BlockingIOError:
            return
        buffer += piece
        if not piece:
            self._selector.unregister(pipe)

    def _write(self) -> None:
        pipe = self.process.stdin
        assert pipe is not None
        try:
            if not self._unsent:
                piece = next(self._source, None)
                if piece is None:
                    self._end_input()
                    return
                self._unsent = memoryview(piece)
            if self._unsent:
                sent = os.write(pipe.fileno(), self._unsent[:PIECE])
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise
            self._end_input()  # it has read what it wanted; its exit code tells the rest

    def _end_input(self) -> None:
        pipe = self.process.stdin
        assert pipe is not None
        self._selector.unregister(pipe)
        if self._held:
            return  # open until `close`: its end would tell the command that nobody listens
        pipe.close()
        self.process.stdin = None


def inherited() -> dict[str, str]:
    """This process's environment, less what is for this process alone."""
    return {name: value for name, value in os.environ.items() if name != PASSPHRASE}


def _pieces(stdin: bytes | Iterable[bytes] | None) -> Iterator[bytes]:
    if stdin is None:
        return iter(())
    return iter((bytes(stdin),)) if isinstance(stdin, (bytes, bytearray, memoryview)) else iter(stdin)


def _close_source(source: Iterator[bytes]) -> None:
    close = getattr(source, "close", None)  # a generator may hold a file open
    if close is not None:
        close()


def _gone(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has exited; where the system can say so without reaping it, its pid stays taken until `close`."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none (macOS, old Linux)."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
