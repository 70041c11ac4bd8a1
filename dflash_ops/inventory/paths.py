"""Paths of this machine: relative ones are relative to the inventory, `~` is the home folder, links stay links."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> str:
    """The home folder; `~` itself where the system knows none (a user without an entry and without HOME)."""
    return os.path.expanduser("~")  # noqa: PTH111  # Path.home() raises there


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))  # noqa: PTH111  # the same, for ~somebody


def local_program(program: str, folder: Path) -> str:
    """A bare name stays one (found in PATH), a path becomes absolute. A venv's python is a link and must stay one."""
    return program if "/" not in program else _absolute(program, folder)


def local_path(path: str | None, folder: Path) -> str | None:
    return None if path is None else _absolute(path, folder)
