"""`dflash-ops init`: a commented inventory.toml to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def command(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to write it.")] = Path("inventory.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace one that is there; it is kept as .old.")] = False,
    host: Annotated[str, typer.Option("--host", help="Name of the local host.")] = "local",
    root: Annotated[str, typer.Option("--root", help="Folder of the demo job.")] = ".dflash/demo",
    interpreter: Annotated[
        str | None,
        typer.Option("--interpreter", help="Python of the demo job; else .venv beside the file, else this one."),
    ] = None,
) -> None:
    """Write a commented inventory.toml to start from: a demo job that works on this machine, and a Proxmox example."""
    from dflash_ops.inventory.create import create

    made = create(file, host=host, root=root, interpreter=interpreter, force=force)
    if made.kept is not None:
        print(f"kept the old one as {made.kept}")
    print(f"wrote {made.path}")
    print("next:")
    here = made.path == Path.cwd() / "inventory.toml"
    option = "" if here else f" -i {shlex.quote(str(made.path))}"
    print(f"  dflash-ops doctor{option}     see what this machine still needs")
    print(f"  dflash-ops demo{option}       the whole way with a tiny target")
    print("  your own job: uncomment an example in the file; every key is in docs/inventory.md")
