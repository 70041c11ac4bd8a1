"""A drafter dies: drafters alone start anew, from the last average, and the result is what it would have been."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_support import Run, worker_pid, write_samples  # type: ignore[import-not-found]

from trainer.checkpoint import MOMENTS, WEIGHTS, list_checkpoints
from trainer.plan_record import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a machine busy with other things is no fault
TWO = {
    "workers.drafter_devices": ["cpu", "cpu"],
    "train.schedule": "fixed",
    "train.average_every": 4,
    "checkpoint.every": 100,
    "ring.slots": 5,
}


def same_weights(one: Run, other: Run) -> None:
    last = [list_checkpoints(run.checkpoints)[-1] for run in (one, other)]
    assert last[0].name == last[1].name
    files = sorted(p.name for p in last[0].glob("*.safetensors"))
    assert {WEIGHTS, MOMENTS} <= set(files)
    for name in files:
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), f"{name} differs"


@pytest.mark.parametrize("moments", ["averaged", "local"])
def test_a_drafter_killed_costs_the_round_and_nothing_else(
    make_run: Callable[..., Run], tmp_path: Path, moments: str
) -> None:
    data = write_samples(tmp_path / "data.jsonl", 240)
    calm = make_run("calm", data=data, **TWO, **{"train.moments": moments})
    struck = make_run("struck", data=data, **TWO, **{"train.moments": moments})
    other = calm.start()
    launcher = struck.start()
    struck.until(lambda: any(m["step"] >= 6 for m in struck.metrics()))
    target = worker_pid(struck, "target0")
    os.kill(worker_pid(struck, "drafter1"), signal.SIGKILL)
    struck.until(lambda: "event=drafters_back" in struck.log)
    assert worker_pid(struck, "target0") == target
    assert launcher.wait(300) == 0, struck.log
    assert other.wait(300) == 0, calm.log

    (said,) = re.findall(r"dflash event=drafters_restart .*", struck.log)
    words = dict(pair.split("=", 1) for pair in said.split()[1:])
    assert words["cause"] == "drafter1_was_killed_by_SIGKILL"
    assert (words["worker"], words["life"]) == ("drafter1", "1")
    assert int(words["step"]) % 4 == 0
    assert 0 <= int(words["batches_again"]) <= 8
    assert float(words["lost_s"]) >= 0
    assert "event=drafters_back life=1 down_s=" in struck.log
    assert "event=worker_exit worker=drafter0 life=0" in struck.log
    assert "worker_exit worker=target0" not in struck.log  # it never knew
    assert struck.metrics()[-1]["workers"]["target0"]["life"] == 0
    assert struck.metrics()[-1]["life"] == 1

    same_weights(calm, struck)
    losses = [{m["step"]: m["loss"] for m in run.metrics()} for run in (calm, struck)]
    assert losses[0].keys() == losses[1].keys()
    result = audit(struck.root / "attempts")
    assert result.ok, result
    assert [(e.trained, e.complete) for e in result.epochs] == [(240, True)]
    assert result.rolled_back <= int(words["batches_again"])  # those only begun were never in the record
    kinds = [json.loads(line)["k"] for line in (struck.attempt / "plan.jsonl").read_text().splitlines()]
    assert kinds.count("rollback") == 1
    told = json.loads((struck.attempt / "errors" / "drafter1" / "error.json").read_text())["message"]["message"]
    assert "killed by SIGKILL" in told
