"""TensorBoard: the numbers that reach a writer. The writer is a stand-in (the real package is 160 MB with all that it
needs); with the package installed the last test reads real event files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_support import Run  # type: ignore[import-not-found]

from trainer.board import Board
from trainer.config import load_config
from trainer.errors import ConfigError
from trainer.prepare import prepare
from trainer.progress import Meter, Output, WorkerTimes

HERE = importlib.util.find_spec("tensorboard") is not None


class Writer:
    """Keeps the points; from `full_at` on there is no room."""

    def __init__(self, full_at: int = 10**9) -> None:
        self.points: list[tuple[str, float, int]] = []
        self.full_at, self.folder, self.closed = full_at, "", False

    def __call__(self, folder: str) -> Writer:
        self.folder = folder
        return self

    def add_scalar(self, name: str, value: float, step: int, wall: float) -> None:
        if len(self.points) >= self.full_at:
            raise OSError(28, "No space left on device")
        assert wall > 1e9
        self.points.append((name, value, step))

    def flush(self) -> None:
        """The real one has it too."""

    def close(self) -> None:
        self.closed = True


def metered(tmp_path: Path, board: Board) -> None:
    """Two intervals of a run, through the real meter."""
    meter = Meter(Output(), tmp_path / "metrics.jsonl")
    meter.sinks.append(board.write)
    meter.start(0, list)
    for step in (1, 2):
        stats = dict.fromkeys(("correct", "positions", "prefix_sum", "prefix_count", "block_tokens"), 4.0)
        stats |= {"numerator": 8.0 / step, "denominator": 4.0, "context_tokens": 9.0, "grad_norm": 0.5, "empty": 0.0}
        meter.add(stats, 4)
        times = [WorkerTimes("target0", 0, {"wait": 0.0, "compute": 1.0})]
        meter.record(step=step, total=2, epoch=0.5 * step, lr=1e-3, ring=(1, 4), samples=4 * step, workers=times)


def test_each_progress_line_is_a_point_of_each_curve(tmp_path: Path) -> None:
    writer = Writer()
    board = Board(tmp_path, print, writer)
    metered(tmp_path, board)
    board.close()
    assert writer.folder == str(tmp_path / "tensorboard") and writer.closed
    assert [p for p in writer.points if p[0] == "train/loss"] == [("train/loss", 2.0, 1), ("train/loss", 1.0, 2)]
    names = {name for name, _, _ in writer.points}
    assert {"train/tau", "train/lr", "speed/block_tok_s", "workers/target0/compute", "workers/target0/wait"} <= names


def test_losing_the_files_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    board = Board(tmp_path, said.append, Writer(full_at=3))
    metered(tmp_path, board)
    board.close()
    assert len(said) == 1 and "No space left" in said[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.skipif(HERE, reason="tensorboard is installed")
def test_without_the_package_the_extra_is_named_before_anything_starts(make_run: Callable[..., Run]) -> None:
    run = make_run(**{"train.tensorboard": True})
    with pytest.raises(ConfigError, match="tensorboard is not installed") as caught:
        prepare(load_config(run.config), None, "none")
    assert caught.value.exit_code == 2 and "dflash-ops[tensorboard]" in caught.value.next
    assert prepare(load_config(run.config, ["train.tensorboard=false"]), None, "none")


@pytest.mark.skipif(not HERE, reason="tensorboard is not installed")
def test_real_event_files(tmp_path: Path) -> None:
    board = Board(tmp_path, pytest.fail)
    metered(tmp_path, board)
    board.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
