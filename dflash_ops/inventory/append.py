"""One more job in an inventory that a person wrote: appended as text, so that every comment stays where it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dflash_ops.errors import DflashError, InventoryError, UsageError
from dflash_ops.inventory.loader import load
from dflash_ops.inventory.model import quote_key
from dflash_ops.inventory.rewrite import replace_checked
from dflash_ops.inventory.template import quote


def append_job(file: Path, name: str, values: Mapping[str, str | bool], comment: str) -> None:
    """Append `[jobs.NAME]` to the inventory. What comes out is loaded before it replaces what is there.

    Raises:
        UsageError: it would not load (a name or value that no inventory may have).
        DflashError: it cannot be written.
    """
    place = Path(os.path.realpath(file))
    lines = [f"# {comment}", f"[jobs.{quote_key(name)}]"]
    lines += [f"{k} = {str(v).lower() if isinstance(v, bool) else quote(v)}" for k, v in values.items()]

    def check(path: Path) -> None:
        try:
            load(path)
        except InventoryError as error:
            raise UsageError(error.what, f"the new [jobs.{quote_key(name)}]", error.fix) from None

    try:
        text = place.read_text("utf-8").rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"
        replace_checked(place, text.encode("utf-8"), check)
    except OSError as error:
        raise DflashError(
            f"the inventory cannot be written: {error.strerror or error}", str(place), "add the job by hand:\n  "
            + "\n  ".join(lines[1:]),
        ) from None  # fmt: skip
