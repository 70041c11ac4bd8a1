"""Faults of the way to a job and of the container around it, in the lab of tests/lab: ssh, pct, a real container.

What was done is read from two journals: the resident's in the container, and that of `supervise` on the operator's
machine.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import Lab, missing
from lab.__main__ import packages
from lab.container import SHIFT
from lab.wire_job import PYTHON, Job, Outcome, job_in
from resident_lab import wait_for  # type: ignore[import-not-found]

from chaos.scene import PATIENCE, Fault, Seen, outcome_of, story
from dflash_ops.contracts import Event, Layout
from dflash_ops.resident import journal

SAVING = Path(__file__).parents[1] / "resident" / "saving.py"
#: Seconds that a job's clock jumps ahead.
JUMP_S = 3600


def lab_needed() -> str:
    return missing() or ""


@functools.cache
def _lab() -> Lab:
    """One for all rows; gone with this process."""
    return Lab.up(packages=packages())


class _Quiet:
    """What commands print in this thread, for `Job.ops`, as pytest's capfd has it."""

    def readouterr(self) -> Outcome:
        out, err = sys.stdout, sys.stderr
        assert isinstance(out, io.StringIO)
        assert isinstance(err, io.StringIO)
        said = Outcome(0, out.getvalue(), err.getvalue())
        for stream in (out, err):
            stream.seek(0)
            stream.truncate()
        return said


class Wired:
    """A fault's stage: a supervised job in container 200, and the operator's machine."""

    def __init__(self, job: Job, state: Path) -> None:
        self.job = job
        self.lab = job.lab
        self._state = state
        self.notes: dict[str, Any] = {}

    @property
    def one(self) -> Wired:
        return self

    def inside(self) -> list[Event]:
        file = self.job.there / "run/journal.jsonl"
        return list(journal.read(file)[0]) if file.exists() else []

    def outside(self) -> list[Event]:
        return [e for file in self._state.rglob("journal.jsonl") for e in journal.read(file)[0]]

    def events(self, name: str = "") -> list[Event]:
        """Of both journals, in the order of time."""
        both = sorted([*self.outside(), *self.inside()], key=lambda e: e.t)
        return [replace(e, seq=i) for i, e in enumerate(both, 1) if name in ("", e.event)]

    def past(self, step: int, attempt: int = 1) -> None:
        log = Layout(self.job.there).attempt(attempt).log

        def there() -> bool:
            lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
            return any(int(x.split()[1].replace(",", "")) > step for x in lines if x.startswith("it "))

        wait_for(there, f"step {step} of attempt {attempt}", PATIENCE)

    def kill(self, what: str) -> None:
        """SIGKILL to what a pattern names in the container."""
        self.lab.containers[200].exec(["pkill", "-9", "-f", what], ok=None)

    def kills_loop(self) -> None:
        """Its guard lives, and makes another."""
        pid = json.loads((self.job.there / "run/resident.json").read_text())["pid"]
        self.lab.containers[200].exec(["kill", "-9", str(pid)])

    def kills_launcher(self) -> None:
        self.kill("^[^ ]*python[^ ]* -u [^ ]*/train.py")

    def verified(self, count: int = 1) -> None:
        why = f"proof of {count}"
        wait_for(lambda: len([e for e in self.inside() if _verified(e)]) >= count, why, PATIENCE)

    def supervise(self) -> Outcome:
        return self.job.ops("supervise", "--once")


def _verified(event: Event) -> bool:
    return event.event == "action_outcome" and event.data["outcome"] == "verified"


def play(fault: Fault) -> Seen:
    """Bring it about in the lab; what stands in the journals then. Raises what went wrong."""
    assert fault.wired is not None
    with _stage(fault) as one:
        try:
            fault.wired(one)
        except AssertionError as error:
            raise AssertionError(f"{error}; {story(one)}") from error
        inside, both = _Inside(one), story(one)
        return replace(both, state=story(inside).state, outcome=outcome_of(inside))


class _Inside:
    """What the resident alone has written."""

    def __init__(self, one: Wired) -> None:
        self._events = one.inside()

    @property
    def one(self) -> _Inside:
        return self

    def events(self, name: str = "") -> list[Event]:
        return [e for e in self._events if name in ("", e.event)]


