"""ring.debug on real processes: what is not what a target wrote is told, and given again once. And batches that have no
anchor, and shares of time that are the whole of it."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_support import Run, worker_pid, write_samples  # type: ignore[import-not-found]

from trainer.checkpoint import WEIGHTS, list_checkpoints
from trainer.config import load_config
from trainer.plan_record import audit
from trainer.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a machine busy with other things is no fault


def scribble(run: Run) -> None:
    """Changes one byte of the features in every slot that waits, from outside, by the launcher's own descriptor."""
    prepared = prepare(load_config(run.config), None, "auto")
    layout, plan = prepared.layout, prepared.plan
    acks = [json.loads(line) for line in (run.attempt / "plan.jsonl").read_text().splitlines()]
    done = sum(entry["k"] == "ack" for entry in acks)
    lengths = dict(zip(prepared.index.ids, prepared.index.lengths, strict=True))
    # The drafter reads the batch that it trains out of the ring: that one was checked already.
    training = struct.pack("<4i", *[lengths[i] for i in plan.batch(done).sample_ids])
    for link in Path(f"/proc/{run.running[-1].pid}/fd").iterdir():
        if "(deleted)" in str(link.readlink()) and link.stat().st_size == layout.total_bytes:
            descriptor = os.open(link, os.O_RDWR)
            try:
                for start in range(0, layout.total_bytes, layout.slot_bytes):
                    if os.pread(descriptor, 16, start) != training:
                        at = start + layout.offsets[3] + 5
                        byte = os.pread(descriptor, 1, at)
                        os.pwrite(descriptor, bytes([byte[0] ^ 1]), at)
            finally:
                os.close(descriptor)
            return
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
    assert launcher.wait(300) == 0, struck.log
    assert other.wait(300) == 0, calm.log
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
