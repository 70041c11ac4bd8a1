"""How the resident calls itself anew: from its zipapp, or from a checkout."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path

import dflash_ops


def archive() -> Path | None:
    """The zipapp that this code runs from, by its real name (current.pyz may be switched under us), else None."""
    first = Path(os.path.realpath(sys.path[0])) if sys.path and sys.path[0] else None
    return first if first is not None and first.is_file() else None


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
