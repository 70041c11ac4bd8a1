"""`SshHost`: a machine behind ssh, on paramiko. Connections are opened at the first call and used again by all threads.

The rule here: the connection's end is an error of its own (ConnectionLost), the deadline's end another, and neither is
ever an exit code.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_ops.errors import ConnectionLost, HostError, NotRoot
from dflash_ops.hosts.base import Completed, Conversation
from dflash_ops.hosts.converse import Spoken, Told
from dflash_ops.hosts.failed import command_failed, fetch_tail, too_late
from dflash_ops.hosts.wrap import KILL_S, Held, Marks, check, feed, for_terminal, quote, wrap

if TYPE_CHECKING:
    from dflash_ops.hosts.keys import Keyring

#: Seconds that making a connection may take within a call, and at most.
CONNECT_S = 30.0

#: Bytes of standard error that a failed stream repeats.
STDERR_TAIL = 8192

#: Commands with a longer deadline end as soon as nobody listens any more.
LIFELINE_S = 30.0


class SshHost:
    """A machine behind ssh.

    Args:
        name: what messages call it.
        address: name or address, also looked up in the ssh config as `Host`.
        user, port, identity, jump, known_hosts: over what the ssh config says; None or empty: as it says.
        sudo: run everything through `sudo -n`.
        accept_new: take and remember host keys that are not known yet. A changed key is refused all the same.
        config: the ssh config to read; None: ~/.ssh/config.
        keyring: keys and passphrases; None: those of this process.
    """

    holds_stdin = True

    def __init__(
        self,
        name: str,
        address: str,
        *,
        user: str | None = None,
        port: int | None = None,
        identity: str | None = None,
        jump: Sequence[str] = (),
        known_hosts: str | None = None,
        sudo: bool = False,
        accept_new: bool = False,
        config: Path | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.sudo = sudo
        self.accept_new = accept_new
        self._said = {
            "user": user,
            "port": port,
            "identity": identity,
            "jump": tuple(jump),
            "known_hosts": known_hosts,
        }
        self._config = config
        self._keyring = keyring
        self._pool: Any = None
        self._lock = threading.Lock()

    @property
    def _where(self) -> str:
        return f"host {self.name}"

    # -- commands

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        stdin: bytes | Iterable[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Completed:
        """Run `argv` there (see `Host.run`); `env` is added to what sshd gives a session.

        Raises:
            HostUnreachable, ConnectionLost, DeadlineExceeded, NotRoot (sudo).
        """
        until = time.monotonic() + deadline
        lifeline = stdin is None and deadline > LIFELINE_S
        bounded = deadline + KILL_S  # our own clock comes first
        wrapped = wrap(argv, limit=bounded, env=env, cwd=cwd, lifeline=lifeline, empty=stdin is None)
        data = feed(wrapped.lead, stdin)
        if lifeline:
            assert isinstance(data, bytes)
            data = Held(data)
        done = self._run([*self._sudo, *wrapped.argv], data, until, argv, deadline)
        return self._read_end(done, wrapped.marks, argv, deadline)

    def _read_end(self, done: Completed, marks: Marks, argv: Sequence[str], deadline: float) -> Completed:
        """The command's end, out of its wrapper's."""
        begun, rc, stderr = marks.read(done.stderr)
        self._check_sudo(begun, done.rc, stderr)
        if rc is None:
            raise self._unexplained(begun, done.rc, stderr)
        if done.rc == 124 and rc != 124:  # timeout's own code: it ended the command
            raise too_late(self._where, argv, deadline)
        return Completed(tuple(argv), rc, done.stdout, stderr)

    def run_bare(
        self, argv: Sequence[str], *, deadline: float, stdin: bytes | Iterable[bytes] | None = None
    ) -> Completed:
        """As `run`, for a caller that has a wrapper of its own in `argv` (LxcHost): one shell less on the way.

        An `argv` that dies of a signal is ConnectionLost here: sshd tells no code then.
        """
        until = time.monotonic() + deadline
        done = self._run(self._bounded(argv, deadline), stdin, until, argv, deadline)
        self._check_sudo(False, done.rc, done.stderr)
        return done

    def _bounded(self, argv: Sequence[str], deadline: float) -> tuple[str, ...]:
        check(argv, None, None)
        return (*self._sudo, "timeout", "-k", str(KILL_S), f"{deadline + KILL_S:g}", *argv)

    @contextlib.contextmanager
    def converse(self, argv: Sequence[str], *, deadline: float) -> Iterator[Conversation]:
        """Begin `argv`, to be spoken with (see `Host.converse`).

        Raises:
            HostUnreachable, ConnectionLost, DeadlineExceeded, NotRoot (sudo).
        """
        wrapped = wrap(argv, limit=deadline + KILL_S)
        with self._spoken([*self._sudo, *wrapped.argv], argv, deadline) as talk:
            yield Told(talk, lambda done: self._read_end(done, wrapped.marks, argv, deadline), wrapped.lead)

    @contextlib.contextmanager
    def converse_bare(self, argv: Sequence[str], *, deadline: float) -> Iterator[Conversation]:
        """As `converse`, for a caller that has a wrapper of its own in `argv` (see `run_bare`)."""

        def read(done: Completed) -> Completed:
            self._check_sudo(False, done.rc, done.stderr)
            return done

        with self._spoken(self._bounded(argv, deadline), argv, deadline) as talk:
            yield Told(talk, read)

    @contextlib.contextmanager
    def _spoken(self, words: Sequence[str], argv: Sequence[str], deadline: float) -> Iterator[Spoken]:
        until = time.monotonic() + deadline
        with self._session(words, Held(), until, argv, deadline) as call:
            yield Spoken(call, argv, deadline, until, lambda late: too_late(self._where, argv, late))

    def _run(
        self,
        words: Sequence[str],
        stdin: bytes | Iterable[bytes] | None,
        until: float,
        argv: Sequence[str],
        deadline: float,
    ) -> Completed:
        with self._session(words, stdin, until, argv, deadline) as call:
            while call.turn(until):
                if time.monotonic() >= until:
                    raise too_late(self._where, argv, deadline)
            return Completed(tuple(argv), call.rc, bytes(call.stdout), bytes(call.stderr))

    def stream(self, argv: Sequence[str], *, idle: float, stdin: bytes | None = None) -> Iterator[bytes]:
        """Lines of standard output as they come (see `Host.stream`).

        Raises:
            CommandFailed: it ended with another code than 0. Else as `run`.
        """
        words, marks, data = self._stream_words(argv, stdin)
        until = time.monotonic() + idle
        with self._session(words, data, until, argv, idle) as call:
            more = True
            while more:
                more = call.turn(until)
                *lines, rest = call.stdout.split(b"\n")
                if lines:
                    del call.stdout[: len(call.stdout) - len(rest)]
                    yield from map(bytes, lines)
                    until = time.monotonic() + idle  # what the reader took its time over is not the command's silence
                elif more and time.monotonic() >= until:
                    raise too_late(self._where, argv, idle, line=True)
                del call.stderr[:-STDERR_TAIL]
            if call.stdout:
                yield bytes(call.stdout)
            rc, stderr = call.rc, bytes(call.stderr)
        if rc == 0:
            return
        if marks is not None:
            begun, told, stderr = marks.read_end(stderr)
            self._check_sudo(begun, rc, stderr)
            if told is None:
                raise self._unexplained(begun, rc, stderr)
            rc = told
        raise command_failed(self._where, argv, rc, stderr)

    def fetch(self, path: str, *, deadline: float, limit: int) -> bytes:
        """The last `limit` bytes of a file there.

        Raises:
            CommandFailed: it is not there or cannot be read. Else as `run`.
        """
        return fetch_tail(self, self._where, path, deadline=deadline, limit=limit)

    def terminal(self, argv: Sequence[str]) -> int:
        """Hand this terminal over to `argv` there (a real terminal with this one's size); its exit code.

        Raises:
            HostUnreachable, ConnectionLost.
        """
        from dflash_ops.hosts.terminal import interact

        words = [*self._sudo, *for_terminal(argv)]
        until = time.monotonic() + CONNECT_S
        with self._channel(until, argv, CONNECT_S) as (connection, channel), self._told():
            return interact(connection, channel, _line(words))

    def close(self) -> None:
        """Give all connections back; the next call opens one anew."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    # -- what is sent

    @property
    def _sudo(self) -> tuple[str, ...]:
        return ("sudo", "-n", "--") if self.sudo else ()

    def _stream_words(self, argv: Sequence[str], stdin: bytes | None) -> tuple[list[str], Marks | None, bytes | None]:
        """The command as words, the marks to look for (None: the caller has its own wrapper), and its input."""
        if isinstance(stdin, Held):
            check(argv, None, None)
            return [*self._sudo, *argv], None, stdin
        wrapped = wrap(argv, limit=0, lifeline=stdin is None)
        data = wrapped.lead + (stdin or b"")
        return [*self._sudo, *wrapped.argv], wrapped.marks, Held(data) if stdin is None else data

    def _unexplained(self, begun: bool, rc: int, stderr: bytes) -> HostError:
        """The error for a command whose end was not told."""
        if begun:
            return ConnectionLost(
                f"the command's wrapper ended with {rc} before the command did",
                self._where,
                "the kernel's log there may say more (OOM); look before you repeat",
            )
        said = stderr.decode("utf-8", "replace").strip()[:300]
        return HostError(
            f"no command can be run there: exit code {rc}" + (f": {said}" if said else ""),
            self._where,
            "a login shell, a POSIX sh and timeout(1) of coreutils are needed there",
        )

    def _check_sudo(self, begun: bool, rc: int, stderr: bytes) -> None:
        if not self.sudo or begun or rc not in (1, 127):
            return
        found = re.search(rb"(?m)^(?:[\w/]+: (?:\d+: |line \d+: )?)?sudo: .*$", stderr)
        if found is not None:
            raise NotRoot(
                f"sudo refuses: {found[0].decode('utf-8', 'replace')}",
                self._where,
                "allow it in sudoers without a password, or connect as root",
            )

    # -- connections

    @contextlib.contextmanager
    def _session(
        self,
        words: Sequence[str],
        stdin: bytes | Iterable[bytes] | None,
        until: float,
        argv: Sequence[str],
        seconds: float,
    ) -> Iterator[Any]:
        """A call that runs; closed at the end."""
        from dflash_ops.hosts.channel import Call

        with self._channel(until, argv, seconds) as (connection, channel), self._told():
            call = Call(connection, channel, _line(words), stdin)
            try:
                yield call
            finally:
                call.close()

    @contextlib.contextmanager
    def _channel(self, until: float, argv: Sequence[str], seconds: float) -> Iterator[tuple[Any, Any]]:
        pool = self._open_pool()
        connection, channel = pool.take(until, lambda: too_late(self._where, argv, seconds))
        try:
            yield connection, channel
        finally:
            with contextlib.suppress(OSError, EOFError):
                channel.close()
            pool.give_back(connection)

    def _open_pool(self) -> Any:
        from dflash_ops.hosts.pool import Pool
        from dflash_ops.hosts.sshconfig import SshConfig

        with self._lock:
            if self._pool is None:
                hops = SshConfig(self._config).way(self.address, **self._said)  # type: ignore[arg-type]
                self._pool = Pool(hops, self.name, accept_new=self.accept_new, keyring=self._keyring)
            return self._pool

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the connection, with this host's name."""
        try:
            yield
        except HostError as error:
            if not error.where:
                error.where = self._where
            raise


def _line(words: Sequence[str]) -> bytes:
    """One command line for the login shell there, whichever it is: each word in single quotes where it needs any."""
    return b"exec " + b" ".join(_word(w) for w in words)


def _word(word: str) -> bytes:
    if word and all(c.isascii() and (c.isalnum() or c in "_@%+:,./-") for c in word):
        return word.encode()
    return quote(word)
