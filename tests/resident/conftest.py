from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from resident_lab import Lab, lab

from dflash_ops.deploy.zipapp import build_resident


@pytest.fixture(scope="session")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident")
    id = build_resident(folder / "new.pyz")
    return (folder / "new.pyz").rename(folder / f"{id}.pyz")


@pytest.fixture
def one(pyz: Path, tmp_path: Path) -> Iterator[Lab]:
    """A root in which nothing was ever started."""
    with lab(pyz, tmp_path) as made:
        yield made