@contextlib.contextmanager
def _stage(fault: Fault) -> Iterator[Wired]:
    lab = _lab()
    before = os.environ.get("XDG_STATE_HOME")
    with tempfile.TemporaryDirectory(prefix="dflash-chaos-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        stack.enter_context(lab.operator())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        policy = {"mode": "act", "allow": list(fault.allow), "budgets": {"backoff_s": 0.5}}
        title = fault.name.replace(" ", "-")
        job = stack.enter_context(job_in(lab, folder, _Quiet(), title, policy=policy))  # type: ignore[arg-type]
        (job.source / "train.py").write_bytes(SAVING.read_bytes())
        control = job.there / "control"
        control.mkdir(parents=True)
        for path in (job.there, control):
            os.lchown(path, SHIFT, SHIFT)
        job.write(
            command=[PYTHON, "-u", "{release}/train.py"],
            progress=r"it (?P<step>[\d,]+) of (?P<total>[\d,]+) loss=(?P<loss>\S+)",
            env={"SAVE": "{checkpoints}", "CONTROL": "{root}/control"},
            watch_s=1,
        )
        try:
            deployed = job.ops("deploy")
            assert deployed.code == 0, deployed.err
            one = Wired(job, folder / "state")
            one.past(3)
            yield one
        finally:
            lab.faults.start_container(200)
            os.environ.pop("XDG_STATE_HOME", None)
            if before is not None:
                os.environ["XDG_STATE_HOME"] = before


# -- the faults


def clock_jumps(one: Wired) -> None:
    """An hour ahead, under a trainer that runs on; the supervisor is started anew with that clock, then the trainer
    dies."""
    with one.lab.faults.clock_off(200, JUMP_S):
        started = [e for e in one.inside() if e.event == "resident_started"]
        one.kills_loop()
        wait_for(lambda: len([e for e in one.inside() if e.event == "resident_started"]) > len(started), "a loop", 60)
        now = one.job.status
        assert now["state"] == "stepping", now  # an hour of silence is none
        one.past(now["progress"]["step"] + 5)
        assert not [e for e in one.inside() if e.event == "action_intended"]
        one.kills_launcher()
        one.verified()


def container_stops(one: Wired) -> None:
    """Stopped from outside; who watches from there starts it, and the resident goes on."""
    assert one.supervise().code == 0
    one.lab.faults.stop_container(200)
    down = one.supervise()
    assert "the container was started: pct start 200" in down.out, down
    one.verified()
    one.past(3, attempt=2)
    one.supervise()
    assert one.outside()[-1].event == "progress", one.outside()


def reboots(one: Wired) -> None:
    """The container is started again; nobody looks from outside; the machine's own cron starts the resident."""
    container = one.lab.containers[200]
    spool = container.rootfs / "var/spool/cron/crontabs"
    spool.mkdir(parents=True, exist_ok=True)
    for path in (spool.parents[1], spool.parent, spool):
        os.lchown(path, SHIFT, SHIFT)
    assert one.job.ops("enable").code == 0
    one.lab.faults.stop_container(200)
    container.start()
    container.exec(["cron"])  # what the machine's init would start
    try:
        one.verified()
    finally:
        container.exec(["pkill", "cron"], ok=None)
    assert not one.outside()


def link_flaps(one: Wired) -> None:
    """Up and down while the trainer dies: from outside nothing is done, inside it is repaired once."""
    texts = []
    for turn in range(3):
        with one.lab.faults.reset("pve1"):
            cut = one.supervise()
            assert cut.code == 5, cut
            texts.append(cut.out)
            if turn == 1:
                one.kills_launcher()
        texts.append(one.supervise().out)
    assert [("unreachable since " in a, "no longer unreachable" in b) for a, b in _pairs(texts)] == [(True, True)] * 3
    one.verified()
    assert not one.outside()


def link_is_cut(one: Wired) -> None:
    """The operator's machine is gone from the network when the trainer dies: "unreachable since", and nothing else."""
    assert one.supervise().code == 0
    with one.lab.faults.reset("pve1"):
        one.kills_launcher()
        said = [one.supervise() for _ in range(2)]
        assert [s.code for s in said] == [5, 5]
        assert len(said[0].out.splitlines()) == 1, said
        assert "unreachable since " in said[0].out
        assert said[1].out == ""
        status = one.job.status
        assert status["state"] == "unreachable", status
        one.verified()  # the laptop does not matter to what lives beside the trainer
    assert not one.outside()


def _pairs(texts: list[str]) -> Iterator[tuple[str, str]]:
    return zip(texts[::2], texts[1::2], strict=True)
