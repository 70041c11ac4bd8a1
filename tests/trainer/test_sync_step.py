"""`train.sync = "step"`: drafters that add up their gradients train as one with all their batches does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_support import REPO, Run, write_samples  # type: ignore[import-not-found]

from trainer.actions import Average, Commit, Fill, Join, Phase, Save, Train
from trainer.checkpoint import WEIGHTS, list_checkpoints
from trainer.plan_record import audit
from trainer.scheduler import Scheduler


@pytest.mark.slow
def test_two_drafters_equal_one_with_both_batches(make_run: Callable[..., Run], tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 4 * 8 + 2)
    options: dict[str, Any] = {"train.warmup": 0.0, "data.buckets": [64], "train.lr": 3e-3, "checkpoint.every": 100}
    options |= {"train.epochs": None, "train.steps": 8}
    two = make_run("two", data=data, **options, **{"data.batch_size": 2, "train.sync": "step"})
    one = make_run("one", data=data, **options)
    code = two.finish('workers.drafter_devices=["cpu", "cpu"]')
    assert code == 0, two.log
    assert one.finish() == 0, one.log
    assert two.metrics()[-1]["step"] == one.metrics()[-1]["step"] == 8
    from safetensors.torch import load_file

    weights = [load_file(str(list_checkpoints(run.checkpoints)[-1] / WEIGHTS)) for run in (two, one)]
    for name, tensor in weights[1].items():
        # AdamW divides by the gradient's size: where that is near zero, rounding becomes visible.
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-4, atol=2e-5, msg=name)
    # What is left of the epoch is one batch: a step in which the other drafter has none.
    code = two.finish('workers.drafter_devices=["cpu", "cpu"]', "train.steps=null", "train.epochs=1")
    assert code == 0, two.log
    assert two.metrics()[-1]["step"] == 9
    result = audit(two.root / "attempts")
    assert result.ok
    assert [(e.trained, e.complete) for e in result.epochs] == [(34, True)]


STEP = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from trainer import averaging
averaging.PIECE = 5
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
for weight, positions, bad in ((1 + 2 * rank, 4, 0), (rank, 4 * rank, 0), (1, 0, 0), (1, 4, rank)):
    parameters = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(4))]
    if positions:
        for p in parameters:
            p.grad = torch.full_like(p, float(rank + 1))
    sums = averaging.add_gradients(parameters, float(weight), float(positions), bool(bad), torch.device("cpu"))
    gradients = [None if p.grad is None else p.grad.unique().tolist() for p in parameters]
    print(sums.weight, sums.positions, sums.bad, gradients)
weights = [torch.full((3, 3), float(rank)), torch.tensor(float(rank))]
averaging.make_equal(weights, 1)
print([w.unique().tolist() for w in weights])
dist.destroy_process_group()
"""


def test_who_has_no_anchor_takes_part_and_a_skip_is_everybodys(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", STEP, str(rank), str(tmp_path / "store")],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = [process.communicate(timeout=90)[0].splitlines() for process in both]
    assert first[0] == second[0] == "4.0 8.0 0.0 [[1.75], [1.75]]"  # 1 * 1/4 + 2 * 3/4
    assert first[1] == second[1] == "1.0 4.0 0.0 [[2.0], [2.0]]"  # drafter 0 has nothing, and has the same gradient
    assert first[2] == second[2] == "2.0 0.0 0.0 [None, None]"  # nobody has anything: nobody steps
    assert first[3].startswith("2.0 8.0 1.0 ")  # one loss is not finite, and both know it
    assert second[3].startswith("2.0 8.0 1.0 ")
    assert first[4] == second[4] == "[[1.0], [1.0]]"


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    drafters=st.integers(1, 4),
    total=st.integers(0, 30),
    every=st.integers(1, 4),
    schedule=st.sampled_from(["ready", "fixed"]),
    stop_at=st.none() | st.integers(0, 120),
    falls=st.sets(st.integers(0, 120), max_size=4),
)
def test_steps_are_collective_whatever_comes_first(
    seed: int, drafters: int, total: int, every: int, schedule: str, stop_at: int | None, falls: set[int]
) -> None:
    rng = random.Random(seed)
    names = tuple(f"drafter{i}" for i in range(drafters))
    s = Scheduler(names, drafters + rng.randint(0, 3), 0, 0, total, every, 3, schedule=schedule, sync="step")
    filling: list[Fill] = []
    doing: dict[str, Train | Join | Average | None] = dict.fromkeys(names)
    steps: list[list[int]] = []
    for name in names:
        s.drafter_asks(name)
    s.target_asks("target0")
    committed = 0
    for moment in range(5000):
        if moment == stop_at:
            s.stop()
        if moment in falls and s.phase in (Phase.RUN, Phase.AVERAGING):  # a drafter died: all begin anew
            s.drafters_died()
            del steps[committed:]
            doing = dict.fromkeys(names)
            for name in names:
                s.drafter_asks(name)
        for action in s.decide():
            if isinstance(action, Fill):
                filling.append(action)
            elif isinstance(action, (Train, Join)):
                assert doing[action.worker] is None
                doing[action.worker] = action
            elif isinstance(action, Average):
                assert not any(doing.values())
                doing = dict.fromkeys(names, action)
            elif isinstance(action, Commit):
                committed = len(steps)
            elif isinstance(action, Save):
                s.saved()
        if s.phase is Phase.ENDED:
            break
        if all(doing.values()):  # a collective ends when everybody is in it
            if isinstance(doing[names[0]], Average):
                assert all(isinstance(d, Average) for d in doing.values())
            else:
                steps.append(sorted(d.batch for d in doing.values() if isinstance(d, Train)))
                assert len({s.step_of(d.batch) for d in doing.values() if isinstance(d, (Train, Join))}) == 1
            order = list(names)
            rng.shuffle(order)
            for name in order:
                action, doing[name] = doing[name], None
                if isinstance(action, Average):
                    s.averaged(name)
                elif isinstance(action, Train):
                    s.trained(name, action.batch)
                s.drafter_asks(name)
        elif filling:
            done = filling.pop()
            s.filled("target0", done.slot)
            s.target_asks("target0")
    assert s.phase is Phase.ENDED
    trained = [batch for step in steps for batch in step]
    assert trained == list(range(len(trained)))
    assert all(len(step) == drafters for step in steps[:-1])
    assert s.step == len(steps)
    if stop_at is None:
        assert len(trained) == total
