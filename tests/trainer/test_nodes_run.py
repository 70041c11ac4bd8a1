"""Jobs on several nodes: real launchers that meet, train, stop and go on together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_parts import call  # type: ignore[import-not-found]
from lacking import lacking, under_ci
from nodes_support import Cluster, Wire, no_namespaces
from pipeline_support import Run, write_samples  # type: ignore[import-not-found]
from ports import free_port

from trainer.checkpoint import MOMENTS, WEIGHTS, list_checkpoints, step_of
from trainer.nodes_record import audit_nodes

pytestmark = pytest.mark.slow


def weights(run: Run, at: int = -1) -> dict[str, torch.Tensor]:
    """Weights and moments of one of a run's checkpoints."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for name in (WEIGHTS, MOMENTS):
        found |= load_file(str(list_checkpoints(run.checkpoints)[at] / name))
    return found


@pytest.fixture
def two_networks() -> Iterator[dict[str, Any]]:
    """For a `Cluster` of two: each node in a network namespace of its own; both in this one where there are none."""
    if no_namespaces() is not None and not under_ci():
        yield {}
        return
    with Wire() as made:
        yield {"host": "192.0.2.1", "inside": [lambda: made.inside(0), lambda: made.inside(1)]}


def test_two_nodes_equal_one_with_all_drafters(
    make_run: Callable[..., Run], tmp_path: Path, two_networks: dict[str, Any]
) -> None:
    data = write_samples(tmp_path / "data.jsonl", 90)
    options: dict[str, Any] = {"data": data, "train.schedule": "fixed", "nodes.lost_after_s": 10}
    one = make_run("one", **options)
    more = {"workers.drafter_devices": ["cpu", "cpu"]}
    two = Cluster([make_run("node0", **options, **more), make_run("node1", **options)], **two_networks)
    two.start_all()
    assert two.wait() == [0, 0], two.logs
    assert one.finish('workers.drafter_devices=["cpu", "cpu", "cpu"]') == 0, one.log
    names = [p.name for p in list_checkpoints(one.checkpoints)]
    assert all([p.name for p in list_checkpoints(run.checkpoints)] == names for run in two.runs), two.logs
    assert len(names) == 3  # each averaging has its checkpoint
    for at in range(3):
        ours = [weights(run, at) for run in two.runs]
        for name, tensor in weights(one, at).items():
            assert torch.equal(ours[0][name], ours[1][name])
            torch.testing.assert_close(ours[0][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    first, last = two.runs[0].metrics()[-1], one.metrics()[-1]
    assert (first["step"], first["total"], first["samples"]) == (last["step"], last["total"], last["samples"])
    seen = [sum(m["samples"] for m in run.metrics()[-1:]) for run in two.runs]
    assert seen[0] == 90  # node 0 tells of all
    assert seen[1] < 60  # and each other one of itself


def kill(run: Run) -> None:
    """Kills a node's launcher, and with it all that it started."""
    run.workers()
    run.running[-1].kill()
    run.running[-1].wait(30)


def test_killed_nodes_are_waited_for_and_come_back(make_run: Callable[..., Run], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": write_samples(tmp_path / "data.jsonl", 480),
        "train.schedule": "fixed",
        "train.average_every": 4,
        "checkpoint.every": 16,
        "nodes.lost_after_s": 4,
    }
    pair = Cluster([make_run("node0", **options), make_run("node1", **options)])
    zero, one = pair.runs
    pair.start_all()
    undisturbed = make_run("undisturbed", **options)
    undisturbed.start('workers.drafter_devices=["cpu", "cpu"]')
    zero.until(lambda: "event=checkpoint" in zero.log)
    at = len(zero.metrics())
    zero.until(lambda: len(zero.metrics()) > at + 2)
    kill(one)
    zero.until(lambda: "event=node_lost node=1 why=nothing_was_heard_of_it_for_4_s" in zero.log)
    pair.start(1)
    one.until(lambda: "path=of_the_other_nodes" in one.log and one.metrics())
    kill(zero)
    one.until(lambda: "event=node_lost node=0 why=nothing_was_heard_of_it_for_4_s" in one.log)
    pair.start(0)
    assert pair.wait() == [0, 0], pair.logs
    assert "path=of_the_other_nodes" in zero.log
    assert undisturbed.running[-1].wait(120) == 0, undisturbed.log
    ours = weights(zero), weights(one)
    for name, tensor in weights(undisturbed).items():
        assert torch.equal(ours[0][name], ours[1][name])
        torch.testing.assert_close(ours[0][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    result = audit_nodes([run.root / "attempts" for run in pair.runs])
    assert result.ok, result
    assert [(e.trained, e.complete) for e in result.epochs] == [(480, True)]
    assert result.provisional == 0
    told = call("audit", *(run.root / "attempts" for run in pair.runs))
    assert (told.returncode, "480 of 480 samples trained, complete: once each" in told.stdout) == (0, True), told
    half = call("audit", zero.root / "attempts")
    assert half.returncode == 1
    assert "the record of node 1 is missing" in half.stdout


@pytest.fixture
def wire() -> Iterator[Wire]:
    why = no_namespaces()
    if why is not None:
        lacking(why)
    with Wire() as made:
        yield made


def test_a_cut_wire_is_noticed_and_the_rest_goes_on_until_it_is_mended(
    make_run: Callable[..., Run], tmp_path: Path, wire: Wire
) -> None:
    options: dict[str, Any] = {
        "data": write_samples(tmp_path / "data.jsonl", 480),
        "train.epochs": 50,
        "train.average_every": 4,
        "checkpoint.every": 1000,
        "train.sync": "step",
        "nodes.on_loss": "go_on",
        "nodes.lost_after_s": 4,
    }
    pair = Cluster(
        [make_run("node0", **options), make_run("node1", **options)],
        host="192.0.2.1",
        inside=[lambda: wire.inside(0), lambda: wire.inside(1)],
    )
    zero, one = pair.runs
    one.checkpoints.symlink_to(zero.checkpoints)  # a folder that both have
    pair.start_all()
    zero.until(lambda: len(zero.metrics()) > 6)
    with wire.cut():
        zero.until(lambda: "event=nodes generation=2 nodes=0 drafters=1" in zero.log)
        assert "event=node_lost node=1 why=nothing_was_heard_of_it_for_4_s" in zero.log
        one.until(lambda: "event=node_lost node=0 why=nothing_was_heard_of_it_for_4_s" in one.log)
        at = len(zero.metrics())
        zero.until(lambda: len(zero.metrics()) > at + 6)
    one.until(lambda: "event=nodes generation=3 nodes=0,1 drafters=2" in one.log)
    at = len(one.metrics())
    one.until(lambda: len(one.metrics()) > at + 6)
    one.running[-1].terminate()
    assert pair.wait() == [3, 3], pair.logs
    assert "event=stop_requested node=1" in zero.log
    ends = [[line for line in run.log.splitlines() if line.startswith("dflash ")][-1] for run in pair.runs]
    assert ends[0] == ends[1]
    assert ends[0].startswith("dflash event=stopped step=")
    assert "is node 0's folder: it alone writes checkpoints" in one.log
    assert [f"step={step_of(path)}/" in ends[0] for path in list_checkpoints(zero.checkpoints)] == [True]
    result = audit_nodes([run.root / "attempts" for run in pair.runs])
    assert not result.problems
    assert not any(e.repeated_count for e in result.epochs), result


def test_a_node_0_that_stays_away_ends_the_others_with_what_they_hold(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "data": write_samples(tmp_path / "data.jsonl", 48),
        "train.epochs": 50,
        "checkpoint.every": 1000,
        "nodes.lost_after_s": 4,
        "nodes.wait_s": 2,
    }
    pair = Cluster([make_run("node0", **options), make_run("node1", **options)])
    zero, one = pair.runs
    pair.start_all()
    one.until(lambda: len(one.metrics()) > 4)
    kill(zero)
    assert one.running[-1].wait(60) == 1
    assert "error: node 0 did not come back within 2 s" in one.log
    (held,) = list_checkpoints(one.checkpoints)
    assert held.name in one.log.rpartition("event=checkpoint")[2]
    pair.start_all()
    assert pair.wait() == [5, 5], pair.logs
    step = step_of(held)
    told = f"node 0 lacks step {step} (node 0 has none, node 1 has step {step})"
    assert all(f"error: no checkpoint is on every node: {told}" in run.log for run in pair.runs), pair.logs


def test_what_does_not_fit_is_refused_on_all_nodes(make_run: Callable[..., Run], tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 24)
    pair = Cluster([make_run("node0", data=data), make_run("node1", data=data, **{"train.lr": 0.001})])
    pair.start_all()
    assert pair.wait() == [2, 2], pair.logs
    for run in pair.runs:
        assert "error: node 1 does not fit: train.lr is 0.0006 on node 0, 0.001 on node 1" in run.log
        assert not run.metrics()
    alone = Cluster([make_run("alone", data=data), make_run("absent", data=data)])
    alone.port = free_port()
    process = alone.start(0, timeout=1)
    assert process.wait(60) == 1
    assert "error: node 1 did not come within 1 s" in alone.runs[0].log
