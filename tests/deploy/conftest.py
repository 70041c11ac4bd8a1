"""A foreign 20-line trainer as a job of its own inventory, with its own tmux socket; all of it ended afterwards."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ending import end_supervisors, kill_recorded
from ports import free_port
from schemas import whole

from dflash_ops.cli.main import run

TRAINER = """\
import os, signal, sys, time
root, total, pause = os.environ["HERE"], int(sys.argv[1]), float(sys.argv[2])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1) if "DEAF" not in os.environ else None)
for step in range(1, total + 1):
    time.sleep(pause)
    print(f"it {step}/{total} loss {4.0 / step:.3f}", flush=True)
    if os.path.exists(root + "/crash"):
        raise RuntimeError("asked to crash")
    if os.path.exists(root + "/finish"):
        break
    if stop:
        os.makedirs(root + "/checkpoints", exist_ok=True)
        open(root + f"/checkpoints/step-{step:08d}", "w").close()
        sys.exit(3)
print("all done")
"""


#: The real one: `python3` may be a version manager's script that takes a while to find it.
PYTHON = os.path.realpath(sys.executable)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        said = dict(json.loads(self.out))
        whole().validate(said)  # whatever a command answers, one document describes it
        return said


@dataclass
class Toy:
    """One job on this machine and the command line to it."""

    folder: Path
    root: Path
    socket: str
    capfd: pytest.CaptureFixture[str]
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory.toml"

    def write(self, **changes: Any) -> None:
        """The inventory, with the job's keys changed (None removes one)."""
        from dflash_ops.deploy.toml import dump_toml

        self.job = {k: v for k, v in {**self.job, **changes}.items() if v is not None}
        document = {"schema": 1, "hosts": {"here": {"kind": "local", "python": PYTHON}}, "jobs": {"toy": self.job}}
        self.inventory.write_text(dump_toml(document), "utf-8")

    def ops(self, *args: str) -> Outcome:
        """One command of dflash-ops, in this process."""
        self.capfd.readouterr()
        own = () if args[0] == "checkpoints" else ("-i", str(self.inventory))
        code = run([args[0], *own, *args[1:]])
        seen = self.capfd.readouterr()
        return Outcome(code, seen.out, seen.err)

    def ask(self, *args: str) -> Outcome:
        """A command as it is; standard error is wherever it is now."""
        self.capfd.readouterr()
        code = run(list(args))
        seen = self.capfd.readouterr()
        return Outcome(code, seen.out, seen.err)

    def spawn(self, *args: str) -> subprocess.Popen[str]:
        """One command in a process of its own, its output on pipes."""
        argv = [sys.executable, "-m", "dflash_ops.cli.main", args[0], "-i", str(self.inventory), *args[1:]]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.ops("status", "--json").json["jobs"][0])

    def until(self, what: Callable[[dict[str, Any]], bool], seconds: float = 20.0) -> dict[str, Any]:
        """The first status that fits."""
        end = time.monotonic() + seconds
        while True:
            found = self.status
            if what(found):
                return found
            assert time.monotonic() < end, found
            time.sleep(0.1)

    def record(self, attempt: int, name: str) -> dict[str, Any]:
        return dict(json.loads((self.root / "run/attempts" / str(attempt) / f"{name}.json").read_text()))

    @property
    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / "run/journal.jsonl").read_text().splitlines()]

    def tmux(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TMUX", "NO_COLOR"))}
        return subprocess.run(["tmux", "-L", self.socket, *args], capture_output=True, text=True, env=env, timeout=20)

    def shows(self, session: str, *words: str, seconds: float = 30.0) -> str:
        """What a terminal of 80x24 shows once all the words are on it."""
        end = time.monotonic() + seconds
        while True:
            screen = self.tmux("capture-pane", "-p", "-t", f"={session}:").stdout
            if all(word in screen for word in words):
                return screen
            assert time.monotonic() < end, screen
            time.sleep(0.1)

    @property
    def session_there(self) -> bool:
        return self.tmux("has-session", "-t", "=toy").returncode == 0

    def gone(self, pid: int, seconds: float = 10.0) -> None:
        """The process ends, or has ended."""
        end = time.monotonic() + seconds
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < end, pid
            time.sleep(0.05)

    def nothing_started(self) -> None:
        """No release switched, no session, no attempt, no upload that looks complete."""
        assert not os.path.lexists(self.root / "current")
        assert not self.session_there
        attempts = self.root / "run/attempts"
        assert not attempts.is_dir() or not list(attempts.iterdir())
        assert not list(self.root.glob("releases/.incoming-*"))


@pytest.fixture
def toy(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("dflash_ops.deploy.window.STEADY_S", 0.3)
    source = tmp_path / "src"
    source.mkdir()
    (source / "train.py").write_text(TRAINER)
    made = Toy(tmp_path, tmp_path / "root", f"dflash-test-{secrets.token_hex(4)}", capfd)
    made.write(
        host="here",
        root=str(made.root),
        session="toy",
        socket=made.socket,
        source=str(source),
        command=[PYTHON, "{release}/train.py", "1000", "0.1"],
        progress=r"it (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)",
        env={"HERE": "{root}"},
        grace_s=10,
        watch_s=20,
    )
    try:
        yield made
    finally:
        _end(made)


@dataclass
class Pair(Toy):
    """A job of two nodes on this machine, `big`; `root` is node 0's."""

    @property
    def roots(self) -> tuple[Path, Path]:
        return self.folder / "n0", self.folder / "n1"

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return list(self.status["nodes"])

    def checkpoints(self, what: str, *args: str) -> Outcome:
        return self.ops("checkpoints", what, "-i", str(self.inventory), *args)

    def attempt(self, node: int, number: int, name: str) -> dict[str, Any]:
        path = self.roots[node] / "run/attempts" / str(number) / f"{name}.json"
        return dict(json.loads(path.read_text()))

    def write(self, **changes: Any) -> None:
        from dflash_ops.deploy.toml import dump_toml

        self.job = {k: v for k, v in {**self.job, **changes}.items() if v is not None}
        hosts = {name: {"kind": "local", "python": PYTHON} for name in ("a", "b")}
        self.inventory.write_text(dump_toml({"schema": 1, "hosts": hosts, "jobs": {"big": self.job}}), "utf-8")


@pytest.fixture
def pair(toy: Toy) -> Iterator[Pair]:
    made = Pair(toy.folder, toy.folder / "n0", toy.socket, toy.capfd)
    nodes = [{"host": host, "root": str(root)} for host, root in zip("ab", made.roots, strict=True)]
    job = {k: v for k, v in toy.job.items() if k not in ("host", "root", "session")}
    made.write(**job, nodes=nodes, rendezvous=f"127.0.0.1:{free_port()}")
    try:
        yield made
    finally:
        for root in made.roots:
            _end(made, root)


def _end(toy: Toy, root: Path | None = None) -> None:
    end_supervisors(toy.folder)  # a test may have more jobs than one
    toy.tmux("kill-server")
    Path(f"/tmp/tmux-{os.getuid()}/{toy.socket}").unlink(missing_ok=True)
    kill_recorded(root or toy.root)
