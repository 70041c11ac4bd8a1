"""`LocalHost`: this machine, by child processes, with the same promises as any other host."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dflash_ops.errors import CommandFailed, DeadlineExceeded
from dflash_ops.hosts.base import Completed, Conversation
from dflash_ops.hosts.converse import Ended, Spoken
from dflash_ops.hosts.failed import too_late
from dflash_ops.hosts.pump import Child, inherited
from dflash_ops.hosts.words import show
from dflash_ops.hosts.wrap import Held

#: Bytes of standard error that a failed stream repeats.
STDERR_TAIL = 8192


class LocalHost:
    """This machine. `name` is what messages call it."""

    holds_stdin = True

    def __init__(self, name: str = "local") -> None:
        self.name = name

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        stdin: bytes | Iterable[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Completed:
        """Run `argv` to its end (see `Host.run`); `env` is added to this process's own environment.

        A command that cannot be run is a result, as in a shell: 127 not found, 126 not executable or no such `cwd`.
        A daemon that the command leaves behind is not waited for, even if it keeps the pipes open.

        Raises:
            DeadlineExceeded: it took longer; it and its process group were ended.
        """
        until = time.monotonic() + deadline
        try:
            child = Child(argv, stdin=stdin, env=env, cwd=cwd)
        except OSError as error:
            return Completed(tuple(argv), _start_rc(error, cwd), b"", _start_text(error, argv, cwd).encode() + b"\n")
        try:
            while child.turn(until):
                if time.monotonic() >= until:
                    raise DeadlineExceeded(
                        f"no answer within {deadline:g} s from: {show(argv)}",
                        f"host {self.name}",
                        "the command was ended; see what holds it up there, or repeat with more time",
                    )
            return Completed(tuple(argv), child.rc, bytes(child.stdout), bytes(child.stderr))
        finally:
            child.close()

    @contextlib.contextmanager
    def converse(self, argv: Sequence[str], *, deadline: float) -> Iterator[Conversation]:
        """Begin `argv`, to be spoken with (see `Host.converse`); one that cannot be run ended with 126 or 127.

        Raises:
            DeadlineExceeded.
        """
        until = time.monotonic() + deadline
        try:
            child = Child(argv, stdin=Held())
        except OSError as error:
            said = _start_text(error, argv, None).encode() + b"\n"
            yield Ended(Completed(tuple(argv), _start_rc(error, None), b"", said))
            return
        try:
            yield Spoken(child, argv, deadline, until, lambda late: too_late(f"host {self.name}", argv, late))
        finally:
            child.close()

    def stream(self, argv: Sequence[str], *, idle: float, stdin: bytes | None = None) -> Iterator[bytes]:
        """Lines of standard output as they come (see `Host.stream`).

        Raises:
            DeadlineExceeded: no line for `idle` seconds. CommandFailed: it ended with another code than 0.
        """
        try:
            child = Child(argv, stdin=stdin)
        except OSError as error:
            raise CommandFailed(
                _start_text(error, argv, None), f"host {self.name}", "install it there", rc=_start_rc(error, None)
            ) from None
        try:
            until = time.monotonic() + idle
            more = True
            while more:
                more = child.turn(until)
                *lines, rest = child.stdout.split(b"\n")
                if lines:
                    del child.stdout[: len(child.stdout) - len(rest)]
                    yield from map(bytes, lines)
                    until = time.monotonic() + idle  # what the reader took its time over is not the command's silence
                elif more and time.monotonic() >= until:
                    raise DeadlineExceeded(
                        f"no line within {idle:g} s from: {show(argv)}",
                        f"host {self.name}",
                        "the command was ended; look whether it still has something to say",
                    )
                del child.stderr[:-STDERR_TAIL]
            if child.stdout:
                yield bytes(child.stdout)
            if child.rc != 0:
                raise _failed(self.name, argv, child.rc, bytes(child.stderr))
        finally:
            child.close()

    def fetch(self, path: str, *, deadline: float, limit: int) -> bytes:
        """The last `limit` bytes of a file. By a child process, so that a dead mount cannot hold us past the deadline.

        Raises:
            CommandFailed: it is not there or cannot be read. DeadlineExceeded.
        """
        argv = ["tail", "-c", str(limit), "--", path]
        done = self.run(argv, deadline=deadline)
        if done.rc != 0:
            raise CommandFailed(
                f"{path} cannot be read: {done.error_text.strip()}",
                f"host {self.name}",
                "see whether it is there and may be read",
                rc=done.rc,
                stderr=done.error_text,
            )
        return done.stdout

    def terminal(self, argv: Sequence[str]) -> int:
        """Hand this terminal over to `argv` until it ends; its exit code, as a shell gives it."""
        before = signal.getsignal(signal.SIGINT)
        # Ctrl-C belongs to the program that has the terminal now.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process = subprocess.Popen(
                list(argv), env=inherited(), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
            )
            code = process.wait()
        except OSError as error:
            print(_start_text(error, argv, None), file=sys.stderr)
            return _start_rc(error, None)
        finally:
            signal.signal(signal.SIGINT, before)
        return 128 - code if code < 0 else code

    def close(self) -> None:
        """Nothing is held open."""


def _start_rc(error: OSError, cwd: str | None) -> int:
    missing = isinstance(error, FileNotFoundError) and (cwd is None or error.filename != cwd)
    return 127 if missing else 126


def _start_text(error: OSError, argv: Sequence[str], cwd: str | None) -> str:
    if cwd is not None and error.filename == cwd:
        return f"cannot enter {cwd}: {error.strerror}"
    return f"{argv[0]}: {error.strerror}"


def _failed(host: str, argv: Sequence[str], rc: int, stderr: bytes) -> CommandFailed:
    text = stderr.decode("utf-8", "replace").strip()
    return CommandFailed(
        f"exit code {rc} from: {show(argv)}" + (f"\n{text[-1000:]}" if text else ""),
        f"host {host}",
        "read what it says above" if text else "run it by hand there",
        rc=rc,
        stderr=text,
    )
