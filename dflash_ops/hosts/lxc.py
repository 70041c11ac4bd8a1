"""`LxcHost`: a container of a Proxmox host, by `pct exec` through any other host.

The rule here: one call is one exec. Only when its end cannot be explained is `pct status` asked as well.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dflash_ops.errors import (
    CommandFailed,
    ConnectionLost,
    ContainerStopped,
    DeadlineExceeded,
    HostError,
)
from dflash_ops.hosts import pct
from dflash_ops.hosts.base import Completed, Conversation, Host
from dflash_ops.hosts.converse import Told
from dflash_ops.hosts.failed import command_failed, fetch_tail, too_late
from dflash_ops.hosts.wrap import Held, Marks, feed, for_terminal, wrap

#: What pct and the command get instead of the Proxmox host's own environment, which pct hands on as it is. LC_ALL
#: silences perl's words about locales, and keeps pct from spoiling what is not ASCII. PATH is set once more behind pct,
#: which has its own.
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLEAN = (
    PATH,
    "HOME=/root",
    "USER=root",
    "LOGNAME=root",
    "SHELL=/bin/sh",
    "LANG=C.UTF-8",
    "LC_ALL=C.UTF-8",
)

#: Seconds that the way (ssh, pct, lxc-attach) gets beyond the command's own deadline before it is given up itself.
WAY_S = 1.0

#: Commands with a longer deadline end as soon as nobody listens any more.
LIFELINE_S = 30.0

#: Seconds for `pct status`, and until it is asked again where a kill has just been seen.
STATUS_S = 15.0
SETTLE_S = 1.0


class LxcHost:
    """Container `container` of the Proxmox host behind `via`. Closing it closes `via`."""

    def __init__(self, name: str, via: Host, container: int) -> None:
        self.name = name
        self.via = via
        self.container = container

    @property
    def _where(self) -> str:
        return f"host {self.name} (container {self.container} on {self.via.name})"

    @property
    def _holds(self) -> bool:
        return bool(getattr(self.via, "holds_stdin", False))

    @property
    def _run(self) -> Callable[..., Completed]:
        """The way to run pct: its wrapper is ours, so that one of `via` would be one too many."""
        run: Callable[..., Completed] = getattr(self.via, "run_bare", self.via.run)
        return run

    def _pct(self, *words: str) -> tuple[str, ...]:
        return ("env", "-i", *CLEAN, "pct", *words)

    def _exec(self, words: Sequence[str]) -> tuple[str, ...]:
        return self._pct("exec", str(self.container), "--", *words)

    # -- one command

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        stdin: bytes | Iterable[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Completed:
        """Run `argv` in the container (see `Host.run`); without `cwd` in /, with a clean environment and `env`.

        Raises:
            ContainerMissing, ContainerStopped, ContainerLocked, NotProxmox, NotRoot: as pct says.
            HostError: the way to the Proxmox host. DeadlineExceeded.
        """
        lifeline = stdin is None and deadline > LIFELINE_S and self._holds
        wrapped = wrap(argv, limit=deadline, env=env, cwd=cwd, lifeline=lifeline, empty=stdin is None, top=True)
        data = feed(wrapped.lead, stdin)
        if lifeline:
            assert isinstance(data, bytes)
            data = Held(data)
        sent = data if data or stdin is not None or lifeline else None
        try:
            done = self._run(self._exec(wrapped.argv), deadline=deadline + WAY_S, stdin=sent)
        except DeadlineExceeded:
            raise too_late(self._where, argv, deadline) from None
        except HostError as error:
            raise self._with_us(error) from None
        return self._read_end(done, wrapped.marks, argv, deadline)

    @contextlib.contextmanager
    def converse(self, argv: Sequence[str], *, deadline: float) -> Iterator[Conversation]:
        """Begin `argv` in the container, to be spoken with (see `Host.converse`).

        Raises:
            As `run`.
        """
        wrapped = wrap(argv, limit=deadline, top=True)
        begin = getattr(self.via, "converse_bare", self.via.converse)
        try:
            with begin(self._exec(wrapped.argv), deadline=deadline + WAY_S) as talk:
                yield Told(
                    talk,
                    lambda done: self._read_end(done, wrapped.marks, argv, deadline),
                    wrapped.lead,
                    lambda late: too_late(self._where, argv, late),
                )
        except HostError as error:
            raise self._with_us(error) from None

    def _read_end(self, done: Completed, marks: Marks, argv: Sequence[str], deadline: float) -> Completed:
        """The command's end, out of its wrapper's and pct's."""
        begun, rc, stderr = marks.read(done.stderr)
        if rc is None:
            if begun and done.rc == 124:
                raise too_late(self._where, argv, deadline)
            raise self._unexplained(begun, done.rc, stderr)
        if done.rc == 124 and rc != 124:  # timeout's own code: it ended the command
            raise too_late(self._where, argv, deadline)
        return Completed(tuple(argv), rc, done.stdout, stderr)

    def _unexplained(self, begun: bool, rc: int, stderr: bytes) -> HostError:
        """The error for a command whose end was not told: pct's words, else what `pct status` says."""
        said = stderr.decode("utf-8", "replace")
        if not begun and (error := pct.error_of(said, rc, self.container, self.via.name)) is not None:
            if isinstance(error, ContainerStopped):
                error.where = self._where
            return error
        status = self._status()
        if rc == 137 and status == "running":
            time.sleep(SETTLE_S)  # killed, and pct may not know yet that all of the container was
            status = self._status()
        if status is not None and status != "running":
            what = "the container was stopped while the command ran" if begun else "the container does not run"
            return ContainerStopped(what, self._where, f"start it there: pct start {self.container}")
        if begun:
            return ConnectionLost(
                f"pct exec ended with {rc} before the command did",
                self._where,
                "the kernel's log there may say more (OOM); what the command did until then is done: look before "
                "you repeat",
            )
        return pct.other(said, rc, self.container, self.via.name)

    def _status(self) -> str | None:
        try:
            done = self._run(self._pct("status", str(self.container)), deadline=STATUS_S)
        except HostError:
            return None  # the first error is the one to tell
        return pct.status_of(done.text)

    def _with_us(self, error: HostError) -> HostError:
        """An error of the Proxmox host, with the container's name in its place."""
        if self.name not in error.where:
            error.where = f"{error.where}, on the way to {self.name}" if error.where else self._where
        return error

    # -- a stream

    def stream(self, argv: Sequence[str], *, idle: float, stdin: bytes | None = None) -> Iterator[bytes]:
        """Lines of standard output as they come (see `Host.stream`).

        Raises:
            CommandFailed: it ended with another code than 0. Else as `run`.
        """
        lifeline = stdin is None and self._holds
        wrapped = wrap(argv, limit=0, lifeline=lifeline, empty=stdin is None, top=True)
        data = wrapped.lead + (stdin or b"")
        sent = Held(data) if lifeline else data or None
        lines = self.via.stream(self._exec(wrapped.argv), idle=idle, stdin=sent)
        try:
            yield from lines
        except DeadlineExceeded:
            raise too_late(self._where, argv, idle, line=True) from None
        except CommandFailed as error:
            raise self._stream_error(error, wrapped.marks, argv) from None
        except HostError as error:
            raise self._with_us(error) from None
        finally:
            with contextlib.suppress(AttributeError):
                lines.close()  # type: ignore[attr-defined]

    def _stream_error(self, error: CommandFailed, marks: Marks, argv: Sequence[str]) -> CommandFailed | HostError:
        begun, rc, stderr = marks.read_end(error.stderr.encode())
        if rc is not None:
            return command_failed(self._where, argv, rc, stderr)
        return self._unexplained(begun, error.rc, stderr)

    # -- the rest

    def fetch(self, path: str, *, deadline: float, limit: int) -> bytes:
        """The last `limit` bytes of a file in the container.

        Raises:
            CommandFailed: it is not there or cannot be read. Else as `run`.
        """
        return fetch_tail(self, self._where, path, deadline=deadline, limit=limit)

    def terminal(self, argv: Sequence[str]) -> int:
        """Hand this terminal over to `argv` in the container; its exit code (or pct's own)."""
        term = os.environ.get("TERM") or "xterm"
        words = ("env", PATH, f"TERM={term}", *for_terminal(argv))
        return self.via.terminal(self._exec(words))

    def close(self) -> None:
        self.via.close()
