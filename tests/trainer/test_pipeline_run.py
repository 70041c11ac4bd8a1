"""Whole runs on real processes: they finish, learn, stop, and go on bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_support import Run, children_of, write_samples  # type: ignore[import-not-found]

from trainer.checkpoint import MOMENTS, STATE, WEIGHTS, list_checkpoints
from trainer.plan_record import audit

pytestmark = pytest.mark.slow
LINE = re.compile(r"dflash( [a-z_]+=\S+)+")


def test_one_sample_is_learned_by_heart(make_run: Callable[..., Run], tmp_path: Path) -> None:
    data = tmp_path / "one.jsonl"
    ids = [(7 * i * i + 3 * i) % 250 for i in range(40)]
    data.write_text(json.dumps({"input_ids": ids, "prompt_length": 2}) + "\n")
    run = make_run(
        data=data,
        **{
            "train.epochs": None,
            "train.steps": 120,
            "train.lr": 3e-3,
            "train.anchors": 40,
            "train.average_every": 60,
            "train.log_every": 10,
            "data.batch_size": 1,
            "data.buckets": [64],
            "checkpoint.every": 60,
            "checkpoint.keep_last": 1,
        },
    )
    assert run.finish() == 0, run.log
    last = run.metrics()[-1]
    assert last["step"] == last["total"] == 120
    # The last blocks of a sequence run past its end: their prefix is shorter, also of a perfect drafter.
    perfect = sum(min(3, 39 - a) for a in range(2, 39)) / 37 + 1
    assert last["acc"] == 1.0
    assert last["tau"] == pytest.approx(perfect)
    assert last["loss"] < 1.0

    lines = [line for line in run.log.splitlines() if line.startswith("dflash ")]
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert lines[-1] == "dflash event=finished step=120/120"
    assert [line.split()[2] for line in lines if "stage=loading" in line and ":weights" not in line] == [
        "k=0",
        "k=1",
        "k=2",
    ]
    steps = [m["step"] for m in run.metrics()]
    assert steps == list(range(10, 121, 10))
    assert set(last["workers"]) == {"target0", "drafter0"}
    assert all(0 <= v <= 1 for w in last["workers"].values() for k, v in w.items() if k != "life")
    for entry in run.metrics():
        for shares in entry["workers"].values():
            assert sum(v for k, v in shares.items() if k != "life") <= 1 + 1e-9, entry
    assert sum(line.startswith("dflash step=") for line in lines) == len(steps)

    from safetensors.torch import load_file

    (checkpoint,) = list_checkpoints(run.checkpoints)
    weights = load_file(str(checkpoint / WEIGHTS))
    for name, tensor in weights.items():
        if "norm" in name:
            assert (tensor != 1.0).any(), f"{name} never moved"
    assert not list((run.attempt / "errors").glob("*/error.json"))


def test_stopped_and_resumed_is_bit_equal_to_not_stopped(make_run: Callable[..., Run], tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", 160)
    options = {"train.epochs": 2, "train.average_every": 5, "checkpoint.every": 20}
    whole = make_run("whole", data=data, **options)
    reader, writer = os.pipe()
    process = whole.start(stdout=writer, stderr=writer)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)  # from now on its output goes nowhere: a terminal that went away must not end it
    parts = make_run("parts", data=data, **options)
    stopped = parts.start()
    parts.until(lambda: len(parts.metrics()) >= 7)
    stopped.send_signal(signal.SIGTERM)
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(60) == 3, parts.log
    assert "event=stop_requested signal=" in parts.log
    assert "dflash event=stopped step=" in parts.log.splitlines()[-1]
    (at,) = list_checkpoints(parts.checkpoints)[-1:]
    state = json.loads((at / STATE).read_text())
    assert 7 <= state["step"] < 80
    assert parts.metrics()[-1]["step"] == state["step"]

    assert process.wait(120) == 0
    assert whole.metrics()[-1]["step"] == 80
    assert parts.finish() == 0, parts.log
    assert f"dflash event=resumed step={state['step']}/80" in parts.log

    last = [list_checkpoints(run.checkpoints)[-1] for run in (whole, parts)]
    assert [p.name for p in last] == ["step-00000080"] * 2
    for name in (WEIGHTS, MOMENTS):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), f"{name} differs"
    numbers = [{m["step"]: (m["loss"], m["grad_norm"], m["lr"]) for m in run.metrics()} for run in (whole, parts)]
    assert numbers[1] == {step: value for step, value in numbers[0].items() if step > state["step"]}
    result = audit(parts.root / "attempts")
    assert result.ok
    assert [(e.trained, e.complete) for e in result.epochs] == [(160, True), (160, True)]
    assert result.rolled_back == result.provisional == 0


def test_a_target_that_has_loaded_late_does_not_set_the_stage_back(make_run: Callable[..., Run]) -> None:
    run = make_run(**{"workers.target_devices": ["cpu", "cpu"], "train.epochs": 500, "train.average_every": 10})
    process = run.start()

    def late() -> int | None:
        run.workers()  # remembered for the teardown
        return next((pid for pid, line in children_of(process.pid) if " target1 " in line), None)

    pid = run.until(late)
    os.kill(pid, signal.SIGSTOP)
    run.until(lambda: "stage=stepping" in run.log)
    os.kill(pid, signal.SIGCONT)
    run.until(lambda: any(m["workers"]["target1"]["compute"] > 0 for m in run.metrics()[-5:]))
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 3, run.log
    before, _, after = run.log.partition("stage=stepping")
    assert [line.split()[2] for line in before.splitlines() if "stage=loading" in line and ":weights" not in line] == [
        "k=0",
        "k=1",
        "k=2",
    ]
    assert "stage=loading" not in after
