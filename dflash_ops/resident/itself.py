"""How the resident calls itself anew: from its zipapp, or from a checkout."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path

import dflash_ops
from dflash_ops.contracts import Layout


def archive() -> Path | None:
    """The zipapp that this code runs from, by its real name (current.pyz may be switched under us), else None."""
    for entry in sys.path[:2]:  # in front of it may stand its compiled form, which is none to start from
        path = Path(os.path.realpath(entry)) if entry and not entry.endswith(".zip") else None
        if path is not None and path.is_file():
            return path
    return None


@cache
def version() -> str:
    """The zipapp's id; of a checkout the package's version."""
    path = archive()
    if path is None:
        return dflash_ops.__version__
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def argv(command: str, *args: str) -> list[str]:
    """Argument list that runs one of our commands in a new interpreter.

    Isolated, without site-packages: nothing in the container's Python may get between us and our own parts.
    """
    path = archive()
    if path is not None:
        return [sys.executable, "-I", "-S", str(path), command, *args]
    # From a checkout libtmux comes from site-packages, and the package from where it lies.
    code = f"import sys; sys.path.insert(0, {str(Path(dflash_ops.__file__).resolve().parent.parent)!r})"
    code += "; from dflash_ops.resident.__main__ import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, command, *args]


def outdated(root: Path) -> bool:
    """Whether another build was installed here since we were started (`current.pyz` is not what we run from)."""
    path, now = archive(), Layout(root).resident_current
    return path is not None and now.exists() and os.path.realpath(now) != str(path)


def newest(root: Path, command: str, *args: str) -> list[str]:
    """As `argv`, of the build that is installed here now and not of the one that we happen to be."""
    path, now = archive(), Layout(root).resident_current
    return [str(now) if path is not None and a == str(path) and now.exists() else a for a in argv(command, *args)]
