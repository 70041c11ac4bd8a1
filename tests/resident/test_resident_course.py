"""Curves, medians and means of an attempt; the error of its end; what the supervisor did; the disk."""

from __future__ import annotations

import fcntl
import json
import os
import random
import statistics
import time
from pathlib import Path

import pytest

from dflash_ops.contracts import Event, Layout, Progress, Snapshot, State, dumps, from_dict
from dflash_ops.resident import disks, vitals, watch
from dflash_ops.resident.course import POINTS, Course, Kept
from dflash_ops.supervise.health import Evidence
from dflash_ops.supervise.words import Deeds


def lines(count: int, seed: int = 1, begin: float = 0.0) -> list[Progress]:
    rng = random.Random(seed)
    return [
        Progress(begin + 10.0 * n, n, 10_000, loss=5 - n / count, block_tok_s=13_000 + rng.uniform(-500, 500))
        for n in range(1, count + 1)
    ]


def course(found: list[Progress], into: Course | None = None) -> Course:
    made = into or Course()
    for one in found:
        made.add(one)
    return made


@pytest.mark.parametrize("count", [1, 2, 119, 120, 121, 1000, 20_000])
def test_a_curve_covers_the_whole_attempt_in_a_hundred_and_twenty_points(count: int) -> None:
    found = lines(count)
    curves = course(found).curves()
    assert set(curves) == {"loss", "block_tok_s"}, "what no line had has no curve"
    loss = curves["loss"]
    assert min(count, POINTS // 2) <= len(loss) <= POINTS
    assert list(loss) == sorted(loss, reverse=True), "oldest first, evenly thinned"
    assert loss[0] == pytest.approx(found[0].loss, abs=0.02)
    assert loss[-1] == pytest.approx(found[-1].loss, abs=0.02)
    assert statistics.mean(loss) == pytest.approx(statistics.mean(p.loss or 0 for p in found), abs=0.02)


def test_median_and_mean_since_the_start() -> None:
    found = lines(5001)
    rates = course(found).rates()
    values = [p.block_tok_s or 0.0 for p in found]
    assert rates["block_tok_s_median"] == pytest.approx(statistics.median(values), rel=0.002)
    assert rates["block_tok_s_mean"] == pytest.approx(statistics.mean(values), rel=0.001)
    assert rates["ctx_tok_s_median"] is None
    assert rates["ctx_tok_s_mean"] is None


def test_a_median_of_what_drifts_is_of_all_lines_and_not_of_the_newest() -> None:
    ramp = [Progress(float(n), n, ctx_tok_s=float(n)) for n in range(1, 20_001)]
    assert course(ramp).rates()["ctx_tok_s_median"] == pytest.approx(10_000, rel=0.02)
    later = Course()
    later.recall(course(ramp[:15_000]).keep(1))
    assert course(ramp, later).rates()["ctx_tok_s_median"] == pytest.approx(10_000, rel=0.05)


def test_a_mean_counts_by_time_and_a_median_by_lines() -> None:
    made = course([Progress(0, 1, ctx_tok_s=100), Progress(10, 2, ctx_tok_s=100), Progress(100, 3, ctx_tok_s=10)])
    assert made.rates()["ctx_tok_s_mean"] == pytest.approx((10 * 100 + 90 * 10) / 100)
    assert made.rates()["ctx_tok_s_median"] == 100
    assert course([Progress(0, 1, ctx_tok_s=7)]).rates()["ctx_tok_s_mean"] == 7


def test_numbers_that_are_none_make_no_hole_and_no_null() -> None:
    made = course([Progress(0, loss=2.0), Progress(1, loss=float("nan")), Progress(2), Progress(3, loss=float("inf"))])
    assert made.curves() == {"loss": (2.0,)}
    huge = course([Progress(float(n), loss=1.7e308, ctx_tok_s=-1.7e308) for n in range(500)])
    assert "null" not in dumps(huge.keep(1))


def test_a_clock_that_is_set_back_stops_no_curve() -> None:
    made = course([Progress(5e9, 1, loss=3.0, ctx_tok_s=10), Progress(1000, 2, loss=2.0, ctx_tok_s=10)])
    made.add(Progress(1010, 3, loss=1.0, ctx_tok_s=10))
    assert made.curves()["loss"] == (3.0, 2.0, 1.0)
    assert made.rates()["ctx_tok_s_mean"] == 10


@pytest.mark.parametrize("count", [50, 3000])
def test_a_loop_that_was_killed_is_followed_by_one_with_the_same_curves(count: int) -> None:
    whole = lines(2 * count)
    first = course(whole[:count])
    kept = from_dict(Kept, json.loads(dumps(first.keep(3))))
    assert len(dumps(kept)) < 8000
    later = Course()
    later.recall(kept)
    course(whole, later)  # the file is read again from its beginning: known lines count once
    both = course(whole)
    assert later.rates()["block_tok_s_mean"] == pytest.approx(both.rates()["block_tok_s_mean"])
    assert later.rates()["block_tok_s_median"] == pytest.approx(both.rates()["block_tok_s_median"], rel=0.01)
    a, b = later.curves()["loss"], both.curves()["loss"]
    assert abs(len(a) - len(b)) <= 2
    assert (a[0], a[-1]) == (pytest.approx(b[0], abs=0.02), pytest.approx(b[-1], abs=0.02))


def evidence(step_s: list[float], step: int = 100, total: int | None = 200) -> Evidence:
    return Evidence(progress=Progress(0.0, step, total), step_s=tuple(step_s))


def test_the_error_of_the_end_is_the_spread_of_recent_steps_times_what_is_left() -> None:
    steady = watch._eta_error(evidence([1.0] * 40))
    assert steady == 0
    rng = random.Random(3)
    found = watch._eta_error(evidence([9.0] * 100 + [1 + rng.gauss(0, 0.1) for _ in range(30)]))
    assert found == pytest.approx(100 * 0.1, rel=0.4)
    paused = watch._eta_error(evidence([1.0] * 29 + [30.0]))
    assert paused == 0, "one pause for a checkpoint says nothing of the pace"
    assert watch._eta_error(evidence([1.0] * 4)) is None
    assert watch._eta_error(evidence([1.0] * 40, total=None)) is None
    assert watch._eta_error(evidence([1.0, 2.0] * 40, step=200)) == 0


def event(seq: int, name: str, data: dict[str, object], actor: str = "supervisor") -> Event:
    return Event(seq, 1_764_441_070.0 + seq, name, actor, 3, data)


def test_what_the_supervisor_did_is_told_in_the_words_of_the_incidents() -> None:
    deeds = Deeds()
    decision = {"id": "d1", "action": "resume", "reason": "a worker died"}
    for one in (
        event(1, "state", {"state": "crashed"}, "resident"),
        event(2, "diagnosed", {"title": "out of memory", "kind": "cuda_oom", "confidence": 0.9}),
        event(3, "action_intended", {"decision": decision}),
        event(4, "action_done", {"id": "d1", "attempt": 4}),
        event(5, "action_outcome", {"id": "d1", "outcome": "verified", "detail": "step 9"}),
        event(6, "supervise_reset", {"reason": "x"}, "operator ada@desk"),
    ):
        deeds.add(one)
        deeds.add(one)
    assert deeds.lines == (
        "2025-11-29T18:31:12Z named: out of memory (cuda_oom, confidence 0.90)",
        "2025-11-29T18:31:13Z resume: a worker died",
        "2025-11-29T18:31:15Z resume: it helped (step 9)",
    )
    for seq in range(10, 30):
        deeds.add(event(seq, "held", {"reason": "r" * 1000 + "\n\n"}))
    assert len(deeds.lines) == 5
    assert all(len(line) <= 300 and "\n" not in line for line in deeds.lines)
    for t in (1e30, -1.0):
        deeds.add(Event(100 + int(t < 0), t, "held", "supervisor", None, {"reason": [], "decision": 3, "id": {}}))
    assert len(deeds.lines) == 5


def test_the_disk_of_the_checkpoints_and_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, free = [1000.0], [100 << 30]
    monkeypatch.setattr(
        disks.os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 200 << 18, 0, free[0] >> 12, 0, 0, 0, 0, 255))
    )
    seen = vitals.Vitals(Layout(tmp_path), tmp_path / "checkpoints", clock=lambda: now[0])
    snapshot = Snapshot("m", 0.0, State.STEPPING, 0.0, attempt=1)
    for _ in range(10):
        seen.look(snapshot)
        now[0] += 60
        free[0] -= 6 << 30  # 0.1 GiB a second
    disk = seen.add(snapshot, None).disk
    assert disk is not None
    assert (disk.path, disk.total) == (str(tmp_path), 200 << 30)
    assert disk.full_in_s == pytest.approx(460, rel=0.01)
    (tmp_path / "checkpoints").mkdir()
    seen.look(snapshot)
    found = seen.add(snapshot, None).disk
    assert found is not None
    assert (found.path, found.full_in_s is not None) == (str(tmp_path / "checkpoints"), True)
    seen.close()


