"""A tiny random target and a data set, made on the spot; and a launcher under test that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_support import Run, make_job, write_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def make_run(tiny_target: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a job: `make_run(samples=64, **{"train.steps": 3})`."""
    made: list[Run] = []

    def make(name: str = "job", *, samples: int = 48, data: Path | None = None, **changes: Any) -> Run:
        run = make_job(tmp_path / name, tiny_target, samples=samples, data=data, **changes)
        made.append(run)
        return run

    yield make
    for run in made:
        run.kill()
