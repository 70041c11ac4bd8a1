"""ring.debug on real processes: what is not what a target wrote is told, and given again once. And batches that have no
anchor, and shares of time that are the whole of it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_support import Run, worker_pid, write_samples  # type: ignore[import-not-found]

from trainer.checkpoint import WEIGHTS, list_checkpoints
from trainer.config import load_config
from trainer.plan_record import audit
from trainer.prepare import prepare

pytestmark = pytest.mark.slow


def scribble(run: Run) -> list[int]:
    """Changes one byte of the features in every slot, from outside, by the launcher's own descriptor."""
    prepared = prepare(load_config(run.config), None, "auto")
    size, slot = prepared.layout.total_bytes, prepared.layout.slot_bytes
    launcher = Path(f"/proc/{run.running[-1].pid}/fd")
    for link in launcher.iterdir():
        if "(deleted)" in str(link.readlink()) and link.stat().st_size == size:
            descriptor = os.open(link, os.O_RDWR)
            try:
                for number in range(prepared.layout.slots):
                    at = number * slot + prepared.layout.offsets[3] + 5
                    byte = os.pread(descriptor, 1, at)
                    os.pwrite(descriptor, bytes([byte[0] ^ 1]), at)
            finally:
                os.close(descriptor)
            return list(range(prepared.layout.slots))
    raise AssertionError("the ring was not found")


def quiet(pid: int) -> bool:
    """Whether a process has used no time for a while: the target has filled all slots."""

    def ticks() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    before = ticks()
    time.sleep(0.5)
    return ticks() == before


def test_a_slot_that_changed_is_told_and_its_batch_trained_from_a_new_one(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    data = write_samples(tmp_path / "data.jsonl", 120)
    options = {"ring.debug": True, "ring.slots": 3, "train.schedule": "fixed", "train.average_every": 10}
    calm, struck = make_run("calm", data=data, **options), make_run("struck", data=data, **options)
    other, launcher = calm.start(), struck.start()
    struck.until(lambda: len(struck.metrics()) >= 2)
    drafter = worker_pid(struck, "drafter0")
    os.kill(drafter, signal.SIGSTOP)
    struck.until(lambda: quiet(worker_pid(struck, "target0")))
    scribble(struck)
    os.kill(drafter, signal.SIGCONT)
    assert launcher.wait(90) == 0, struck.log
    assert other.wait(90) == 0, calm.log
    told = re.findall(r"event=slot_mismatch slot=(\d) batch=(\d+) writer=target0 worker=drafter0", struck.log)
    assert len(told) >= 2, struck.log
    assert "slot_mismatch" not in calm.log
    last = [list_checkpoints(run.checkpoints)[-1] / WEIGHTS for run in (calm, struck)]
    assert last[0].read_bytes() == last[1].read_bytes()
    result = audit(struck.root / "attempts")
    assert result.ok
    assert [(e.trained, e.complete) for e in result.epochs] == [(120, True)]
    for entry in struck.metrics():
        for shares in entry["workers"].values():
            assert sum(v for k, v in shares.items() if k != "life") == pytest.approx(1.0)
    assert re.search(r"life=0 shares=target0:\d+/\d+/\d+/0,drafter0:\d+/\d+/\d+/\d+", struck.log)
