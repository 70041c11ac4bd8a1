"""Memory, the table of splits, and whether a change pays."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from balance_parts import rates_of

from dflash_ops.balance import Memory, Split, StageRates, Timing, feasible, judge_memory, memory_from_check, plan, worth
from dflash_ops.errors import UsageError

REPO = Path(__file__).parents[2]
GB = 10**9
#: The 27B geometry on devices of 141 GB.
H200 = Memory(
    target=53_800_000_000, drafter=37 * GB, slot=640_000_000, average=42 * GB, target_work=3 * GB, drafter_work=40 * GB,
    device=141 * GB, host=200 * GB, devices=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("split", "memory", "said"),
    [
        (Split(8, 0), H200, "0 drafters: nobody would train"),
        (Split(0, 8), H200, "0 targets and no features on disk"),
        (Split(-1, 8), H200, "0 targets and no features on disk"),
        (Split(6, 3), H200, "9 devices are asked for, there are 8"),
        (Split(6, 2), replace(H200, device=48 * GB), "a target needs"),
        (Split(6, 2), replace(H200, device=80 * GB), "a drafter needs"),
        (Split(6, 2), replace(H200, host=50 * GB), "ring and averages need"),
    ],
)
def test_splits_that_cannot_be_are_refused_with_the_reason(split: Split, memory: Memory, said: str) -> None:
    assert said in (feasible(split, memory) or "")


def test_what_fits_and_what_is_unknown_are_told_apart() -> None:
    assert feasible(Split(6, 2), H200) is None
    assert judge_memory(Split(6, 2), H200).state == "fits"
    for lacking in ("device", "host", "target", "drafter", "target_work", "drafter_work", "slot", "average"):
        verdict = judge_memory(Split(6, 2), replace(H200, **{lacking: None}))
        assert verdict.state == "unknown", lacking
        assert verdict.text.startswith("not known: ")
    assert judge_memory(Split(6, 2), Memory()).state == "unknown"
    assert feasible(Split(0, 8), replace(H200, features=True)) is None


def test_a_ring_of_a_fixed_size_does_not_grow_with_the_split() -> None:
    small = replace(H200, host=50 * GB, slots=4)
    assert judge_memory(Split(6, 2), small).state == "fits"


def test_memory_is_taken_from_the_trainers_own_check() -> None:
    config = {
        "data": {"batch_size": 4, "max_length": 3072}, "drafter": {"layers": 5, "taps": 5, "block_size": 16},
        "train": {"anchors": 512}, "ring": {}, "loss": {"chunk": 2048},
    }  # fmt: skip
    target = {
        "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 248320,
    }  # fmt: skip
    said = {
        "ring_bytes": 16 * 1000, "average_bytes": 7, "target_bytes_per_worker": 53_800_000_000,
        "drafter_bytes_per_worker": 36 * GB, "drafter_parameters": 1_730_000_000,
        "targets": 6, "readers": 0, "drafters": 2,
    }  # fmt: skip
    memory = memory_from_check(said, config, target, device=141 * GB, host=100 * GB, devices=8)
    assert (memory.target, memory.slot, memory.average) == (53_800_000_000, 1000, 7)
    assert memory.target_work is not None and 0.5 * GB < memory.target_work < 10 * GB
    assert memory.drafter_work is not None and 20 * GB < memory.drafter_work < 70 * GB
    assert judge_memory(Split(5, 3), memory).state == "fits"
    # Nested as in models that also see, and without what activations are worked out from.
    assert memory_from_check(said, config, {"text_config": target}, device=141 * GB).target_work == memory.target_work
    assert memory_from_check(said, config, {}, device=141 * GB).target_work is None
    assert judge_memory(Split(5, 3), memory_from_check({}, config)).state == "unknown"


def rates(**changes: Any) -> StageRates:
    wanted: dict[str, Any] = {"split": Split(6, 2), "measured": Timing(1000.0), "remaining": 36_000}
    return rates_of(3.0, 2.0, **(wanted | changes))


def test_the_table_has_every_split_the_best_and_the_present_one() -> None:
    found = plan(rates(), 8, Split(6, 2), H200)
    assert [str(row.split) for row in found.rows] == ["8+0", "7+1", "6+2", "5+3", "4+4", "3+5", "2+6", "1+7", "0+8"]
    assert found.best == Split(5, 3)  # 5/3 a second against 3/2
    assert found.row(Split(8, 0)).prediction is None
    assert found.row(Split(8, 0)).refused == "0 drafters: nobody would train"
    best = found.row(found.best).prediction
    assert best is not None and best.block_tok_s == pytest.approx(1500.0)
    assert all(r.prediction is None or r.prediction.block_tok_s <= best.block_tok_s for r in found.rows)
    with pytest.raises(UsageError, match=r"9\+1 is no split of 8 devices"):
        found.row(Split(9, 1))


def test_a_present_split_that_leaves_a_device_idle_is_in_the_table_too() -> None:
    found = plan(rates(split=Split(1, 1)), 3, Split(1, 1), Memory())
    assert found.rows[-1].split == Split(1, 1)


def test_of_equals_the_present_one_is_best() -> None:
    assert plan(rates_of(1.0, 1.0, split=Split(2, 2)), 4, Split(2, 2), Memory()).best == Split(2, 2)
    limited = rates_of(0.01, 1.0, split=Split(1, 3))
    assert plan(limited, 4, Split(1, 3), Memory()).best == Split(1, 3)


def test_without_any_possible_split_each_reason_is_told() -> None:
    with pytest.raises(UsageError) as caught:
        plan(rates(), 8, Split(6, 2), replace(H200, device=40 * GB))
    assert "5+3: a target needs" in str(caught.value)


def test_fewer_devices_than_are_in_use_are_refused() -> None:
    with pytest.raises(UsageError, match="6 devices cannot be split, 8 are in use now"):
        plan(rates(), 6, Split(6, 2), H200)


def test_a_gain_is_worth_it_if_it_beats_the_restart_within_the_horizon() -> None:
    found = plan(rates(), 8, Split(6, 2), H200)
    yes = worth(found, Split(6, 2), restart_s=300, horizon_s=86_400)
    assert yes.yes and yes.split == Split(5, 3)
    assert yes.payback_s == pytest.approx(900.0)  # 300 s at 1.5, gained back at 0.5 a second
    assert yes.gained == pytest.approx(0.5 * 1000 * (36_000 - 300), rel=0.01)  # no more than what is left of the run
    assert yes.why.startswith("Yes: 5+3 is predicted to make +50.0% and pays back 300 s")
    no = worth(found, Split(6, 2), restart_s=300, horizon_s=600)
    assert not no.yes
    assert no.why.startswith("No: 5+3 is predicted to make +50.0%, which 600 s do not pay back")


def test_the_best_split_stays() -> None:
    found = plan(rates(), 8, Split(5, 3), H200)
    stays = worth(found, Split(5, 3), 300, 86_400)
    assert not stays.yes
    assert stays.why == "No: 5+3 is the best split already."


def test_a_gain_within_the_intervals_is_not_worth_a_restart() -> None:
    vague = rates(target=Timing(3.0, 0.0, 1000, 0.3), drafter=Timing(1.9, 0.0, 1000, 0.3))
    found = plan(vague, 8, Split(6, 2), H200)
    unsure = worth(found, Split(6, 2), 10, 86_400)
    assert not unsure.yes and not unsure.certain
    assert "overlap" in unsure.why


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
def test_times_are_finite_numbers(bad: float) -> None:
    found = plan(rates(), 8, Split(6, 2), H200)
    with pytest.raises(UsageError, match="restart_s is"):
        worth(found, Split(6, 2), bad, 1.0)
    with pytest.raises(UsageError, match="horizon_s is"):
        worth(found, Split(6, 2), 1.0, bad)


def test_the_history_is_told_as_the_model_says_it() -> None:
    """docs/rebalance.md holds the command's own words: where it is right, and by how much it is wrong."""
    done = subprocess.run(
        [sys.executable, "benchmarks/history.py"], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() in (REPO / "docs" / "rebalance.md").read_text(encoding="utf-8")
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if "+" in line.split()[0]}
    assert lines["6+1"][1:5] == ["6.5", "-", "6.5", "0.0%"]
    assert lines["6+2"][1:5] == ["13.5", "-", "13.0", "-3.7%"]
    assert lines["5+3"][1:5] == ["21.5", "19.5", "19.5", "-9.3%"]
