"""A tiny random target and a data set, made on the spot; and a launcher under test that leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_support import MASK, Run, write_samples, write_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def make_run(tiny_target: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a job: `make_run(samples=64, **{"train.steps": 3})`."""
    made: list[Run] = []

    def make(name: str = "job", *, samples: int = 48, data: Path | None = None, **changes: Any) -> Run:
        root = tmp_path / name
        root.mkdir()
        raw: dict[str, dict[str, Any]] = {
            "target": {"path": str(tiny_target)},
            "drafter": {"layers": 1, "block_size": 4, "taps": 1, "mask_token_id": MASK},
            "data": {
                "path": str(data or write_samples(root / "data.jsonl", samples)),
                "max_length": 64,
                "buckets": [32, 64],
                "batch_size": 4,
            },
            "train": {"epochs": 1, "anchors": 8, "average_every": 3, "log_every": 1},
            "checkpoint": {"every": 3},
        }
        for key, value in changes.items():
            table, _, entry = key.partition(".")
            raw.setdefault(table, {})[entry] = value
        config = root / "run.json"
        config.write_text(json.dumps(raw), encoding="utf-8")
        run = Run(root, config)
        made.append(run)
        return run

    yield make
    for run in made:
        run.kill()
