"""The closed form against the queue played through, and the queue against the trainer's own scheduler."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from balance_parts import drawn, rates_of

from dflash_ops.balance import Prediction, Split, StageRates, Timing, predict, simulate
from dflash_ops.balance.costs import average_at
from dflash_ops.balance.model import model_error
from dflash_ops.balance.simulate import WARM_UP, Draws
from dflash_ops.errors import UsageError
from trainer.actions import Average, Commit, Fill, Join, Save, Train
from trainer.scheduler import Scheduler


def by_the_scheduler(rates: StageRates, split: Split, rounds: int, seed: int) -> float:
    """Block tokens a second of the trainer's own scheduler, with the same seconds for each batch."""
    drafters = tuple(f"drafter{i}" for i in range(split.drafters))
    every = rates.average_every
    scheduler = Scheduler(
        drafters=drafters, slots=rates.slots_at(split), cursor=0, step=0, total=10**9, average_every=every,
        save_every=rates.checkpoint_every or 10**9, schedule=rates.schedule, sync=rates.sync,
    )  # fmt: skip
    draws, average = Draws(rates, random.Random(seed)), average_at(rates, split)
    events: list[tuple[float, int, Callable[[], None]]] = []
    commits: list[float] = []
    now, count = 0.0, 0
    common: dict[int, list[tuple[str, int]]] = {}

    def after(seconds: float, what: Callable[..., None], *args: Any) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (now + seconds, count, lambda: what(*args)))

    def filled(worker: str, slot: int) -> None:
        scheduler.filled(worker, slot)
        scheduler.target_asks(worker)

    def trained(worker: str, batch: int) -> None:
        scheduler.trained(worker, batch)
        scheduler.drafter_asks(worker)

    def through(worker: str, batch: int) -> None:
        together = common.setdefault(scheduler.step_of(batch)[0], [])
        together.append((worker, batch))
        if len(together) == len(drafters):
            for one in common.pop(scheduler.step_of(batch)[0]):
                after(rates.reduce.mean, trained, *one)

    def averaged() -> None:
        for worker in drafters:
            scheduler.averaged(worker)
            scheduler.drafter_asks(worker)

    for i in range(rates.producers_at(split)):
        scheduler.target_asks(f"target{i}")
    for worker in drafters:
        scheduler.drafter_asks(worker)
    while len(commits) < WARM_UP + rounds:
        for action in scheduler.decide():
            if isinstance(action, Fill):
                after(draws.of(action.batch)[0], filled, action.worker, action.slot)
            elif isinstance(action, Train):
                _, copy, step = draws.of(action.batch)
                if not rates.slot_through_step:
                    after(copy, scheduler.copied, action.worker, action.slot)
                after(copy + step, through if rates.sync == "step" else trained, action.worker, action.batch)
            elif isinstance(action, Average):
                after(draws.draw(average), averaged)
            elif isinstance(action, Commit):
                commits.append(now)
            elif isinstance(action, Save):
                after(draws.draw(rates.checkpoint), scheduler.saved)
            else:
                assert not isinstance(action, Join), "no step of these rounds is a short one"
        if len(commits) < WARM_UP + rounds:
            now, _, what = heapq.heappop(events)
            what()
    seconds = commits[-1] - commits[WARM_UP - 1]
    return rounds * every * split.drafters * rates.block_tokens / seconds


