"""The plan, the scheduler and the record of what was trained: properties, with workers that die and runs that stop."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.actions import Average, Commit, Fill, Phase, Save, SlotState, Train
from trainer.plan import Base, Plan, learning_rate
from trainer.plan_record import Audit, PlanRecord, audit, from_ranges, read_lines, replay, to_ranges
from trainer.scheduler import Scheduler

LENGTHS = st.lists(st.integers(2, 64), min_size=1, max_size=60)


def plan_of(lengths: list[int], seed: int = 0, batch: int = 4, base: Base | None = None) -> Plan:
    return Plan(range(len(lengths)), lengths, seed, batch, (16, 32, 64), base or Base())


def epoch_of(plan: Plan, epoch: int) -> list[Any]:
    first = plan.total(epoch)
    return [plan.batch(n) for n in range(first, plan.total(epoch + 1))]


# ---- the plan


@given(LENGTHS, st.integers(1, 7), st.integers(0, 3))
def test_an_epoch_has_every_sample_once_in_a_bucket_that_fits(lengths: list[int], batch: int, seed: int) -> None:
    plan = plan_of(lengths, seed, batch)
    for epoch in range(3):
        batches = epoch_of(plan, epoch)
        assert sorted(s for b in batches for s in b.sample_ids) == list(range(len(lengths)))
        assert [b.index for b in batches] == list(range(len(batches)))
        assert all(1 <= len(b.sample_ids) <= batch for b in batches)
        assert all(lengths[s] <= b.length for b in batches for s in b.sample_ids)
        assert sum(len(b.sample_ids) < batch for b in batches) <= 1
        assert {b.length for b in batches} <= set(plan.lengths_used())


def test_batches_depend_on_seed_and_epoch_only() -> None:
    lengths = [random.Random(1).randint(2, 64) for _ in range(50)]
    a, b = plan_of(lengths), plan_of(lengths)
    forward = [a.batch(n) for n in range(30)]
    assert [b.batch(n) for n in reversed(range(30))] == forward[::-1]
    assert [x.sample_ids for x in epoch_of(a, 0)] != [x.sample_ids for x in epoch_of(a, 1)]
    assert epoch_of(plan_of(lengths, seed=1), 0) != epoch_of(a, 0)


@given(LENGTHS, st.integers(0, 80), st.integers(1, 6), st.integers(0, 30))
def test_another_way_of_making_batches_goes_on_with_the_untrained(
    lengths: list[int], done: int, batch: int, again: int
) -> None:
    old = plan_of(lengths, batch=4)
    trained = [old.batch(n) for n in range(done)]
    middle = plan_of(lengths, batch=batch, base=old.rebase(done))
    trained += [middle.batch(n) for n in range(done, done + again)]
    new = plan_of(lengths, batch=3, base=middle.rebase(done + again))
    epochs = trained[-1].epoch + 2 if trained else 2
    trained += [new.batch(n) for n in range(done + again, new.total(epochs))]
    assert [b.number for b in trained] == list(range(len(trained)))
    for epoch in range(epochs):
        assert sorted(s for b in trained if b.epoch == epoch for s in b.sample_ids) == list(range(len(lengths)))
    base = new.base
    assert Base.from_dict(json.loads(json.dumps(base.to_dict()))) == base


def test_epochs_are_fractional_and_whole_at_their_ends() -> None:
    plan = plan_of([10] * 22)
    assert [plan.total(e) for e in (0, 1, 2)] == [0, 6, 12]
    assert plan.epochs_at(0) == 0.0
    assert plan.epochs_at(3) == 0.5
    assert plan.epochs_at(6) == 1.0
    assert plan.epochs_at(12) == 2.0
    half = plan_of([10] * 22, base=plan.rebase(3))
    assert half.epochs_at(3) == pytest.approx(12 / 22)
    assert half.epochs_at(half.total(1)) == 1.0


def test_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(n, 100, 1.0, 0.1) for n in range(101)]
    assert rates[:10] == sorted(rates[:10])
    assert max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] > 0
    assert rates[100] == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(0, 1, 1.0, 0.04) > 0
    assert learning_rate(0, 1, 1.0, 0.0) == 1.0


# ---- the scheduler, against a crowd of workers that do things in any order


class Crowd:
    """Plays workers at random; checks at every step what must always hold."""

    def __init__(self, rng: random.Random, targets: int, scheduler: Scheduler) -> None:
        self.rng = rng
        self.s = scheduler
        self.targets: dict[str, Fill | None] = {f"target{i}": None for i in range(targets)}
        self.drafters: dict[str, Any] = dict.fromkeys(scheduler.drafters)
        self.waiting: set[str] = set()
        self.trained: list[int] = []
        self.commits: list[Commit] = []
        self.saves: list[Save] = []
        self.falls = 0
        self.saving = False

    def act(self) -> None:
        for action in self.s.decide():
            if isinstance(action, Fill):
                assert self.targets[action.worker] is None
                self.targets[action.worker] = action
            elif isinstance(action, Train):
                assert self.drafters[action.worker] is None
                assert action.batch < self.s.round_end
                assert action.batch not in self.trained
                if self.s.schedule == "fixed":
                    assert action.worker == f"drafter{action.batch % len(self.drafters)}"
                self.drafters[action.worker] = action
            elif isinstance(action, Average):
                assert not any(self.drafters.values())
                # Two buffers: the last average and what is being saved leave none to write into.
                assert not self.saving or self.saves[-1].step == self.s.step
                self.drafters = dict.fromkeys(self.drafters, action)
            elif isinstance(action, Commit):
                assert sorted(self.trained) == list(range(action.upto))
                self.commits.append(action)
            else:
                assert not self.saving
                assert (action.upto, action.step) == (self.commits[-1].upto, self.commits[-1].step)
                self.saves.append(action)
                self.saving = True
        held = [r for r in self.s.ring if r.state is not SlotState.FREE]
        assert len({r.batch for r in held}) == len(held)

    def step(self, deaths: bool) -> None:
        able = [("target", t) for t in self.targets] + [("drafter", d) for d in self.drafters]
        if self.saving:
            able += [("saver", "")] * 2
        kind, name = self.rng.choice(able)
        if kind == "saver":
            self.saving = False
            if deaths and self.rng.random() < 0.2:
                if self.s.save_failed():
                    assert self.s.phase is Phase.SAVING
                return
            self.s.saved()
        elif kind == "target":
            job = self.targets[name]
            if deaths and self.rng.random() < 0.2:
                lost = self.s.target_died(name)
                assert lost == ([] if job is None else [job.batch])
                self.targets[name] = None
                return
            if job is not None:
                self.s.filled(name, job.slot)
                self.targets[name] = None
            self.s.target_asks(name)
        elif deaths and self.falls < 6 and self.rng.random() < 0.05:
            self.falls += 1
            self.fall()
        else:
            job = self.drafters[name]
            if isinstance(job, Train):
                if self.rng.random() < 0.3:
                    self.s.copied(name, job.slot)
                self.s.trained(name, job.batch)
                self.trained.append(job.batch)
            elif isinstance(job, Average):
                self.s.averaged(name)
            self.drafters[name] = None
            self.s.drafter_asks(name)

    def fall(self) -> None:
        """A drafter dies, so all of them start anew; what targets have filled stays."""
        begun = sum(isinstance(job, Train) for job in self.drafters.values())
        ready = [r.batch for r in self.s.ring if r.state is SlotState.READY]
        committed = self.commits[-1].upto if self.commits else 0
        lost = begun + len(self.trained) - committed
        if self.s.phase is Phase.SAVING:
            return
        assert self.s.drafters_died() == lost
        self.trained = [b for b in self.trained if b < committed]
        self.drafters = dict.fromkeys(self.drafters)
        assert [r.batch for r in self.s.ring if r.state is SlotState.READY] == ready


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    targets=st.integers(1, 4),
    drafters=st.integers(1, 3),
    slots=st.integers(1, 6),
    total=st.integers(0, 40),
    every=st.integers(1, 5),
    save=st.integers(1, 9),
    schedule=st.sampled_from(["ready", "fixed"]),
    stop_at=st.none() | st.integers(0, 150),
    deaths=st.booleans(),
)
def test_every_batch_once_whole_prefixes_and_an_end(
    seed: int,
    targets: int,
    drafters: int,
    slots: int,
    total: int,
    every: int,
    save: int,
    schedule: str,
    stop_at: int | None,
    deaths: bool,
) -> None:
    scheduler = Scheduler(
        drafters=tuple(f"drafter{i}" for i in range(drafters)),
        slots=slots,
        cursor=0,
        step=0,
        total=total,
        average_every=every,
        save_every=save,
        schedule=schedule,
    )
    crowd = Crowd(random.Random(seed), targets, scheduler)
    highest = None
    for moment in range(20000):
        crowd.act()
        if scheduler.phase is Phase.ENDED:
            break
        if moment == stop_at:
            begun = [d.batch for d in crowd.drafters.values() if isinstance(d, Train)]
            highest = max([*crowd.trained, *begun], default=-1)
            scheduler.stop()
            crowd.act()
        crowd.step(deaths)
    assert scheduler.phase is Phase.ENDED, (scheduler, crowd.drafters)
    assert len(crowd.trained) == len(set(crowd.trained))
    assert sorted(crowd.trained) == list(range(len(crowd.trained)))
    if highest is None:
        assert len(crowd.trained) == total
    else:
        assert len(crowd.trained) == highest + 1 or (crowd.falls and len(crowd.trained) <= highest)
    if crowd.trained:
        assert crowd.commits[-1].upto == len(crowd.trained)
        assert crowd.saves[-1].step == crowd.commits[-1].step == scheduler.step
    for before, after in zip([Commit(0, 0), *crowd.commits], crowd.commits, strict=False):
        assert after.step - before.step == -(-(after.upto - before.upto) // drafters)
        assert after.step - before.step <= every


def test_all_waiting_drafters_take_whatever_is_ready() -> None:
    scheduler = Scheduler(("drafter0", "drafter1"), 4, 0, 0, 8, 4, 4)
    scheduler.drafter_asks("drafter1")
    scheduler.target_asks("target0")
    assert scheduler.decide() == [Fill("target0", 0, 0)]
    scheduler.filled("target0", 0)
    assert scheduler.ready == 1
    assert scheduler.decide() == [Train("drafter1", 0, 0)]
    assert scheduler.total_steps == 4


def test_a_stop_right_behind_an_averaging_saves_it() -> None:
    scheduler = Scheduler(("drafter0",), 2, 0, 0, 8, 1, 4)
    scheduler.drafter_asks("drafter0")
    scheduler.target_asks("target0")
    assert scheduler.decide() == [Fill("target0", 0, 0)]
    scheduler.filled("target0", 0)
    assert scheduler.decide() == [Train("drafter0", 0, 0)]
    scheduler.trained("drafter0", 0)
    scheduler.drafter_asks("drafter0")
    assert scheduler.decide() == [Average(1)]
    scheduler.averaged("drafter0")
    assert scheduler.decide() == [Commit(1, 1)]
    scheduler.stop()
    assert scheduler.decide() == [Save(1, 1)]
    scheduler.saved()
    assert scheduler.decide() == []
    assert scheduler.phase is Phase.ENDED


def test_a_worker_that_speaks_of_what_it_does_not_hold_is_refused() -> None:
    scheduler = Scheduler(("drafter0",), 2, 0, 0, 8, 4, 4)
    with pytest.raises(ValueError, match="slot 1"):
        scheduler.filled("target0", 1)
    with pytest.raises(ValueError, match="batch 3"):
        scheduler.trained("drafter0", 3)


# ---- the record


def test_ranges() -> None:
    assert to_ranges([0, 1, 2, 5, 7, 8]) == [[0, 2], [5, 5], [7, 8]]
    assert list(from_ranges([[0, 2], [5, 5], [7, 8]])) == [0, 1, 2, 5, 7, 8]


def begin(step: int, samples: int = 4) -> dict[str, Any]:
    return {"k": "begin", "from_step": step, "accepted": [[0, samples - 1]]}


def ack(epoch: int, *samples: int) -> dict[str, Any]:
    return {"k": "ack", "epoch": epoch, "samples": list(samples)}


def commit(step: int, path: str | None = "c") -> dict[str, Any]:
    return {"k": "commit", "step": step, "checkpoint": path}


def judged(*attempts: list[dict[str, Any]]) -> Audit:
    return replay([(str(i + 1), entries) for i, entries in enumerate(attempts)], Audit(attempts=len(attempts)))


OVER = {"k": "epoch", "epoch": 0}


def test_acks_after_the_checkpoint_roll_back() -> None:
    result = judged(
        [begin(0), ack(0, 0, 1), commit(1), ack(0, 2), commit(2, None), ack(0, 3)],
        [begin(1), ack(0, 2, 3), OVER, commit(2), ack(1, 0)],
    )
    assert result.ok
    assert result.rolled_back == 2
    assert result.provisional == 1
    assert [(e.epoch, e.trained, e.complete) for e in result.epochs] == [(0, 4, True), (1, 1, False)]


def test_a_sample_trained_twice_or_never_is_found() -> None:
    twice = judged([begin(0), ack(0, 0, 1), commit(1)], [begin(1), ack(0, 1, 2, 3), OVER, commit(2)])
    assert not twice.ok
    assert twice.epochs[0].repeated == (1,)
    never = judged([begin(0), ack(0, 0, 1), ack(0, 3), OVER, commit(1)])
    assert not never.ok
    assert never.epochs[0].missing == (2,)
    assert judged([begin(0), ack(0, 0, 1), ack(0, 3), commit(1)]).ok  # the epoch is not over


def test_a_resume_from_nothing_that_was_saved_is_a_problem() -> None:
    assert not judged([begin(0), ack(0, 0), commit(1, None)], [begin(1)]).ok
    assert judged([begin(0), ack(0, 0)], [begin(0), ack(0, 0)]).ok


def test_a_checkpoint_of_a_history_that_was_left_cannot_be_resumed() -> None:
    result = judged(
        [begin(0), ack(0, 0), commit(1), ack(0, 1), commit(2)], [begin(1), ack(0, 2)], [begin(2), ack(0, 3)]
    )
    assert not result.ok


def test_torn_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    record = PlanRecord(tmp_path)
    plan = plan_of([10] * 4)
    record.begin(seed=0, step=0, epoch=0, batch=0, accepted=range(4))
    record.ack(plan.batch(0), "drafter0")
    record.epoch(0)
    record.commit(1, 1)
    record.checkpoint(1, tmp_path / "step-00000001")
    record.close()
    whole = (tmp_path / "plan.jsonl").read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "plan.jsonl").write_bytes(whole[:cut])
        result = Audit()
        assert all("k" in entry for entry in read_lines(tmp_path / "plan.jsonl", result))
        assert result.torn_lines <= 1
    (tmp_path / "plan.jsonl").write_bytes(whole + b'{"k":"ack","epoch":0,"ba')
    result = audit(tmp_path)
    assert result.ok
    assert result.torn_lines == 1
    assert Counter(e.trained for e in result.epochs) == {4: 1}


def test_attempts_are_walked_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    def write(number: int, *entries: dict[str, Any]) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "plan.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))

    write(10, begin(9), ack(0, 3), OVER, commit(10))
    write(9, begin(0), ack(0, 0, 1, 2), commit(9))
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "plan.jsonl").write_text("{}")
    result = audit(tmp_path)
    assert result.ok
    assert result.attempts == 2
