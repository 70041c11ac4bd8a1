"""What every command shares: options, the way from a name to a job and its host, and how an error looks.

The rule here: nothing heavy at import. rich, paramiko and the inventory are imported where they are used, so that
`dflash-ops --help` stays fast.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from dflash_ops.cli import complete
from dflash_ops.errors import DflashError

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_ops.inventory import Inventory, Job

JobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help="Job of the inventory; not needed where it has only one.",
        autocompletion=complete.jobs,
    ),
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
    """Whether `stream` should get plain lines: it is no terminal, or one that cannot move its cursor."""
    environ = os.environ if environ is None else environ
    return environ.get("TERM") == "dumb" or not stream.isatty()


def colours(stream: IO[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether `stream` should get colours: a terminal does, unless somebody said otherwise.

    `NO_COLOR` (not empty) wins over all, then `FORCE_COLOR` and `CLICOLOR_FORCE` (not empty and not 0), which count in
    a pipe too, then `CLICOLOR=0` and `TERM=dumb`.
    """
    environ = os.environ if environ is None else environ
    if environ.get("NO_COLOR") or environ.get("FORCE_COLOR") == "0":
        return False
    if environ.get("FORCE_COLOR") or environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return environ.get("CLICOLOR") != "0" and not is_plain(stream, environ)


def console(*, stderr: bool = False) -> Console:
    """A rich console: colours as `colours` says, lines never wrapped where nobody sees a width."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    terminal, paint = stream.isatty(), colours(stream)
    # Without a colour system rich writes no style at all: bold and dim are escape codes too.
    system: Literal["auto", "standard"] = "standard" if is_plain(stream) else "auto"
    return Console(
        file=stream,
        soft_wrap=not terminal,
        highlight=False,
        force_terminal=paint or not is_plain(stream),
        color_system=system if paint else None,
        no_color=not paint,
    )


def discard_output() -> None:
    """Nobody reads standard output any more (`| head`): what is still buffered would fail with words of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own: what `--json` answers."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def error_json(error: BaseException, code: int) -> dict[str, Any]:
    """What `--json` prints of an error that leaves no other answer (docs/contracts.md, `--json`)."""
    several = getattr(error, "errors", ()) or (error,)
    faults = [e.to_json() if isinstance(e, DflashError) else _other(e) for e in several]
    return {"schema": 1, "kind": "error", "exit": code, "error": faults[0], "errors": faults}


def _other(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "what": str(error), "where": "", "next": ""}


def render_error(error: BaseException, stream: IO[str]) -> None:
    """What, where and next of an error (of each one, where it carries several), in red on a terminal."""
    red, dim, green, off = ("\x1b[1;31m", "\x1b[2m", "\x1b[32m", "\x1b[0m") if colours(stream) else ("", "", "", "")
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
