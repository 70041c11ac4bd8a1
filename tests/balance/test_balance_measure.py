"""Stage rates from records: of a real run, of an older trainer, around restarts, and out of damaged ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.balance import Split, StageRates, measure, pace, predict
from dflash_ops.errors import UsageError

DATA = Path(__file__).parents[1] / "data" / "balance"

Records = list[dict[str, Any]]


@pytest.fixture
def records() -> Records:
    """Of 2 targets that took about 0.06 s a batch and 1 drafter of 0.1 s, averaging every 4 steps for 0.03 s."""
    return [json.loads(line) for line in (DATA / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "run.json").read_text(encoding="utf-8"))
    return found


def test_a_real_runs_records_give_its_stages_and_explain_its_pace(records: Records, config: dict[str, Any]) -> None:
    rates = measure(records, config)
    assert rates.split == Split(2, 1)
    assert rates.target.mean == pytest.approx(0.064, abs=0.01)
    assert rates.drafter.mean == pytest.approx(0.105, abs=0.015)
    assert rates.drafter.sd / rates.drafter.mean == pytest.approx(0.2, abs=0.08)
    assert rates.average.mean == pytest.approx(0.035, abs=0.015)
    assert (rates.average_every, rates.slots, rates.slot_through_step, rates.exact) == (4, None, True, True)
    assert [bucket.length for bucket in rates.buckets] == [32]
    assert rates.buckets[0].share == 1.0
    assert rates.buckets[0].target.mean == pytest.approx(rates.target.mean)
    assert rates.block_tokens == 64.0
    found = predict(rates, Split(2, 1))
    assert rates.measured is not None
    assert found.block_tok_s == pytest.approx(rates.measured.mean, rel=0.05)
    assert found.low <= rates.measured.mean <= found.high
    assert found.limit == "drafters"


def test_what_is_left_is_counted_in_batches_of_all_drafters(records: Records, config: dict[str, Any]) -> None:
    assert measure(records, config).remaining == 0
    assert measure(records[:-1], config).remaining == records[-1]["total"] - records[-2]["step"]


def test_an_older_trainers_records_are_read_by_their_shares_with_a_wider_interval(
    records: Records, config: dict[str, Any]
) -> None:
    exact = measure(records, config)
    for record in records:
        del record["stages"]
    rates = measure(records, config)
    assert not rates.exact
    assert "older trainer" in rates.notes[0]
    assert rates.drafter.mean == pytest.approx(exact.drafter.mean, rel=0.1)
    assert rates.target.mean == pytest.approx(exact.target.mean, rel=0.35)
    old, new = (predict(r, Split(2, 1)) for r in (rates, exact))
    assert old.block_tok_s == pytest.approx(new.block_tok_s, rel=0.1)
    assert (old.high - old.low) / old.block_tok_s > (new.high - new.low) / new.block_tok_s


def test_restarts_and_what_comes_before_the_first_averaging_do_not_count(
    records: Records, config: dict[str, Any]
) -> None:
    clean = pace(records, config)
    slow = copy.deepcopy(records)
    for record in slow[:2]:  # loading into the first interval, and the first averaging's connections
        record["stages"]["seconds"] *= 50
    assert pace(slow, config) == clean
    restarted = copy.deepcopy(records)
    for record in restarted[3:]:
        record["workers"]["target0"]["life"] = 1
    restarted[3]["stages"]["seconds"] *= 50
    assert pace(restarted, config).mean == pytest.approx(clean.mean, rel=0.05)
    assert pace(restarted, config).count == clean.count - 1
    for record in restarted[3:]:
        record["workers"]["drafter0"]["life"] = 1
    restarted[4]["stages"]["seconds"] *= 50
    assert pace(restarted, config).mean == pytest.approx(clean.mean, rel=0.05)


def test_only_the_last_split_counts(records: Records, config: dict[str, Any]) -> None:
    before = copy.deepcopy(records)
    for record in before:
        record["workers"]["target2"] = record["workers"]["target1"]
        record["stages"]["forward"] = {"32": [8, 8.0, 8.0]}
    assert measure(before + records, config) == measure(records, config)
    assert measure(before, config).split == Split(3, 1)


def changed(*path: str, value: Any) -> Callable[[Records], Records]:
    """Sets a value in the fourth record."""

    def change(records: Records) -> Records:
        place: Any = records[3]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return records

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda records: [], "there is no progress line yet"),
        (lambda records: records[:2], "none of them behind the first averaging"),
        (lambda records: records[:1], "none of them behind the first averaging"),
        (lambda records: [*records[:3], "torn"], "is no object"),
        (changed("step", value=float("nan")), "record 4: step"),
        (changed("block_tok_s", value=-1.0), "record 4: block_tok_s"),
        (changed("t", value=float("inf")), "record 4: t"),
        (changed("total", value="many"), "'many' is no number"),
        (changed("workers", value={}), "names no drafter"),
        (changed("workers", value=None), "has no table 'workers'"),
        (changed("workers", "drafter0", "compute", value=7.0), "workers.drafter0.compute"),
        (changed("workers", "drafter0", value={}), "lacks 'wait'"),
        (changed("stages", value=[]), "has no table 'stages'"),
        (changed("stages", "step", value={"32": [1, 2]}), "is not [count, sum, sum of squares]"),
        (changed("stages", "step", value={"x": [1, 2, 4]}), "has the length 'x'"),
        (changed("stages", "step", value={"32": [4, 1e300, 1e300]}), "1e+300 cannot be"),
        (changed("stages", "step", value={"32": [4, 4.0, 0.5]}), "cannot be count, sum and sum of squares"),
        (changed("stages", "step", value={"32": [0, 4.0, 4.0]}), "cannot be count, sum and sum of squares"),
        (changed("stages", "forward", value={"32": [float("nan"), 4.0, 4.0]}), "nan cannot be"),
        (changed("stages", "seconds", value=True), "True is no number"),
    ],
)
def test_damaged_or_missing_records_are_named(
    records: Records, config: dict[str, Any], change: Callable[[Records], Any], said: str
) -> None:
    raw = change(records)
    if said == "names no drafter":
        raw = raw[:4]
    with pytest.raises(UsageError) as caught:
        measure(raw, config)
    assert said in str(caught.value)
    assert "metrics.jsonl" in caught.value.where
    assert caught.value.next


def test_too_few_batches_are_told_with_their_number(records: Records, config: dict[str, Any]) -> None:
    for record in records:
        record["stages"]["forward"] = {"32": [1, 0.05, 0.0025]}
    with pytest.raises(UsageError, match=r"6 batches of targets .* 8 of each are needed"):
        measure(records, config)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"train": {"average_every": -3}}, "average_every is -3"),
        ({"train": 7}, r"\[train\] is no table"),
        ({"train": {"average_every": 4}, "ring": {"slots": "many"}}, "slots is 'many'"),
    ],
)
def test_a_config_that_is_none_is_refused(records: Records, broken: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        measure(records, broken)


def test_defaults_are_those_of_the_trainer(records: Records) -> None:
    from trainer.config import parse_config

    bare = {"target": {"path": "t"}, "drafter": {"mask_token_id": 1}, "data": {"path": "d"}}
    whole = parse_config(bare, "bare").to_dict()
    many = [{**records[2], "step": 4 * (i + 1), "t": records[2]["t"] + i} for i in range(20)]

    def of(config: dict[str, Any]) -> StageRates:
        return measure(many, config)

    assert of(bare) == of(whole)


def test_features_on_disk_are_read_by_readers(records: Records, config: dict[str, Any]) -> None:
    for record in records:
        workers = record["workers"]
        record["workers"] = {"reader0": workers["target0"], "drafter0": workers["drafter0"]}
    rates = measure(records, config)
    assert (rates.split, rates.readers) == (Split(0, 1), 1)
    assert predict(rates, Split(0, 2)).split == Split(0, 2)
