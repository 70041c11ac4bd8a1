"""Paths of this machine: relative ones are relative to the inventory, `~` is the home folder, links stay links."""

from __future__ import annotations

import os
from pathlib import Path


def local_program(program: str, folder: Path) -> str:
    """A bare name stays one (found in PATH), a path becomes absolute. A venv's python is a link and must stay one."""
    return program if "/" not in program else os.path.normpath(folder / Path(program).expanduser())


def local_path(path: str | None, folder: Path) -> str | None:
    return None if path is None else os.path.normpath(folder / Path(path).expanduser())
