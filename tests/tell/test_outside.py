"""The watch from outside: what is said, once, and what is never done."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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


#: Of the machines; a test may set the operator's clock off by patching `time.time`.
CLOCK = time.time


class Proxmox(FakeHost):
    """The host below: a kernel log (`age`: of its lines, seconds), and a pct that starts the container."""

    dmesg = ""
    age = 0.0
    log_fault: DflashError | None = None
    pct_fault = ""
    status = "stopped"
    starts = 0
    lock = ""
    late_lock = ""
    asked = 0

    def __init__(self, inside: Inside) -> None:
        super().__init__("proxmox")
        self._inside = inside

    def run(self, argv: Any, **more: Any) -> Completed:
        if self._inside.fault is CUT:
            raise CUT
        if argv[:2] == ["sh", "-s"]:
            if self.log_fault is not None:
                raise self.log_fault
            up = time.monotonic()
            lines = "".join(f"[{up - self.age:.6f}] {line}\n" for line in self.dmesg.splitlines())
            said = f"now {CLOCK():.0f}\nup {up}\n\n{argv[3]} clock\n{lines}\n{argv[3]} dmesg\n"
            said += f"\n{argv[3]} journal\n\n{argv[3]} memory\n"
            return Completed(tuple(argv), 0, said.encode(), b"")
        if argv[-3:-1] == ["pct", "status"]:
            if self.pct_fault:
                return Completed(tuple(argv), 2, b"", self.pct_fault.encode())
            return Completed(tuple(argv), 0, f"status: {self.status}\n".encode(), b"")
        if argv[-3:-1] == ["pct", "config"]:
            self.asked += 1
            lock = f"lock: {self.lock}\n" if self.lock else ""
            return Completed(tuple(argv), 0, f"arch: amd64\n{lock}ostype: debian\n".encode(), b"")
        assert argv[-3:] == ["pct", "start", "200"], argv
        if held := self.lock or self.late_lock:
            return Completed(tuple(argv), 255, b"", f"CT is locked ({held})\n".encode())
        self.starts += 1
        self._inside.fault = None
        return Completed(tuple(argv), 0, b"", b"")


class Place:
    """A job in a container, its files on this machine, and the watch of it."""

    def __init__(self, folder: Path, allow: str = '"ct_down:start_container"', more: str = "") -> None:
        self.root = folder / "job"
        (self.root / "run").mkdir(parents=True)
        self.inventory = folder / "inventory.toml"
        self.inventory.write_text(
            'schema = 1\n[hosts.proxmox]\nkind = "ssh"\naddress = "192.0.2.6"\n'
            '[hosts.gpu]\nkind = "lxc"\nvia = "proxmox"\nid = 200\n'
            f'[jobs.train]\nhost = "gpu"\nroot = {json.dumps(str(self.root))}\ncommand = ["true"]\n'
            f"progress = '(?P<step>x)'\npolicy = {{ allow = [{allow}]{more} }}\n"
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
        now = CLOCK() - age
        progress = Progress(t=now, step=step)
        snapshot = Snapshot("train", now, state, now, "so it is", attempt=attempt, progress=progress)
        (self.root / "run/snapshot.json").write_text(dumps(snapshot))

    def look(self) -> list[str]:
        """What is said, without its time."""
        return [text.split(" train: ", 1)[1] for text in self.watch.look()]

    @property
    def state(self) -> Path:
        (folder,) = (Path(os.environ["XDG_STATE_HOME"]) / "dflash-ops/supervise").iterdir()
        return folder

    def time_passes(self, seconds: float) -> None:
        """What is remembered is older than it was."""
        memory = self.watch._memory
        assert memory.seen is not None
        seen = replace(memory.seen, t=memory.seen.t - seconds)
        kernel_t = memory.kernel_t - seconds if memory.kernel_t is not None else None
        self.watch._memory = replace(memory, seen=seen, kernel_t=kernel_t)

    def journal(self) -> list[str]:
        path = self.state / "journal.jsonl"
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


def test_a_link_cut_while_the_container_is_stopped_says_nothing_of_the_container(place: Callable[..., Place]) -> None:
    one = place(allow="")
    one.is_at(State.STEPPING)
    one.look()
    one.inside.fault = DOWN
    assert one.look()[0].startswith("container stopped since ")
    one.inside.fault = CUT
    (cut,) = one.look()
    assert cut.startswith("unreachable since ")
    assert one.watch.row()[2] == "container stopped, unreachable"
    one.inside.fault = DOWN
    assert [text for text in one.look() if "container stopped" in text] == []
    one.inside.fault = None
    (up,) = one.look()
    assert up.startswith("no longer container stopped")


@pytest.mark.parametrize(
    "why", ["not allowed", "stopped by a person", "locked", "never seen", "seen long ago", "runs", "pct fails"]
)
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
    if why == "pct fails":
        one.proxmox.pct_fault = "perl: warning: Setting locale failed.\ncluster not ready - no quorum?\n"
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
        "pct fails": "could not be started: pct status ended with 2: cluster not ready - no quorum?",
    }
    assert sum(reasons[why] in text for text in said) == 1, said
    assert one.watch.code == 1


def test_a_locked_container_is_waited_for_ever_more_seldom_and_started_once_it_is_free(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = place()
    one.is_at(State.STEPPING, step=10)
    one.look()
    one.inside.fault, one.proxmox.lock = DOWN, "backup"
    said = one.look()
    assert said[0].startswith("container locked since ")
    assert said[0].endswith("and is locked by: backup")
    assert said[1:] == ["it waits until the other task lets the container go: the lock is not broken"]
    asked = []
    now = time.time()
    for seconds in range(15, 3 * 3600, 15):  # a look each 15 s; the backup takes three hours
        monkeypatch.setattr(time, "time", lambda at=now + seconds: at)
        before = one.proxmox.asked
        assert one.look() == []
        asked += [seconds] if one.proxmox.asked > before else []
    assert asked[:4] == [15, 45, 105, 225]
    assert max(b - a for a, b in itertools.pairwise(asked)) == 600
    assert one.proxmox.starts == 0
    one.proxmox.lock = ""
    monkeypatch.setattr(time, "time", lambda: now + 4 * 3600)
    freed = one.look()
    assert freed[-3].startswith("the other task has let the container go, after 14")
    assert freed[-2] == "the container was started: pct start 200 (on proxmox)"
    assert one.journal() == [
        "diagnosed", "action_intended", "action_done", "diagnosed", "action_intended", "action_done"
    ]  # fmt: skip
    assert one.proxmox.starts == 1


def test_a_lock_that_comes_between_look_and_start_costs_no_try(place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.STEPPING)
    one.look()
    one.inside.fault, one.proxmox.late_lock = DOWN, "snapshot"
    assert one.look()[-1] == "the container is not started yet: the container is locked by: snapshot"
    assert one.look() == []
    one.proxmox.late_lock, one.proxmox.lock = "", "snapshot"
    assert "container locked since" in " ".join(one.look())
    one.proxmox.lock = ""
    one.watch._memory = replace(one.watch._memory, lock_next=0.0)
    assert "the container was started: pct start 200 (on proxmox)" in one.look()
    assert one.journal() == ["diagnosed", "action_intended", "action_done"]


def test_without_mode_act_a_lock_is_told_only(place: Callable[..., Place]) -> None:
    one = place(more=', mode = "observe"')
    one.is_at(State.STEPPING)
    one.look()
    one.inside.fault, one.proxmox.lock = DOWN, "backup"
    assert "the policy only observes" in " ".join(one.look())
    assert one.look() == []
    assert "action_intended" not in one.journal()


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
    (one.root / "run/lease").write_text(json.dumps({**lease, "expires": time.time() + 3600}))
    assert one.look() == []
    assert one.watch.row()[4] == "", "it was written before a clock jumped back"
    (one.root / "run/lease").write_text(json.dumps({**lease, "start": "x"}))
    (said,) = one.look()
    assert said.startswith("cannot be judged: expected int")
    assert one.watch.code == 6


def test_lines_of_the_kernel_are_told_once(place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.STEPPING)
    one.proxmox.dmesg = "NVRM: Xid (PCI:0000:01:00): 31, old"
    assert one.look() == []  # what was there before is no news
    one.proxmox.dmesg = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
    (said,) = one.look()
    assert said.startswith("kernel log: Xid 79 of card PCI:0000:01:00")


@pytest.mark.parametrize("fault", ["the host does not answer", "the log may not be read"])
def test_lines_of_the_kernel_wait_until_they_can_be_read(fault: str, place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.STEPPING)
    one.look()
    one.time_passes(100)
    line, one.proxmox.age = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", 50.0
    if fault == "the host does not answer":
        one.proxmox.log_fault = CUT
    assert one.look() == []
    one.proxmox.log_fault, one.proxmox.dmesg = None, line
    (said,) = one.look()
    assert "Xid 79" in said
    one.time_passes(30)
    assert one.look() == []


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_lines_of_the_kernel_are_told_whatever_our_clock_says(
    ahead: float, place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: CLOCK() + ahead)
    one = place()
    one.is_at(State.STEPPING)
    one.look()
    one.time_passes(100)
    one.proxmox.dmesg, one.proxmox.age = "NVRM: Xid (PCI:0000:01:00): 13, old", 200.0
    assert one.look() == []
    one.time_passes(100)
    one.proxmox.dmesg, one.proxmox.age = "NVRM: Xid (PCI:0000:01:00): 79, new", 50.0
    (said,) = one.look()
    assert "Xid 79" in said


def test_one_kill_for_want_of_memory_is_told_once(place: Callable[..., Place]) -> None:
    one = place()
    one.is_at(State.STEPPING)
    one.look()
    one.proxmox.dmesg = (
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/lxc/200/ns,task=python,pid=4242,uid=0\n"
        "Memory cgroup out of memory: Killed process 4242 (python) total-vm:8kB, anon-rss:4kB\n"
    )
    (said,) = one.look()
    assert "Killed process 4242" in said


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
    (one.state / "journal.jsonl").mkdir()
    one.inside.fault = DOWN
    said = one.look()
    assert said[0].startswith("container stopped")
    assert "nothing is done: " in said[1]
    assert one.look() == []
    assert one.watch.code == 1
    assert one.proxmox.starts == 0


def test_where_nothing_can_be_written_people_are_told_all_the_same(
    place: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = apprise(tmp_path, monkeypatch)
    one = place()
    one.is_at(State.STEPPING)
    one.look()
    (one.state / "seen.json").unlink()
    (one.state / "seen.json").mkdir()  # a rename to it fails, as on a full disk a write does
    one.is_at(State.CRASHED)
    crashed, fault = one.look()
    assert crashed.startswith("crashed since ")
    assert fault.startswith("nothing is done: ")
    assert "cannot be written: Is a directory" in fault
    for _ in range(2):
        assert one.look() == []
    one.watch.close()  # waits for what is being sent
    assert got.read_text().count("crashed since ") == 2, "in the title and in the text of one message"


def test_playbooks_that_cannot_be_read_are_said_once_and_the_watch_goes_on(place: Callable[..., Place]) -> None:
    one = place()
    (one.inventory.parent / "own").mkdir()
    one.inventory.write_text(one.inventory.read_text().replace("schema = 1", 'schema = 1\nplaybooks = ["own"]'))
    one.watch.close()
    one.watch = one.new_watch()
    one.is_at(State.STEPPING)
    (said,) = one.look()
    assert said.startswith("nothing is done: ")
    assert one.watch.code == 1
    one.is_at(State.CRASHED)
    (crashed,) = one.look()
    assert crashed.startswith("crashed since ")


def apprise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for apprise; the file that gets what it is given."""
    got = folder / "got"
    (folder / "bin").mkdir()
    stand_in = folder / "bin/apprise"
    stand_in.write_text(f'#!/bin/sh\n{{ printf "%s\\n" "$@"; cat; }} >> {got}\nexit 0\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("APPRISE_URLS", "mailto://ada:hunter2@192.0.2.9")
    return got


def test_once_for_cron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    got = apprise(tmp_path, monkeypatch)
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