def test_a_dead_mount_holds_the_child_that_asks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = tmp_path / "held"
    lock = os.open(held, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def dead(_: object) -> None:
        time.sleep(600)

    clock = [0.0]
    asker = disks.Disks([tmp_path], lambda: clock[0])
    with monkeypatch.context() as patch:
        patch.setattr(disks.os, "statvfs", dead)
        assert asker.ask() is None
    child = asker._pid
    assert not asker.silent
    end = time.monotonic() + 10
    while len(list(Path(f"/proc/{child}/fd").iterdir())) > 1:  # it gives back all that is the loop's
        assert time.monotonic() < end
    os.close(lock)
    with held.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    clock[0] = disks.PATIENCE_S + 1
    assert asker.silent
    while asker.ask() is None and asker._pid == child:  # killed; then the next question is asked
        assert time.monotonic() < end
        time.sleep(0.01)
    found = None
    while found is None:
        assert time.monotonic() < end
        found = asker.ask()
    assert [(room.path, room.total > 0) for room in found] == [(str(tmp_path), True)]
    assert not asker.silent


def test_a_disk_that_does_not_answer_is_no_disk_that_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = vitals.Vitals(Layout(tmp_path), clock=lambda: 1000.0)
    monkeypatch.setattr(disks.Disks, "ask", lambda _: None)
    monkeypatch.setattr(disks.Disks, "silent", property(lambda _: True))
    seen.look(Snapshot("m", 0.0, State.STEPPING, 0.0, attempt=1))
    assert "disk_filling" in {s.detector for s in seen.report.skipped}
    assert seen.add(Snapshot("m", 0.0, State.STEPPING, 0.0), None).disk is None
    seen.close()
