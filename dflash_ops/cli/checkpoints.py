"""`dflash-ops checkpoints list | verify | aside | restore`: what a resume has to start from."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption, console
from dflash_ops.cli.watching import actor, job_client, print_json

if TYPE_CHECKING:
    from dflash_ops.client import JobClient

app = typer.Typer(
    help="A job's checkpoints: list, verify, set aside, bring back. Nothing is ever deleted.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_Steps = Annotated[
    list[int] | None, typer.Option("--step", metavar="STEP", min=0, help="Only this one; may be given several times.")
]
#: Seconds: hashing goes at the pace of the disk, 20 GB a checkpoint.
_HASH_S = 3600.0


def _interruptible(command: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(command)
    def run_it(*args: Any, **options: Any) -> int:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    return run_it


@app.command("list")
@_interruptible
def list_them(job: JobArgument = None, json: JsonOption = False, inventory: InventoryOption = None) -> int:
    """Every checkpoint with step, size and age, and what was set aside."""
    return _looked(job_client(inventory, job), "list", [], json, deadline=60.0)


@app.command("verify")
@_interruptible
def verify(
    job: JobArgument = None, step: _Steps = None, json: JsonOption = False, inventory: InventoryOption = None
) -> int:
    """Compare size and hash of every file with its manifest; exit code 1 if one is not whole."""
    return _looked(job_client(inventory, job), "verify", _steps(step), json, deadline=_HASH_S)


@app.command("aside")
@_interruptible
def aside(
    job: JobArgument = None,
    step: _Steps = None,
    newer_than: Annotated[
        int | None, typer.Option("--newer-than", metavar="STEP", min=0, help="All checkpoints of later steps.")
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: written into the manifest.")] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Set checkpoints aside, whole: all of them, or those named. The job must not run."""
    options = _steps(step) + (["--newer-than", str(newer_than)] if newer_than is not None else [])
    said = _moved(job_client(inventory, job), "aside", [*options, "--reason", reason])
    if json:
        print_json({**said, "kind": "checkpoints.aside"})
    elif said["moved"]:
        console().print(f"set aside: {said['files']} files, now in {said['to']}", markup=False)
    else:
        console().print("there is nothing to set aside", markup=False)
    return 0


@app.command("restore")
@_interruptible
def restore(
    job: JobArgument = None,
    stamp: Annotated[
        str, typer.Option("--stamp", metavar="STAMP", help="Which; `list` shows them. Else the newest.")
    ] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Bring back what was set aside. The job must not run, and no checkpoint of the same name may be there."""
    said = _moved(job_client(inventory, job), "restore", ["--stamp", stamp] if stamp else [])
    if json:
        print_json({**said, "kind": "checkpoints.restore"})
    else:
        console().print(f"brought back: {said['restored']} of {said['stamp']}, now in {said['to']}", markup=False)
    return 0


def _steps(step: list[int] | None) -> list[str]:
    return [word for one in step or () for word in ("--step", str(one))]


def _moved(client: JobClient, what: str, options: list[str]) -> dict[str, Any]:
    folder = ["--checkpoints", client.job.checkpoints]
    said = client.ask("checkpoints", what, *folder, *options, "--actor", actor(), deadline=600.0)
    return {**said, "job": client.job.name, "host": client.host.name}


def _looked(client: JobClient, what: str, options: list[str], json: bool, *, deadline: float) -> int:
    folder = ["--checkpoints", client.job.checkpoints]
    said = client.ask("checkpoints", what, *folder, *options, deadline=deadline)
    said = {**said, "kind": f"checkpoints.{what}", "job": client.job.name, "host": client.host.name}
    if json:
        print_json(said)
    else:
        _show(said)
    return 1 if any(one["verified"] is False for one in said["checkpoints"]) else 0


def _show(said: dict[str, Any]) -> None:
    from rich.table import Table

    from dflash_ops.view.text import clean, counted, duration, size

    out, now = console(), time.time()
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for head, right in (("step", True), ("size", True), ("came", True), ("name", False), ("", False)):
        table.add_column(head, justify="right" if right else "left", no_wrap=head != "", overflow="fold")
    for one in said["checkpoints"]:
        whole = {True: "whole", False: f"NOT WHOLE: {one['fault']}", None: one["fault"] or "not checked"}[
            one["verified"]
        ]
        came = f"{duration(max(0.0, now - one['t']))} ago"
        table.add_row(str(one["step"]), size(one["bytes"]), came, clean(PurePosixPath(one["path"]).name), clean(whole))
    if said["checkpoints"]:
        out.print(table)
        out.print(f"in {clean(said['folder'])}", markup=False)
    else:
        out.print(f"no checkpoint in {clean(said['folder'])}", markup=False)
    for one in said["aside"]:
        why = f": {one['reason']}" if one["reason"] else ""
        out.print(
            f"set aside {one['stamp']}, {counted(one['files'], 'file')}, {size(one['bytes'])}{clean(why)}", markup=False
        )
