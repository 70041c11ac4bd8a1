"""Checkpoints beside the training: a slow or failing one stops nothing, and other numbers of drafters go on from it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_support import Run, children_of, worker_pid, write_samples  # type: ignore[import-not-found]

from trainer.checkpoint import list_checkpoints, step_of, verify
from trainer.plan_record import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a machine busy with other things is no fault


def stopped_saver(run: Run) -> int | None:
    """A saver that was caught at work, and stopped."""
    for pid, line in children_of(run.running[-1].pid):
        if "trainer.saver" in line:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tTDRS":
                    return pid
    return None


def test_a_slow_save_a_killed_one_and_a_full_disk_stop_nothing(make_run: Callable[..., Run]) -> None:
    run = make_run(
        samples=200,
        **{"train.epochs": 10_000, "train.average_every": 2, "checkpoint.every": 2, "checkpoint.keep_last": 2},
    )
    launcher = run.start()
    pid = run.until(lambda: stopped_saver(run))
    # The step that is being saved: two behind the last one that was. Metrics may be further by now.
    saved = [int(n) for n in re.findall(r"event=checkpoint step=(\d+)", run.log)]
    at = max(saved, default=0) + 2
    # Two more steps are trained, and averaged into the other buffer; then there is none left, and it waits.
    run.until(lambda: run.metrics()[-1]["step"] >= at + 3)

    def still() -> bool:
        before = run.metrics()[-1]["step"]
        time.sleep(1.0)
        return bool(run.metrics()[-1]["step"] == before)

    run.until(still)
    waiting = run.metrics()[-1]["step"]
    assert waiting <= at + 5
    os.kill(pid, signal.SIGKILL)
    run.until(lambda: "event=checkpoint_failed" in run.log)
    assert re.search(r"checkpoint_failed step=\d+ count=1 reason=the_saver_was_killed_by_SIGKILL", run.log)
    run.until(lambda: run.metrics()[-1]["step"] > waiting + 4)
    run.until(lambda: list_checkpoints(run.checkpoints))

    # No file can grow beyond 64 KiB: what a full disk does to tensor files.
    soft, hard = resource.prlimit(launcher.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(launcher.pid, resource.RLIMIT_FSIZE, (1 << 16, hard))
    run.until(lambda: "reason=File_too_large:" in run.log)
    good = list_checkpoints(run.checkpoints)
    assert good
    assert all(verify(path) for path in good)
    resource.prlimit(launcher.pid, resource.RLIMIT_FSIZE, (soft, hard))
    run.until(lambda: step_of(list_checkpoints(run.checkpoints)[-1]) > step_of(good[-1]))
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(300) == 3, run.log
    last = list_checkpoints(run.checkpoints)[-1]
    assert step_of(last) == run.metrics()[-1]["step"]
    assert len(list_checkpoints(run.checkpoints)) == 2
    assert not [p for p in run.checkpoints.iterdir() if p.name.startswith(".step")]
    assert audit(run.root / "attempts").ok

    # The last one failing is an error, and what was there stays.
    resource_limited = run.start()
    run.until(lambda: run.metrics())
    resource.prlimit(resource_limited.pid, resource.RLIMIT_FSIZE, (1 << 16, hard))
    resource_limited.send_signal(signal.SIGTERM)
    assert resource_limited.wait(300) == 1, run.log
    assert "error: the last checkpoint cannot be written: File too large" in run.log
    assert verify(list_checkpoints(run.checkpoints)[-1]).step >= step_of(last)


def test_two_drafters_then_one_then_three_go_on_from_the_same_checkpoints(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run(
        data=write_samples(tmp_path / "data.jsonl", 320),
        **{"train.moments": "local", "train.average_every": 2, "checkpoint.every": 4, "ring.slots": 4},
    )
    steps: list[list[int]] = []
    for drafters in (2, 1):
        process = run.start(f"workers.drafter_devices={json.dumps(['cpu'] * drafters)}")
        begun = run.until(lambda: run.metrics())[0]["step"]
        run.until(lambda first=begun: run.metrics()[-1]["step"] >= first + 5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 3, run.log
        steps.append([m["step"] for m in run.metrics()])
        path = list_checkpoints(run.checkpoints)[-1]
        assert len(list(path.glob("moments*.safetensors"))) == drafters
    assert run.finish('workers.drafter_devices=["cpu", "cpu", "cpu"]', 'train.moments="averaged"', within=300) == 0
    steps.append([m["step"] for m in run.metrics()])
    for before, after in itertools.pairwise(steps):
        assert after[0] == before[-1] + 1  # it goes on where the last one stopped
    rates = [m["lr"] for n in (1, 2, 3) for m in _metrics(run, n)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    result = audit(run.root / "attempts")
    assert result.ok, result
    assert [(e.trained, e.complete) for e in result.epochs] == [(320, True)]


def _metrics(run: Run, attempt: int) -> list[dict[str, float]]:
    lines = (run.root / "attempts" / str(attempt) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_drafter_that_hangs_is_killed_and_a_stop_meanwhile_loses_nothing(make_run: Callable[..., Run]) -> None:
    run = make_run(samples=200, **{"train.epochs": 10_000, "workers.timeout_s": 20, "train.average_every": 2})
    process = run.start()
    run.until(lambda: len(run.metrics()) >= 5)
    os.kill(worker_pid(run, "drafter0"), signal.SIGSTOP)
    run.until(lambda: "event=drafters_restart cause=drafter0_said_nothing_for_20_s" in run.log)
    process.send_signal(signal.SIGTERM)  # drafters are loading: the last average is all there is
    assert process.wait(300) == 3, run.log
    step = int(re.findall(r"event=drafters_restart .* step=(\d+)", run.log)[0])
    assert step_of(list_checkpoints(run.checkpoints)[-1]) >= step
    assert audit(run.root / "attempts").ok
