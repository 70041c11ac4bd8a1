"""Other splits predicted from a run at 1+1, against real processes whose stages sleep far longer than they compute."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from pipeline_support import REPO, Run

from dflash_ops.balance import Split, measure, paces, predict

ROUND = 4
STAGES = {"target": 0.25, "drafter": 0.14, "average": 0.1}


def at(make_run: Callable[..., Run], targets: int, drafters: int, steps: int) -> tuple[list[dict[str, Any]], Any]:
    """A whole run's records and its config; each record holds one round."""
    run = make_run(
        f"{targets}+{drafters}",
        samples=48,
        **{
            "train.epochs": None, "train.steps": steps, "train.average_every": ROUND, "train.log_every": ROUND,
            "data.buckets": [64], "checkpoint.every": 10**6, "workers.target_devices": ["cpu"] * targets,
            "workers.drafter_devices": ["cpu"] * drafters,
        },
    )  # fmt: skip
    assert run.finish() == 0, run.log
    return run.metrics(), json.loads(run.config.read_text(encoding="utf-8"))


def test_a_split_is_predicted_from_the_records_of_another_one(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [str(REPO / "benchmarks" / "slow_stages"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("DFLASH_SLOW_STAGES", json.dumps(STAGES))
    records, config = at(make_run, 1, 1, 5 * ROUND)
    rates = measure(records, config)
    # The trainer's own account of each stage: what was slept, and a little.
    assert STAGES["target"] <= rates.target.mean < 1.5 * STAGES["target"]
    assert STAGES["drafter"] <= rates.drafter.mean < 1.5 * STAGES["drafter"]
    assert STAGES["average"] <= rates.average.mean < 3 * STAGES["average"]
    assert predict(rates, Split(1, 1)).limit == "targets"
    found = predict(rates, Split(2, 1))
    assert found.limit != "targets"  # two targets are faster than the drafter: another side limits than was seen
    seen = statistics.median(tokens / seconds for tokens, seconds in paces(*at(make_run, 2, 1, 5 * ROUND)))
    assert found.block_tok_s == pytest.approx(seen, rel=0.15)