@pytest.mark.parametrize("schedule", ["ready", "fixed"])
@pytest.mark.parametrize("sync", ["average", "step"])
def test_the_simulation_is_the_trainers_own_queue(schedule: str, sync: str) -> None:
    rng = random.Random(1)
    for number in range(12):
        rates = drawn(rng, 0.6, schedule=schedule, sync=sync, reduce=Timing(0.02), checkpoint_every=20)
        slots = rng.choice((None, rates.split.devices + number))
        rates = replace(rates, slots=slots, checkpoint=Timing(rates.drafter.mean * rng.choice((1, 200))))
        rounds = max(3, 200 // (rates.average_every * rates.split.drafters))
        mine = simulate(rates, rates.split, rounds=rounds, seed=number).block_tok_s
        assert mine == pytest.approx(by_the_scheduler(rates, rates.split, rounds, number), rel=1e-9), rates


def off(rates: StageRates, seed: int, batches: int = 3000) -> tuple[float, Prediction]:
    """By how much the closed form is off from the simulation, relative."""
    rounds = max(20, min(400, batches // (rates.average_every * rates.split.drafters)))
    played = simulate(rates, rates.split, rounds=rounds, seed=seed)
    found = predict(rates, rates.split)
    return found.block_tok_s / played.block_tok_s - 1, found


@pytest.mark.parametrize(("most", "slots"), [(0.0, None), (0.5, None), (1.0, None), (0.5, "few")])
def test_closed_form_and_simulation_agree_over_random_rates_and_splits(most: float, slots: str | None) -> None:
    """Within the error that `predict` puts into its interval; half of the cases within a tenth of it."""
    rng = random.Random(7)
    found = []
    for number in range(45):
        rates = drawn(rng, most)
        if slots:
            rates = replace(rates, slots=rng.randint(rates.split.devices, 2 * rates.split.devices))
        error, _ = off(rates, number)
        # 3000 batches tell a mean to about 1 % where stages vary by half.
        assert abs(error) <= model_error(rates, rates.split) + 0.02 * most, (error, rates)
        found.append(abs(error))
    assert sorted(found)[len(found) // 2] < 0.006


def test_busy_shares_agree_with_the_simulation() -> None:
    rng = random.Random(3)
    for number in range(20):
        rates = drawn(rng, 0.4)
        played, found = simulate(rates, rates.split, rounds=60, seed=number), predict(rates, rates.split)
        assert found.target_busy == pytest.approx(played.target_busy, abs=0.05)
        assert found.drafter_busy == pytest.approx(played.drafter_busy, abs=0.05)


def test_rings_that_are_too_small_are_told_to_be_uncertain() -> None:
    rng = random.Random(5)
    for number in range(25):
        rates = drawn(rng, 0.5)
        rates = replace(rates, slots=rng.randint(1, rates.split.devices))
        error, found = off(rates, number)
        assert found.low <= found.block_tok_s / (1 + error) <= found.high


@pytest.mark.parametrize(
    ("targets", "drafters", "fill", "step", "limit", "batches_a_second"),
    [
        (1, 1, 2.0, 1.0, "targets", 0.5),
        (1, 1, 1.0, 2.0, "drafters", 0.5),
        (2, 1, 2.0, 0.5, "targets", 1.0),
        (5, 3, 1.0, 3.0, "drafters", 1.0),
        (1, 5, 1.0, 1.0, "targets", 1.0),
    ],
)
def test_without_chance_the_slower_side_says_the_pace(
    targets: int, drafters: int, fill: float, step: float, limit: str, batches_a_second: float
) -> None:
    found = predict(rates_of(fill, step), Split(targets, drafters))
    assert found.block_tok_s == pytest.approx(1000 * batches_a_second)
    assert found.ctx_tok_s == pytest.approx(2000 * batches_a_second)
    assert found.limit == limit
    one = {
        "targets": (targets, "target fills", "targets fill"),
        "drafters": (drafters, "drafter trains", "drafters train"),
    }
    count, single, many = one[limit]
    assert found.why.startswith(f"The {limit} limit: {count} {single if count == 1 else many} ")
    busy = found.target_busy if limit == "targets" else found.drafter_busy
    assert busy == pytest.approx(1.0)


def test_one_slot_makes_both_sides_take_turns() -> None:
    found = predict(rates_of(2.0, 1.0, slots=1, slot_through_step=True), Split(1, 1))
    assert found.block_tok_s == pytest.approx(1000 / 3.0)
    assert found.limit == "ring"
    assert "ring.slots" in found.why


@pytest.mark.parametrize(("targets", "drafters", "on_cpu"), [(1, 1, True), (1, 1, False), (5, 2, False), (3, 3, True)])
def test_targets_stand_still_while_an_averaging_takes_longer_than_the_ring_lasts(
    targets: int, drafters: int, on_cpu: bool
) -> None:
    split = Split(targets, drafters)
    fill = 1.3 * targets / drafters
    rates = rates_of(
        fill,
        1.0,
        split=split,
        average=Timing(20.0),
        average_every=70,
        slot_through_step=on_cpu,
        drafter_copy=Timing(0.1),
    )
    found = predict(rates, split)
    assert found.block_tok_s == pytest.approx(simulate(rates, split, rounds=20).block_tok_s, rel=0.015)
    assert found.block_tok_s < 0.9 * 1000 * targets / fill


def test_averaging_that_costs_much_is_what_limits() -> None:
    found = predict(rates_of(0.1, 1.0, average=Timing(10.0)), Split(1, 1))
    assert found.block_tok_s == pytest.approx(500.0)
    assert found.limit == "averaging"
    assert "train.average_every" in found.why


def test_more_drafters_make_an_averaging_dearer_and_less_certain() -> None:
    rates = rates_of(0.1, 1.0, split=Split(6, 2), average=Timing(2.0, 0.0, 5))
    assert average_at(rates, Split(6, 2)) == rates.average
    more, one = average_at(rates, Split(2, 6)), average_at(rates, Split(7, 1))
    assert one.mean < 2.0 < more.mean
    assert more.spread > 0.1 and one.spread > 0.1
    here, there = predict(rates, Split(6, 2)), predict(rates, Split(2, 6))
    assert (there.high - there.low) / there.block_tok_s > (here.high - here.low) / here.block_tok_s


def test_the_interval_narrows_with_what_was_counted() -> None:
    few, many = (rates_of(1.0, 3.0, drafter=Timing(3.0, 1.0, count)) for count in (10, 10_000))
    split = Split(2, 2)
    assert predict(few, split).high - predict(few, split).low > 3 * (
        predict(many, split).high - predict(many, split).low
    )


def test_a_pace_that_the_stages_do_not_explain_widens_the_interval() -> None:
    rates = rates_of(1.0, 2.0, measured=Timing(400.0))
    found = predict(rates, Split(1, 1))
    assert found.low <= 400.0 <= found.high


def test_a_checkpoint_that_takes_longer_than_two_rounds_is_waited_for() -> None:
    rates = rates_of(0.1, 1.0, average=Timing(1.0), checkpoint=Timing(61.0), checkpoint_every=30)
    free = predict(replace(rates, checkpoint=Timing(20.0)), Split(1, 1)).block_tok_s
    held = predict(rates, Split(1, 1)).block_tok_s
    assert held < 0.75 * free
    assert held == pytest.approx(simulate(rates, Split(1, 1), rounds=60).block_tok_s, rel=0.03)


def test_eta_is_what_is_left_at_the_predicted_pace() -> None:
    assert predict(rates_of(1.0, 2.0, remaining=100), Split(1, 1)).eta_s == pytest.approx(200.0)
    assert predict(rates_of(1.0, 2.0), Split(1, 1)).eta_s is None


def test_features_from_disk_have_readers_in_the_targets_place() -> None:
    rates = rates_of(0.5, 2.0, split=Split(0, 2), readers=1)
    found = predict(rates, Split(0, 4))
    assert found.block_tok_s == pytest.approx(2000.0)
    assert "1 reader" in found.why


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (Split(4, 0), "nobody would train"),
        (Split(0, 4), "nobody would fill the ring"),
        (Split(-1, 4), "nobody would fill the ring"),
    ],
)
def test_a_split_without_one_side_is_refused(split: Split, said: str) -> None:
    for ask in (predict, simulate):
        with pytest.raises(UsageError, match=said):
            ask(rates_of(1.0, 1.0), split)


def test_readers_are_not_guessed_from_targets() -> None:
    with pytest.raises(UsageError, match="how fast readers are was not measured"):
        predict(rates_of(1.0, 1.0, readers=1), Split(0, 2))


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
def test_a_stage_is_a_finite_number_of_seconds(bad: float) -> None:
    with pytest.raises(UsageError, match="a stage's mean is"):
        Timing(bad)
