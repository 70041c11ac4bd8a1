"""A resident on this machine: its real zipapp, real tmux (own socket), real processes, one root a test."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ending import end_supervisors  # type: ignore[import-not-found]

from dflash_ops.contracts import Event, JobSpec, Layout, Limits, Process, Snapshot, dumps, from_dict
from dflash_ops.resident import attempts, daemon, journal, proc

FOREIGN = Path(__file__).parent / "foreign.py"
PATTERN = r"it (?P<step>[\d,]+) of (?P<total>[\d,]+) loss=(?P<loss>\S+)"

#: Seconds for anything that should happen soon; only a failing test waits that long.
SOON = 30.0


@dataclass
class Answer:
    rc: int
    out: bytes
    err: bytes

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def error(self) -> dict[str, str]:
        found = self.json["error"]
        assert isinstance(found, dict)
        assert found["what"]
        return found


def wait_for(what: Callable[[], Any], why: str, seconds: float = SOON) -> Any:
    """Poll until `what` gives something true."""
    end = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < end, f"waited {seconds:g} s for: {why}"
        time.sleep(0.02)


@dataclass
class Lab:
    pyz: Path
    root: Path
    control: Path
    socket: str = field(default_factory=lambda: f"dflash-test-{secrets.token_hex(4)}")

    @property
    def layout(self) -> Layout:
        return Layout(self.root)

    def job(self, *args: str, **changes: Any) -> JobSpec:
        values: dict[str, Any] = {
            "job": "tiny",
            "root": str(self.root),
            "session": "trainer",
            "socket": self.socket,
            "argv": (sys.executable, str(FOREIGN), *args),
            "checkpoints": "checkpoints",
            "env": {"CONTROL": str(self.control)},
            "progress": PATTERN,
            "grace_s": 20.0,
            "limits": Limits(),
        }
        return JobSpec(**{**values, **changes})

    def argv(self, command: str, *args: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(self.pyz), command, "--root", str(self.root), *args]

    def run(self, command: str, *args: str, stdin: str = "", env: dict[str, str] | None = None) -> Answer:
        done = subprocess.run(
            self.argv(command, *args), input=stdin.encode(), capture_output=True, timeout=90, env=env, check=False
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def ok(self, command: str, *args: str, stdin: str = "") -> dict[str, Any]:
        answer = self.run(command, *args, stdin=stdin)
        assert answer.rc == 0, (answer.out, answer.err)
        return answer.json

    def start(self, *args: str, **changes: Any) -> dict[str, Any]:
        return self.ok("start", stdin=dumps(self.job(*args, **changes)))

    def ask(self, what: str) -> None:
        (self.control / what).touch()

    def snapshot(self) -> Snapshot:
        return from_dict(Snapshot, self.ok("snapshot"))

    def until(self, what: Callable[[Snapshot], Any], why: str, seconds: float = SOON) -> Snapshot:
        """Ask again and again, as `status` does, until a snapshot shows it."""
        found: list[Snapshot] = []

        def seen() -> bool:
            if (record := daemon.running(self.layout)) is not None:
                proc.send(record.process, signal.SIGUSR1)  # look at once; the tests of the loop itself do not ask it
                time.sleep(0.1)
            # As `snapshot` does, without an interpreter a look; the real command where the file cannot be believed.
            found[:] = [daemon.fresh_snapshot(self.layout) or self.snapshot()]
            return bool(what(found[0]))

        try:
            wait_for(seen, why, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; last: {found[0]}") from None
        return found[0]

    def stepping(self) -> Snapshot:
        return self.until(lambda s: s.progress and s.progress.step and s.state.value == "stepping", "steps")

    def events(self, name: str = "") -> list[Event]:
        return [e for e in journal.read(self.layout.journal)[0] if name in ("", e.event)]

    def launcher(self, number: int = 1) -> Process:
        start = attempts.read(self.layout, number).start
        assert start is not None
        return start.launcher

    def wrapper(self, number: int = 1) -> Process:
        start = attempts.read(self.layout, number).start
        assert start is not None
        return start.wrapper

    def tmux(self, *args: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("TMUX")}
        done = subprocess.run(["tmux", "-L", self.socket, *args], capture_output=True, text=True, env=env, timeout=30)
        return done.stdout

    def has_session(self) -> bool:
        return "trainer" in self.tmux("list-sessions", "-F", "#{session_name}").split()

    def close(self) -> None:
        """End all that was started, each by its record."""
        end_supervisors(self.root)
        subprocess.run(["tmux", "-L", self.socket, "kill-server"], capture_output=True, timeout=30, check=False)
        for number in attempts.numbers(self.layout):
            start = attempts.read(self.layout, number).start
            if start is not None:
                for process in (start.launcher, start.wrapper, *proc.family(start.launcher)):
                    proc.send(process, signal.SIGCONT)
                    proc.send(process, signal.SIGKILL)


@contextlib.contextmanager
def lab(pyz: Path, folder: Path) -> Iterator[Lab]:
    root, control = folder / "root", folder / "control"
    root.mkdir()
    control.mkdir()
    made = Lab(pyz, root, control)
    try:
        yield made
    finally:
        made.close()
