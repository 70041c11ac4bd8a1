"""`Host`: the small protocol that every way to a machine implements (local, ssh, lxc, fake).

The rule here: no call waits without a deadline, an argv is never a shell string, and a connection that is lost is an
error of its own and never an exit code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Completed:
    """A command that ran to its end. `rc` as a shell gives it: 128+N for a signal, 126/127 for what cannot be run."""

    argv: tuple[str, ...]
    rc: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True)
class Sent:
    """What a `send_tree` did: files and bytes that travelled, and files that were there already."""

    files: int
    bytes: int
    kept: int


#: Environment variable with a passphrase for ssh keys. No command that is run gets it.
PASSPHRASE = "DFLASH_SSH_PASSPHRASE"


class Conversation(Protocol):
    """A command that was begun by `Host.converse`: what it answers may decide what it is told next."""

    def ask(self, pieces: Iterable[bytes], *, deadline: float) -> bytes:
        """Write `pieces` to its standard input and give the next line of its output that is not empty (no newline).

        Empty if it ended before: then `end` tells why. No line for `deadline` seconds is DeadlineExceeded.
        """
        ...

    def end(self) -> Completed:
        """Close its standard input and wait for its end; the result holds the output that was not asked for."""
        ...


class Host(Protocol):
    """One machine (or container), reached in one step.

    Every method raises `HostUnreachable` (no connection), `ConnectionLost` (it went away during the call) or
    `DeadlineExceeded`; what a command itself says is in `Completed`, never an exception.
    """

    name: str

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        stdin: bytes | Iterable[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Completed:
        """Run `argv` (no shell) and wait at most `deadline` seconds; the command is ended if it takes longer."""
        ...

    def converse(self, argv: Sequence[str], *, deadline: float) -> AbstractContextManager[Conversation]:
        """Begin `argv`, to be spoken with for at most `deadline` seconds in all; leaving the block ends it."""
        ...

    def stream(self, argv: Sequence[str], *, idle: float, stdin: bytes | None = None) -> Iterator[bytes]:
        """Lines of standard output as they come (no newline); `idle` seconds without one are DeadlineExceeded.

        Closing the iterator ends the command. A command that ends with another code than 0 raises CommandFailed.
        """
        ...

    def fetch(self, path: str, *, deadline: float, limit: int) -> bytes:
        """A file's bytes, at most `limit` of its end."""
        ...

    def terminal(self, argv: Sequence[str]) -> int:
        """Hand this terminal over to `argv` there (attach); its exit code."""
        ...

    def close(self) -> None:
        """Give the connection back; the host may be used again afterwards."""
        ...
