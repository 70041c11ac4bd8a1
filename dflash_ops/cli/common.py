"""What every command shares: options, the way from a name to a job and its host, and how an error looks.

The rule here: nothing heavy at import. rich, paramiko and the inventory are imported where they are used, so that
`dflash-ops --help` stays fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from dflash_ops.errors import DflashError

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_ops.inventory import Inventory, Job

JobArgument = Annotated[
    str | None, typer.Argument(metavar="[JOB]", help="Job of the inventory; not needed where it has only one.")
]
InventoryOption = Annotated[
    Path | None,
    typer.Option(
        "--inventory",
        "-i",
        metavar="FILE",
        help="inventory.toml to read; else $DFLASH_INVENTORY, this folder or one above it, ~/.config/dflash-ops.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def load_inventory(inventory: Path | None) -> Inventory:
    """The inventory that is meant, found and checked.

    Raises:
        InventoryError: none is there, or it has faults.
    """
    from dflash_ops.inventory import find_inventory, load

    return load(find_inventory(inventory))


def load_job(inventory: Path | None, name: str | None) -> tuple[Inventory, Job]:
    """The inventory and the job that is meant by `name` (None: the default one).

    Raises:
        InventoryError, UsageError: as `load_inventory` and `Inventory.job`.
    """
    loaded = load_inventory(inventory)
    return loaded, loaded.job(name)


def is_plain(stream: IO[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether `stream` should get no colours and no cursor movement."""
    environ = os.environ if environ is None else environ
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return True
    return not stream.isatty()


def console(*, stderr: bool = False) -> Console:
    """A rich console: colours on a terminal only, NO_COLOR honoured, lines never wrapped where nobody sees a width."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Console(file=stream, soft_wrap=not terminal, highlight=False, no_color=is_plain(stream) or None)


def render_error(error: BaseException, stream: IO[str]) -> None:
    """What, where and next of an error (of each one, where it carries several), in red on a terminal."""
    red, dim, green, off = ("", "", "", "") if is_plain(stream) else ("\x1b[1;31m", "\x1b[2m", "\x1b[32m", "\x1b[0m")
    several = getattr(error, "errors", ())
    for one in several or (error,):
        if isinstance(one, DflashError):
            lines = [f"{red}error:{off} {_indented(one.what)}"]
            if one.where:
                lines.append(f"  {dim}where:{off} {_indented(one.where)}")
            if one.next:
                lines.append(f"  {green}next:{off}  {_indented(one.next)}")
        else:
            lines = [f"{red}error:{off} {_indented(str(one))}"]
        print("\n".join(lines), file=stream)
    if len(several) > 1:
        print(f"{len(several)} faults", file=stream)


def _indented(text: str) -> str:
    """Later lines stand under the first; control characters of a foreign text do not reach the terminal."""
    clean = "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)
    return clean.replace("\n", "\n         ")
