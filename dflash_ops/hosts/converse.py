"""A command that is spoken with: something is said on its standard input, a line comes back, and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from dflash_ops.errors import DeadlineExceeded, HostError
from dflash_ops.hosts.base import Completed, Conversation


class Running(Protocol):
    """A command that runs, moved by `turn`: `pump.Child` and `channel.Call`, begun with `Held` as their input."""

    stdout: bytearray
    stderr: bytearray

    def turn(self, until: float) -> bool: ...
    def say(self, source: Iterator[bytes], *, last: bool) -> None: ...
    @property
    def rc(self) -> int: ...


class Spoken:
    """`base.Conversation` over a command that runs here (local) or behind ssh.

    Args:
        until: monotonic time at which all of it must be over. late: the error for a wait of so many seconds too long.
    """

    def __init__(
        self, running: Running, argv: Sequence[str], seconds: float, until: float, late: Callable[[float], HostError]
    ) -> None:
        self._running, self._argv, self._seconds, self._until, self._late = running, argv, seconds, until, late
        self._over = False

    def ask(self, pieces: Iterable[bytes], *, deadline: float) -> bytes:
        """See `base.Conversation.ask`."""
        self._running.say(iter(pieces), last=False)
        until = time.monotonic() + deadline
        if until > self._until:
            until, deadline = self._until, self._seconds
        stdout = self._running.stdout
        while True:
            if stdout.startswith(b"\n"):  # empty lines: a shell there that greets everybody
                del stdout[: len(stdout) - len(stdout.lstrip(b"\n"))]
            if (end := stdout.find(b"\n")) >= 0:
                break
            if self._over:
                return b""
            if time.monotonic() >= until:
                raise self._late(deadline)
            self._over = not self._running.turn(until)
        line = bytes(stdout[:end])
        del stdout[: end + 1]
        return line

    def end(self) -> Completed:
        """See `base.Conversation.end`."""
        self._running.say(iter(()), last=True)
        while not self._over:
            if time.monotonic() >= self._until:
                raise self._late(self._seconds)
            self._over = not self._running.turn(self._until)
        running = self._running
        return Completed(tuple(self._argv), running.rc, bytes(running.stdout), bytes(running.stderr))


class Ended:
    """`base.Conversation` with a command that could not even begin."""

    def __init__(self, done: Completed) -> None:
        self._done = done

    def ask(self, pieces: Iterable[bytes], *, deadline: float) -> bytes:
        """Nothing: see `end`."""
        return b""

    def end(self) -> Completed:
        """Why."""
        return self._done


class Told:
    """A conversation through a wrapper.

    Args:
        read: makes of the wrapper's end the command's, or raises.
        lead: what the wrapper is told before anything else. late: the error for a wait of so many seconds too long.
    """

    def __init__(
        self,
        inner: Conversation,
        read: Callable[[Completed], Completed],
        lead: bytes = b"",
        late: Callable[[float], HostError] | None = None,
    ) -> None:
        self._inner, self._read, self._lead, self._late = inner, read, lead, late

    def ask(self, pieces: Iterable[bytes], *, deadline: float) -> bytes:
        """See `base.Conversation.ask`."""
        if self._lead:
            pieces, self._lead = chain((self._lead,), pieces), b""
        try:
            return self._inner.ask(pieces, deadline=deadline)
        except DeadlineExceeded:
            if self._late is None:
                raise
            raise self._late(deadline) from None

    def end(self) -> Completed:
        """See `base.Conversation.end`."""
        return self._read(self._inner.end())
