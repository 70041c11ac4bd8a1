"""Findings and learned limits over real files: what the loop would tell, and what it would learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_ops.contracts import Finding, JobSpec, Layout, Limits, Progress, Snapshot, State
from dflash_ops.resident import repairs
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.silences import Silences, key
from dflash_ops.resident.vitals import KEPT, Vitals

JOB = JobSpec("main", "/r", "s", ("python3",), "c", limits=Limits(loading_s=1800, compiling_s=1800))


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_loss_that_is_no_number_is_found_within_ten_seconds_and_a_new_attempt_begins_clean(tmp_path: Path) -> None:
    clock = Clock()
    vitals = Vitals(Layout(tmp_path), clock=clock)
    found = ()
    for second in range(60):
        clock.now += 1
        loss = 2.0 if second < 40 else float("nan")
        progress = Progress(clock.now - second % 5, second // 5, loss=loss)
        found = vitals.look(Snapshot("main", clock.now, State.STEPPING, clock.now, attempt=1, progress=progress))
        if second == 39:
            assert found == ()
    assert [f.name for f in found] == ["nan_loss"]
    assert {s.detector for s in vitals.report.skipped} >= {"gpu", "loss_spike"}
    clock.now += 11
    assert vitals.look(Snapshot("main", clock.now, State.LOADING, clock.now, attempt=2)) == ()


def test_the_disk_is_asked_and_its_failure_is_said(tmp_path: Path) -> None:
    clock = Clock()
    vitals = Vitals(Layout(tmp_path), tmp_path / "elsewhere", clock)
    vitals.look(Snapshot("main", clock.now, State.STEPPING, clock.now, attempt=1))
    assert "disk_filling" not in {s.detector for s in vitals.report.skipped}
    gone = Vitals(Layout(Path("/proc/self/fd/nothing/below")), clock=clock)
    gone.look(Snapshot("main", clock.now, State.STEPPING, clock.now, attempt=1))
    assert "disk_filling" in {s.detector for s in gone.report.skipped}


def test_what_is_kept_has_an_end(tmp_path: Path) -> None:
    clock = Clock()
    vitals = Vitals(Layout(tmp_path), clock=clock)
    for step in range(3 * KEPT):
        clock.now += 1
        vitals.look(Snapshot("m", clock.now, State.STEPPING, 0.0, attempt=1, progress=Progress(clock.now, step)))
    assert len(vitals._looks) == KEPT


def attempt(layout: Layout, loading: float, job: JobSpec = JOB) -> Silences:
    """One attempt that loads with this longest silence and then steps."""
    silences = Silences(layout, job)
    for silence in (0.5, loading, 1.0):
        silences.saw("loading", silence)
    silences.saw("stepping", 900.0)
    return silences


def test_limits_come_from_the_longest_silence_of_attempts_that_got_past_the_stage(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.run.mkdir()
    attempt(layout, 200.0)
    assert Silences(layout, JOB).limits.loading_s == 1800
    attempt(layout, 10.0)
    assert Silences(layout, JOB).limits.loading_s == 600
    assert Silences(layout, JOB).limits.compiling_s == 1800, "it never compiled"
    Silences(layout, JOB).saw("loading", 5000.0)  # never got past it: a hang teaches nothing
    assert Silences(layout, JOB).limits.loading_s == 600
    said = json.loads(layout.learned.read_text())
    assert said["stages"] == {"loading": {"longest_s": 200.0, "attempts": 2}}


@pytest.mark.parametrize("content", ["", "{", '{"schema": 99}', '{"stages": 3}'])
def test_a_damaged_file_leaves_the_configured_limits(tmp_path: Path, content: str) -> None:
    layout = Layout(tmp_path)
    layout.run.mkdir()
    layout.learned.write_text(content)
    assert Silences(layout, JOB).limits == JOB.limits
    attempt(layout, 10.0)
    assert json.loads(layout.learned.read_text())["key"] == key(JOB)


def test_without_a_job_nothing_is_learned(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.run.mkdir()
    silences = Silences(layout, None)
    silences.saw("loading", 3.0)
    silences.saw("stepping", 0.0)
    assert silences.limits == Limits()
    assert not layout.learned.exists()


def test_a_finding_that_comes_and_goes_starts_one_pass_and_an_alarm_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass is an interpreter and half a second of CPU: two targets that take turns at being slow must not cost more
    than all the rest of the supervisor."""
    layout = Layout(tmp_path)
    layout.run.mkdir()
    made: list[list[str]] = []

    class Counted(repairs.Repairs):
        def _spawn(self, snapshot: Snapshot, findings: tuple[Finding, ...]) -> None:  # type: ignore[override]
            made.append([f.key for f in findings])
            self._child = None
            monkeypatch.setattr(repairs.itself, "argv", lambda *_: ["true"])
            super()._spawn(snapshot, findings)
            assert self._child is not None
            self._child.wait(30)

    counted = Counted(layout, lambda text: None)
    one = Attempt(1, layout.attempt(1), JOB, None, None, None, ())
    snapshot = Snapshot("main", 1.0, State.STEPPING, 1.0, attempt=1)
    slow = [Finding("straggler", "slow", 1.0, worker=f"target{n}", severity="note") for n in (0, 1)]
    for turn in range(20):
        counted.step(snapshot, one, (slow[turn % 2],))
        counted.step(snapshot, one, ())
    assert made == [["straggler:target0"], ["straggler:target1"]]
    alarm = Finding("nan_loss", "it is nan", 1.0, severity="alarm")
    counted.step(snapshot, one, (alarm,))
    counted.step(snapshot, one, (alarm,))  # known
    assert made[2:] == [["nan_loss:"]]
