"""Writing a new inventory: checked before it is written, never over an old one by accident."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.errors import DflashError, InventoryError, UsageError
from dflash_ops.inventory.loader import load
from dflash_ops.inventory.template import template


@dataclass(frozen=True)
class Created:
    """`path` of the new inventory, and where the one that it replaced is `kept`."""

    path: Path
    kept: Path | None = None


def create(
    path: Path, *, host: str = "local", root: str = ".dflash/demo", interpreter: str | None = None, force: bool = False
) -> Created:
    """Write an inventory whose local host is called `host` and whose demo job lives in `root`.

    `interpreter` None: `.venv/bin/python` where there is one beside the file, else the Python that runs this.

    Raises:
        UsageError: there is one already (without `force`), or a name that no inventory may have.
        DflashError: the file cannot be written.
    """
    try:
        path = Path(os.path.abspath(path.expanduser()))  # noqa: PTH100  # a link stays what it is
        if path.is_dir():
            path = path / "inventory.toml"
        if path.exists() and not path.is_file():  # a device, which --force would take away from everybody
            raise UsageError("there is something that is no ordinary file", str(path), "name another file")
        if interpreter is None:
            venv = Path(".venv", "bin", "python")
            interpreter = str(venv) if (path.parent / venv).exists() else sys.executable
        beside = path.with_name(f".{path.name}.new")
        there = os.path.lexists(path)
        if there and not force:
            raise UsageError(
                "there is an inventory already, and it was left as it is",
                str(path),
                "edit it, name another file, or use --force (the old one is kept beside it)",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(template(host, root, interpreter), encoding="utf-8")
        try:
            _must_load(beside)
            kept = _free(path) if there else None
            if kept is not None:
                path.rename(kept)
            beside.rename(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        text = f"the inventory cannot be written: {error.strerror or error}"
        raise DflashError(text, str(path), "choose a folder that you may write") from None
    return Created(path, kept)


def _must_load(path: Path) -> None:
    """What is written must load: a root such as `/` is refused before anything is replaced."""
    try:
        load(path)
    except InventoryError as error:
        option = {"root": "--root", "interpreter": "--interpreter"}.get(error.key.rpartition(".")[2], "--host")
        raise UsageError(error.what, option, error.fix) from None


def _free(path: Path) -> Path:
    """A name beside `path` that nothing has yet."""
    number = 0
    while True:
        name = path.with_name(f"{path.name}.old" + (f".{number}" if number else ""))
        if not os.path.lexists(name):
            return name
        number += 1
