"""What the trainer counts of each stage: exact sums, and what is left out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.progress import Meter, Output
from trainer.stages import Stages
from trainer.workers import Worker


def test_a_workers_first_batch_of_each_length_in_each_life_is_left_out() -> None:
    stages = Stages()
    for life, length, seconds in ((0, 32, 9.0), (0, 32, 1.0), (0, 64, 9.0), (0, 32, 2.0), (1, 32, 9.0), (1, 32, 4.0)):
        stages.batch("target0", life, length, forward=seconds, copy_in=0.5)
    stages.averaging(0, 9.0)  # connections are made
    stages.averaging(0, 3.0)
    stages.saving(5.0)
    assert stages.take() == {
        "forward": {"32": [3, 7.0, 21.0]},
        "copy_in": {"32": [3, 1.5, 0.75]},
        "average": [1, 3.0, 9.0],
        "save": [1, 5.0, 25.0],
    }
    assert stages.take() == {}
    stages.batch("target0", 1, 32, forward=1.0)  # an interval later it is no first batch
    assert stages.take() == {"forward": {"32": [1, 1.0, 1.0]}}


def test_a_record_holds_the_intervals_stages_and_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meter = Meter(Output(), tmp_path / "metrics.jsonl")
    meter.stages.batch("drafter0", 0, 32, step=9.0)
    meter.start(0, list)
    stats = dict.fromkeys(
        ("numerator", "denominator", "correct", "positions", "prefix_sum", "prefix_count", "grad_norm", "empty"), 1.0
    )
    for step in (1, 2):
        meter.stages.batch("drafter0", 0, 32, step=0.25 * step)
        meter.add({**stats, "block_tokens": 64, "context_tokens": 100}, 4)
        meter.record(step=step, total=2, epoch=0.5, lr=1e-3, ring=(0, 4), samples=4 * step, workers=[])
    first, second = (json.loads(line)["stages"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first.pop("seconds") > 0
    assert first == {"batches": 1, "block_tokens": 64, "ctx_tokens": 100, "step": {"32": [1, 0.25, 0.0625]}}
    assert second["step"] == {"32": [1, 0.5, 0.25]}


def test_of_a_workers_wait_the_way_of_its_words_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("trainer.workers.time.monotonic", lambda: now)
    worker = Worker("target0", "target", 0, "cpu")
    worker.idle()
    now = 103.0  # no slot was free for 3 s
    worker.busy()
    worker.heard({"wait": 3.25, "compute": 1.0, "copy": 0.5, "sync": 0.0})
    assert worker.gained == {"wait": 3.25, "compute": 1.0, "copy": 0.5, "sync": 0.0}
    assert worker.hop == pytest.approx(0.25)
    worker.idle()
    worker.busy()
    worker.heard({"wait": 3.3, "compute": 2.0, "copy": 0.5, "sync": 0.0})
    assert worker.gained["compute"] == 1.0
    assert worker.hop == pytest.approx(0.05)
