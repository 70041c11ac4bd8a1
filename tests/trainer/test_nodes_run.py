"""Jobs on several nodes: real launchers that meet, train, stop and go on together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes_support import Cluster
from pipeline_support import Run, write_samples  # type: ignore[import-not-found]

from trainer.checkpoint import WEIGHTS, list_checkpoints

pytestmark = pytest.mark.slow


def weights(run: Run) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(str(list_checkpoints(run.checkpoints)[-1] / WEIGHTS))
    return found


def test_two_nodes_equal_one_with_all_drafters(make_run: Callable[..., Run], tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 90)
    options: dict[str, Any] = {"data": data, "train.schedule": "fixed", "checkpoint.every": 6, "nodes.lost_after_s": 5}
    two = Cluster([make_run("node0", **options), make_run("node1", **options)])
    one = make_run("one", **options)
    two.start_all()
    assert two.wait() == [0, 0], two.logs
    assert one.finish('workers.drafter_devices=["cpu", "cpu"]') == 0, one.log
    names = [p.name for p in list_checkpoints(one.checkpoints)]
    assert all([p.name for p in list_checkpoints(run.checkpoints)] == names for run in two.runs), two.logs
    ours = [weights(run) for run in two.runs]
    for name, tensor in weights(one).items():
        assert torch.equal(ours[0][name], ours[1][name])
        torch.testing.assert_close(ours[0][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    first, last = two.runs[0].metrics()[-1], one.metrics()[-1]
    assert (first["step"], first["total"], first["samples"]) == (last["step"], last["total"], last["samples"])
    seen = [sum(m["samples"] for m in run.metrics()[-1:]) for run in two.runs]
    assert seen[0] == 90  # node 0 tells of all
    assert seen[1] < 60  # and each other one of itself


def lost(cluster: Cluster, rank: int) -> None:
    """Kills a node's launcher, and with it all that it started."""
    run = cluster.runs[rank]
    run.workers()
    run.running[-1].kill()
    run.running[-1].wait(30)


def test_a_node_that_is_killed_is_waited_for_and_comes_back(make_run: Callable[..., Run], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": write_samples(tmp_path / "data.jsonl", 400),
        "train.average_every": 4,
        "checkpoint.every": 16,
        "nodes.lost_after_s": 2,
    }
    pair = Cluster([make_run("node0", **options), make_run("node1", **options)])
    pair.start_all()
    pair.runs[0].until(lambda: "event=checkpoint" in pair.runs[0].log)
    at = len(pair.runs[0].metrics())
    pair.runs[0].until(lambda: len(pair.runs[0].metrics()) > at + 3)
    lost(pair, 1)
    pair.runs[0].until(lambda: "event=node_lost node=1 why=nothing_was_heard_of_it_for_2_s" in pair.runs[0].log)
    pair.start(1)
    assert pair.wait() == [0, 0], pair.logs
    print(pair.logs)
    assert 0
