"""Processes that die: targets come back, a fault that comes again ends the run, a launcher takes everybody with it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_support import Run, worker_pid, write_samples  # type: ignore[import-not-found]

from trainer.checkpoint import list_checkpoints
from trainer.plan_record import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a machine busy with other things is no fault


def gone(pids: list[int], within: float = 20) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def nothing_new_in_shm(before: set[Path], within: float = 20) -> bool:
    """Polls: tests beside this one may have files there for a moment."""
    deadline = time.monotonic() + within
    while not set(Path("/dev/shm").iterdir()) <= before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_two_and_two_with_a_target_killed_then_the_launcher_then_one_and_one(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    before = set(Path("/dev/shm").iterdir())
    run = make_run(
        data=write_samples(tmp_path / "data.jsonl", 400),
        **{
            "workers.target_devices": ["cpu", "cpu"],
            "workers.drafter_devices": ["cpu", "cpu"],
            "train.average_every": 4,
            "checkpoint.every": 8,
            "ring.slots": 3,
        },
    )
    launcher = run.start()
    run.until(run.metrics)  # the other target may still load: nothing here waits for it
    os.kill(worker_pid(run, "target0"), signal.SIGKILL)
    run.until(lambda: "event=worker_exit worker=target0 life=0 exitcode=-9" in run.log)
    run.until(lambda: "event=worker_start worker=target0 life=1" in run.log)
    at = len(run.metrics()) + random.randint(1, 12)
    run.until(lambda: len(run.metrics()) >= at and list_checkpoints(run.checkpoints))
    pids = run.workers()
    assert len(pids) >= 3
    # One that is stopped cannot notice the end of its socket: only the kernel can end it.
    os.kill(worker_pid(run, "target1"), signal.SIGSTOP)
    launcher.kill()
    launcher.wait(30)
    assert gone(pids), "workers outlived their launcher"
    assert nothing_new_in_shm(before)
    message = json.loads((run.attempt / "errors" / "target0" / "error.json").read_text())["message"]
    assert "killed by SIGKILL" in message["message"]
    drafters = {json.loads(x).get("drafter") for x in (run.attempt / "plan.jsonl").read_text().splitlines()[:-1]}
    assert {"drafter0", "drafter1"} <= drafters

    code = run.finish('workers.target_devices=["cpu"]', 'workers.drafter_devices=["cpu"]')
    assert code == 0, run.log
    result = audit(run.root / "attempts")
    assert result.ok, result
    assert [(e.trained, e.complete) for e in result.epochs] == [(400, True)]
    assert result.provisional == 0
    steps = [m["step"] for m in run.metrics()]
    assert steps == sorted(steps)
    assert run.metrics()[-1]["step"] == run.metrics()[-1]["total"]


def test_a_drafter_that_dies_again_and_a_loss_that_is_not_finite_end_the_run(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    data = write_samples(tmp_path / "data.jsonl", 400)
    dies, diverges = make_run("dies", data=data, **{"train.average_every": 10**6}), make_run("diverges", data=data)
    launcher = dies.start()
    other = diverges.start("train.lr=1e30", "train.warmup=0", "train.clip=1e30")  # both at once: half the time
    dies.until(dies.metrics)
    pids = dies.workers()
    os.kill(worker_pid(dies, "drafter0"), signal.SIGSEGV)
    dies.until(lambda: "event=drafters_back life=1" in dies.log)
    assert "cause=drafter0_was_killed_by_SIGSEGV worker=drafter0 life=1 step=0 " in dies.log
    pids += dies.workers()
    os.kill(worker_pid(dies, "drafter0"), signal.SIGSEGV)
    assert launcher.wait(60) == 1, dies.log
    assert gone(pids)
    assert "drafter0 was killed by SIGSEGV (the same fault twice without a new average between)" in dies.log
    assert "next:  read its log" in dies.log
    errors = sorted(p.parent.name for p in (dies.attempt / "errors").glob("*/error.json"))
    assert errors == ["drafter0", "drafter0.life1"]

    assert other.wait(120) == 4, diverges.log
    assert "error: the" in diverges.log
    assert "Traceback" not in diverges.log
    assert "drafters_restart" not in diverges.log
    assert list_checkpoints(diverges.checkpoints) == []
    message = json.loads((diverges.attempt / "errors" / "drafter0" / "error.json").read_text())["message"]["message"]
    assert re.match(r"NonFiniteError: (the |after step \d+ )", message), message
