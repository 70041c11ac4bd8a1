"""Which inventory is meant: the option, DFLASH_INVENTORY, this folder or one above it, the user's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from dflash_ops.errors import InventoryError, UsageError

NAME = "inventory.toml"
VARIABLE = "DFLASH_INVENTORY"


def find_inventory(
    given: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Path:
    """Absolute path of the inventory to read.

    Looked at in this order: `given` (the option `-i`), `$DFLASH_INVENTORY`, `inventory.toml` in `cwd` and in each
    folder above it (up to the home folder where `cwd` lies inside it, else up to `/`),
    `~/.config/dflash-ops/inventory.toml` (`$XDG_CONFIG_HOME` is honoured).

    Raises:
        InventoryError: none of them is there, or the one that was named is not.
    """
    environ = os.environ if environ is None else environ
    cwd = _here() if cwd is None else cwd
    named = [(given, "--inventory")] if given is not None else []
    if environ.get(VARIABLE):
        named.append((Path(environ[VARIABLE]), VARIABLE))
    if named:
        path, how = named[0]
        path = cwd / os.path.expanduser(path)  # noqa: PTH111  # a ~somebody that is not there stays what it is
        if _is(path, Path.is_dir):
            path = path / NAME
        if not _is(path, Path.exists):
            raise InventoryError(
                f"there is no inventory where {how} points to",
                file=str(path),
                fix="correct the path, or write one with: dflash-ops init",
            )
        return path
    home = Path(environ["HOME"]) if environ.get("HOME") else None
    tried = []
    for folder in (cwd, *cwd.parents):
        tried.append(folder / NAME)
        if folder == home:
            break
    config = environ.get("XDG_CONFIG_HOME") or (str(home / ".config") if home is not None else "")
    if config:
        tried.append(Path(config) / "dflash-ops" / NAME)
    for path in tried:
        if _is(path, Path.is_file):
            return path
    raise InventoryError(
        f"no {NAME} was found in this folder, in the folders above it, or in {tried[-1].parent}",
        file=str(tried[0]),
        fix="write one with: dflash-ops init",
    )


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the folder that you are in is not there any more", next="cd to another one") from None


def _is(path: Path, test: Callable[[Path], bool]) -> bool:
    """A folder that may not be looked into has no inventory for us."""
    try:
        return test(path)
    except OSError:
        return False
