"""tmux through libtmux, with the deadlines that libtmux does not have.

The rules here: an own socket and no user's configuration; an empty answer is believed only after the session was seen;
of a session only our own pane is ever ended. libtmux is imported on first use (80 ms).
"""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.contracts import Process
from dflash_ops.errors import StartError
from dflash_ops.resident import proc

#: Seconds for one call of the tmux client. It takes some ms; a stopped server never answers.
DEADLINE = 8.0
#: Seconds for a mere look, which must not hold up everything else that is known.
LOOK = 2.0

_GONE = ("no server running", "error connecting", "can't find", "no current", "session not found", "server exited")


class TmuxSilent(Exception):
    """tmux did not answer in time: nothing is known."""


@dataclass(frozen=True)
class Answer:
    rc: int
    out: tuple[str, ...]
    err: str

    @property
    def gone(self) -> bool:
        """No server, or no such session: both mean that there is no session."""
        return self.rc != 0 and any(word in self.err for word in _GONE)


@dataclass(frozen=True)
class Pane:
    id: str
    process: int
    server: int
    owner: str


def clean_environment() -> None:
    """Make this process's environment that of a tmux server nobody called from anywhere.

    The server keeps what its first client had: a caller's TMUX_TMPDIR would hide the socket from the next caller, and
    nobody's secrets belong into `show-environment`.
    """
    keep = {k: os.environ[k] for k in ("HOME", "USER", "LOGNAME", "SHELL") if os.environ.get(k)}
    path = os.environ.get("PATH", "")
    os.environ.clear()
    os.environ.update({"HOME": _home(), "LC_ALL": "C.UTF-8", "TERM": "screen"}, **keep)
    extra = [p for p in ("/usr/local/bin", "/usr/bin", "/bin") if p not in path.split(":")]
    os.environ["PATH"] = ":".join(filter(None, [path, *extra]))


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user without a name
        return "/"


class Tmux:
    """One tmux server, by its socket's name."""

    def __init__(self, socket: str) -> None:
        self.socket = socket

    def run(self, *args: str, seconds: float = DEADLINE) -> Answer:
        """One call of the client.

        Raises:
            TmuxSilent: no answer within `seconds`; our client was ended.
            StartError: there is no tmux.
        """
        import libtmux
        from libtmux import exc

        server = libtmux.Server(socket_name=self.socket, config_file="/dev/null")
        box: list[Answer | BaseException] = []

        def work() -> None:
            try:
                said = server.cmd(args[0], *args[1:])
                box.append(Answer(said.returncode, tuple(said.stdout), " ".join(said.stderr)))
            except (exc.LibTmuxException, OSError, ValueError) as error:
                box.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._end_client()
            thread.join(2.0)
            raise TmuxSilent(f"tmux -L {self.socket} {args[0]}: no answer within {seconds:g} s")
        said = box[0]
        if isinstance(said, exc.TmuxCommandNotFound):
            raise StartError("tmux is not installed", os.environ.get("PATH", ""), "apt-get install tmux")
        if isinstance(said, BaseException):
            raise StartError(f"tmux cannot be run: {said}", self.socket, "try `tmux -V` there")
        return said

    def _end_client(self) -> None:
        """libtmux keeps its process to itself, so find our own child by name."""
        for one in proc.every():
            if one.ppid == os.getpid() and one.comm.startswith("tmux"):
                proc.send(one.process, signal.SIGKILL)

    def panes(self, session: str, seconds: float = DEADLINE) -> list[Pane] | None:
        """Panes of a session; None: there is no such session (or no server).

        Raises:
            TmuxSilent: nothing is known.
        """
        form = "#{pane_id} #{pane_pid} #{pid} #{@dflash_root}"
        said = self.run("list-panes", "-s", "-t", f"={session}:", "-F", form, seconds=seconds)
        if said.rc != 0:
            if said.gone:
                return None
            raise TmuxSilent(f"tmux -L {self.socket} list-panes: {said.err or f'exit code {said.rc}'}")
        panes = []
        for line in said.out:
            id, pid, server, owner = line.split(" ", 3)
            panes.append(Pane(id, int(pid), int(server), owner))
        return panes

    def start(self, session: str, argv: list[str], *, root: Path, cwd: Path, history: int) -> None:
        """A detached session with one pane that runs `argv` (no shell).

        One command list: a history limit set after new-session does not reach the pane that it made, and a pane that
        ends before remain-on-exit is set would take the server with it.

        Raises:
            StartError: tmux refused.
        """
        said = self.run(
            *("set-option", "-g", "history-limit", str(history), ";"),
            *("new-session", "-d", "-x", "250", "-y", "50", "-s", session, "-c", _plain(str(cwd))),
            *map(_plain, argv),
            ";",
            *("set-option", "-t", f"={session}:", "@dflash_root", _plain(str(root)), ";"),
            *("set-option", "-w", "-t", f"={session}:", "remain-on-exit", "on"),
        )
        if said.rc != 0:
            raise StartError(
                f"tmux would not start the session: {said.err}",
                f"tmux -L {self.socket}, {session}",
                f"try by hand what it says to: tmux -L {shlex.quote(self.socket)} new-session",
            )

    def end(self, session: str, wrapper: int) -> None:
        """End our pane; a session in which somebody opened more panes stays for them, under another name."""
        panes = self.panes(session)
        if panes is None:
            return
        others = [p for p in panes if p.process != wrapper]
        if not others:
            self.run("kill-session", "-t", f"={session}")
            return
        for pane in panes:
            if pane.process == wrapper:
                self.run("kill-pane", "-t", pane.id)
        self.run("rename-session", "-t", f"={session}", f"{session}-kept-{int(time.time())}")

    def capture(self, session: str) -> str:
        """What the pane shows and has shown, joined over wraps; empty only where the session has nothing or is gone."""
        said = self.run("capture-pane", "-p", "-J", "-S", "-", "-t", f"={session}:")
        return "\n".join(said.out).strip() if said.rc == 0 else ""


#: Seconds for which a session that is not there yet is asked for at every look.
YOUNG_S = 20.0


class SessionProbe:
    """Whether the session lives, asked seldom: a tmux client costs some ms, a look at the server's pid nothing."""

    def __init__(self, socket: str, session: str, every_s: float = 10.0) -> None:
        self._tmux = Tmux(socket)
        self._session = session
        self._every = every_s
        self._server: Process | None = None
        self._asked = float("-inf")
        self._alive: bool | None = None
        self._born = time.monotonic()

    def alive(self) -> bool | None:
        """None: tmux does not answer (or is not there)."""
        now = time.monotonic()
        every = self._every if self._alive is not None else 3 * self._every
        if self._alive is False and now - self._born < YOUNG_S:
            every = 0.0  # an attempt may be looked at before its session is there
        if now - self._asked < every and (self._server is None or proc.alive(self._server)):
            return self._alive
        self._asked = now
        self._server = None
        try:
            panes = self._tmux.panes(self._session, LOOK)
        except (TmuxSilent, StartError):
            self._alive = None
            return None
        self._alive = panes is not None
        if panes:
            found = proc.stat(panes[0].server)
            self._server = found.process if found else None
        return self._alive


def _plain(argument: str) -> str:
    """A trailing semicolon would end tmux's command."""
    return argument[:-1] + "\\;" if argument.endswith(";") else argument
