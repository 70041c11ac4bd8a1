"""Ten kills at random while a run goes on: it ends as it would have without them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_support import Run, worker_pid, write_samples  # type: ignore[import-not-found]
from trainer_chaos import HANGS, KILLS, SAMPLES, options, storm  # type: ignore[import-not-found]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_ten_kills_change_nothing(make_run: Callable[..., Run], tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data.jsonl", SAMPLES)
    calm, struck = (make_run(name, data=data, **options(KILLS, "fixed")) for name in ("calm", "struck"))
    seed = random.SystemRandom().randrange(10**6)
    chaos, said = storm(calm, struck, seed, KILLS, HANGS)
    assert not said, "\n".join([f"seed {seed}", *said, chaos.table(), struck.log])
    assert len(chaos.hits) == KILLS


def test_a_target_that_was_of_use_is_forgiven_and_one_that_is_not_ends_the_run(make_run: Callable[..., Run]) -> None:
    run = make_run(samples=400, **{"train.epochs": 50, "workers.restarts": 1, "workers.target_devices": ["cpu", "cpu"]})
    launcher = run.start()

    def of_use(life: int) -> Callable[[], bool]:
        return lambda: any(
            entry["workers"]["target0"]["life"] == life and entry["workers"]["target0"]["compute"] > 0
            for entry in run.metrics()[:-4]  # an average followed
        )

    for life in range(3):
        run.until(of_use(life))
        os.kill(worker_pid(run, "target0"), signal.SIGKILL)
        run.until(lambda life=life: f"event=worker_start worker=target0 life={life + 1}" in run.log)
    os.kill(worker_pid(run, "target0"), signal.SIGKILL)  # it still loads
    assert launcher.wait(90) == 1, run.log
    assert "error: target0 was killed by SIGKILL" in run.log
