"""The watch from outside: what is said, once, and what is never done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.cli.main import run
from dflash_ops.cli.supervise import Watch
from dflash_ops.contracts import Progress, Snapshot, State, dumps
from dflash_ops.errors import ContainerLocked, ContainerStopped, DflashError, HostUnreachable
from dflash_ops.hosts.base import Completed
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.hosts.local import LocalHost
from dflash_ops.inventory import load
from dflash_ops.resident import proc
from dflash_ops.tell import outside

DOWN = ContainerStopped("the container does not run", "container 200 on proxmox", "")
CUT = HostUnreachable("no route to 192.0.2.6", "host proxmox")


class Inside(LocalHost):
    """The container: this machine, unless the way to it is at fault."""

    fault: DflashError | None = None

    def run(self, *args: Any, **more: Any) -> Completed:
        if self.fault is not None:
            raise self.fault
        return super().run(*args, **more)


class Proxmox(FakeHost):
    """The host below: a kernel log, and a pct that starts the container."""

    dmesg = ""
    status = "stopped"
    starts = 0

    def __init__(self, inside: Inside) -> None:
        super().__init__("proxmox")
        self._inside = inside

    def run(self, argv: Any, **more: Any) -> Completed:
        if self._inside.fault is CUT:
            raise CUT
        if argv[:2] == ["sh", "-s"]:
            up = time.monotonic()
            lines = "".join(f"[{up:.6f}] {line}\n" for line in self.dmesg.splitlines())
            said = f"now {time.time():.0f}\nup {up}\n\n{argv[3]} clock\n{lines}\n{argv[3]} dmesg\n"
            said += f"\n{argv[3]} journal\n\n{argv[3]} memory\n"
            return Completed(tuple(argv), 0, said.encode(), b"")
        if argv[-3:-1] == ["pct", "status"]:
            return Completed(tuple(argv), 0, f"status: {self.status}\n".encode(), b"")
        assert argv[-3:] == ["pct", "start", "200"], argv
        self.starts += 1
        self._inside.fault = None
        return Completed(tuple(argv), 0, b"", b"")


class Place:
    """A job in a container, its files on this machine, and the watch of it."""

    def __init__(self, folder: Path, allow: str = '"ct_down:start_container"') -> None:
        self.root = folder / "job"
        (self.root / "run").mkdir(parents=True)
        self.inventory = folder / "inventory.toml"
        self.inventory.write_text(
            'schema = 1\n[hosts.proxmox]\nkind = "ssh"\naddress = "192.0.2.6"\n'
            '[hosts.gpu]\nkind = "lxc"\nvia = "proxmox"\nid = 200\n'
            f'[jobs.train]\nhost = "gpu"\nroot = {json.dumps(str(self.root))}\ncommand = ["true"]\n'
            f"progress = '(?P<step>x)'\npolicy = {{ allow = [{allow}] }}\n"
        )
        self.inside = Inside("gpu")
        self.proxmox = Proxmox(self.inside)
        me = proc.stat(os.getpid())
        assert me is not None
        self.me = {"pid": os.getpid(), "start": me.start}
        (self.root / "run/resident.json").write_text(json.dumps(self.me))
        self.watch = self.new_watch()

    def new_watch(self) -> Watch:
        loaded = load(self.inventory)
        return Watch(loaded, {"gpu": self.inside, "proxmox": self.proxmox}, loaded.job("train"), "")

    def is_at(self, state: State, step: int = 10, attempt: int = 1, age: float = 0.0) -> None:
        now = time.time() - age
        progress = Progress(t=now, step=step)
        snapshot = Snapshot("train", now, state, now, "so it is", attempt=attempt, progress=progress)
        (self.root / "run/snapshot.json").write_text(dumps(snapshot))

    def look(self) -> list[str]:
        """What is said, without its time."""
        return [text.split(" train: ", 1)[1] for text in self.watch.look()]

    def journal(self) -> list[str]:
        (folder,) = (Path(os.environ["XDG_STATE_HOME"]) / "dflash-ops/supervise").iterdir()
        path = folder / "journal.jsonl"
        return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Place]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("APPRISE_URLS", raising=False)
    monkeypatch.setattr(outside, "UP_S", 0.0)
    return lambda **more: Place(tmp_path, **more)


def test_a_link_cut_during_a_crash_leaves_unreachable_since_and_nothing_else(place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.STEPPING)
    assert one.look() == []
    one.is_at(State.CRASHED)
    one.inside.fault = CUT
    (said,) = one.look()
    assert said.startswith("unreachable since 20")
    assert one.watch.code == 5
    for _ in range(3):
        assert one.look() == []
    assert one.watch.row()[2] == "unreachable"
    assert (one.proxmox.starts, one.journal()) == (0, [])
    one.inside.fault = None
    crashed, over = sorted(one.look())
    assert crashed.startswith("crashed since ")
    assert over.startswith("no longer unreachable")
    assert one.watch.code == 1
    assert (one.proxmox.starts, one.journal()) == (0, [])


def test_a_stopped_container_is_started_once_where_allowed_and_again_only_after_progress(
    place: Callable[..., Place],
) -> None:
    one = place()
    one.is_at(State.STEPPING, step=10)
    one.look()
    one.inside.fault = DOWN
    said = one.look()
    assert said[0].startswith("container stopped since ")
    assert said[1] == "the container was started: pct start 200 (on proxmox)"
    assert one.journal() == ["diagnosed", "action_intended", "action_done"]
    assert one.look()[0].startswith("no longer container stopped")
    one.inside.fault = DOWN  # it stops again, and nothing was gained
    assert any("nothing is done" in text for text in one.look())
    assert one.look() == []
    assert one.proxmox.starts == 1
    one.inside.fault = None
    one.is_at(State.STEPPING, step=11, attempt=2)
    one.look()
    assert one.journal()[-2:] == ["action_outcome", "progress"]
    one.inside.fault = DOWN
    one.look()
    assert one.proxmox.starts == 2


@pytest.mark.parametrize("why", ["not allowed", "stopped by a person", "locked", "never seen", "seen long ago", "runs"])
def test_a_container_is_never_started(why: str, place: Callable[..., Place]) -> None:
    one = place(allow="" if why == "not allowed" else '"ct_down:start_container"')
    one.is_at(State.STOPPED if why == "stopped by a person" else State.STEPPING)
    if why != "never seen":
        one.look()
    if why == "seen long ago":
        seen = one.watch._memory.seen
        assert seen is not None
        object.__setattr__(seen, "t", seen.t - 3600)
    if why == "runs":
        one.proxmox.status = "running"  # by now: the word of a minute ago counts nothing
    one.inside.fault = ContainerLocked("locked by: backup", "", "") if why == "locked" else DOWN
    said = [text for _ in range(3) for text in one.look()]
    assert one.proxmox.starts == 0
    reasons = {
        "not allowed": 'it needs allow = ["ct_down:start_container"]',
        "stopped by a person": "is stopped: nothing to repair",
        "never seen": "what the job did before its container stopped could not be had",
        "seen long ago": "what the job did before its container stopped could not be had",
        "runs": "pct says that it is running, not stopped",
        "locked": "locked by: backup",
    }
    assert sum(reasons[why] in text for text in said) == 1, said
    assert one.watch.code == 1


def test_a_dead_supervisor_is_told_and_not_touched(place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.STEPPING, age=45.0)
    (said,) = one.look()
    assert "resident dead since" in said
    assert "lives: its last look is 4" in said
    one.is_at(State.STEPPING)
    (one.root / "run/resident.json").write_text(json.dumps({**one.me, "start": 1}))  # its pid is another's now
    assert one.look() == []
    assert one.watch.code == 1
    (one.root / "run/resident.json").write_text(json.dumps(one.me))
    lease = {"schema": 1, "token": 3, "owner": "resident", "t": 0, "expires": time.time() + 60, **one.me}
    (one.root / "run/lease").write_text(json.dumps(lease))
    assert one.look()[0].startswith("no longer resident dead")
    assert one.watch.row()[4] == "resident"


def test_lines_of_the_kernel_are_told_once(place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.STEPPING)
    one.proxmox.dmesg = "NVRM: Xid (PCI:0000:01:00): 31, old"
    assert one.look() == []  # what was there before is no news
    one.proxmox.dmesg = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
    (said,) = one.look()
    assert said.startswith("kernel log: Xid 79 of card PCI:0000:01:00")


def test_what_was_said_is_known_to_the_next_run_and_two_at_once_are_refused(place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.CRASHED)
    assert len(one.look()) == 1
    with pytest.raises(DflashError, match="another supervise"):
        one.new_watch()
    one.watch.close()
    one.watch = one.new_watch()
    assert one.look() == []
    assert one.watch.code == 1
    (one.root / "run/snapshot.json").write_text("{")
    assert "cannot be judged" in one.look()[0]
    assert one.look() == []
    assert one.watch.code == 6


def test_what_cannot_be_written_down_is_not_done(place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.STEPPING)
    one.look()
    (folder,) = (Path(os.environ["XDG_STATE_HOME"]) / "dflash-ops/supervise").iterdir()
    (folder / "journal.jsonl").mkdir()
    one.inside.fault = DOWN
    said = one.look()
    assert said[0].startswith("container stopped")
    assert "nothing is done: " in said[1]
    assert one.proxmox.starts == 0


def test_once_for_cron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    got = tmp_path / "got"
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin/apprise"
    stand_in.write_text(f'#!/bin/sh\n{{ printf "%s\\n" "$@"; cat; }} >> {got}\nexit 0\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("APPRISE_URLS", "mailto://ada:hunter2@192.0.2.9")
    root = tmp_path / "job"
    (root / "run").mkdir(parents=True)
    now = time.time()
    snapshot = Snapshot("j", now, State.CRASHED, now, "exit code 1", attempt=2)
    (root / "run/snapshot.json").write_text(dumps(snapshot))
    inventory = tmp_path / "inventory.toml"
    inventory.write_text(
        f'schema = 1\n[hosts.here]\nkind = "local"\n[jobs.j]\nhost = "here"\nroot = {json.dumps(str(root))}\n'
        "command = [\"true\"]\nprogress = '(?P<step>x)'\n"
    )
    assert run(["supervise", "--once", "-i", str(inventory)]) == 1
    assert "j: crashed since " in capsys.readouterr().out
    words = got.read_text()
    assert "--title=j: crashed since " in words
    assert "attempt 2 crashed: exit code 1" in words
    assert "hunter2" not in words
    assert run(["supervise", "--once", "-i", str(inventory), "j"]) == 1
    assert capsys.readouterr().out == ""
    assert got.read_text() == words
    assert run(["supervise", "--once", "-i", str(inventory), "nojob"]) == 2
    done = subprocess.run(
        [sys.executable, "-m", "dflash_ops.cli.main", "supervise", "--interval", "x"], capture_output=True, timeout=60
    )
    assert done.returncode == 2
