"""A file that a command writes for somebody else: looked at before anything is asked, replaced in one step."""

from __future__ import annotations

from pathlib import Path

from dflash_ops.errors import DflashError, UsageError
from dflash_ops.resident.files import may_replace, write_atomic


def refuse(path: Path, option: str, instead: str = "name another one") -> None:
    """Refuse a path at which no file can be, or where what is there must not be replaced.

    Args:
        option: that named it. instead: what to do where a device or a pipe would be replaced.

    Raises:
        UsageError: a folder, or in one that is not there; no ordinary file; no name that a file can have.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", option, "name a file in it")
        if not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent}", option, "make it, or name another one")
        if not may_replace(path):
            raise UsageError(f"{path} is no ordinary file, and would be replaced", option, instead)
    except OSError as error:
        raise UsageError(f"no file can be there: {error.strerror}", f"{option} {path}", "name another one") from None


def put(path: Path, content: bytes, what: str, advice: str) -> None:
    """Replace the file, so that nobody reads half of it.

    Args:
        what: `the report`, for the error. advice: what to do then.

    Raises:
        DflashError: it cannot be written; the old one is as it was.
    """
    try:
        write_atomic(path, content, sync=False)
    except OSError as error:
        raise DflashError(f"{what} cannot be written: {error.strerror or error}", str(path), advice) from None
