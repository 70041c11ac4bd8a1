"""`dflash-ops checkpoints list | verify | aside | restore`: what a resume has to start from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption, console, load_job
from dflash_ops.cli.several import NodeOption
from dflash_ops.cli.watching import actor, asking, print_json, waiting
from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.client import JobClient
    from dflash_ops.inventory import Job

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


@app.command("list")
def list_them(
    job: JobArgument = None, node: NodeOption = None, json: JsonOption = False, inventory: InventoryOption = None
) -> int:
    """Every checkpoint with step, size and age, and what was set aside."""
    return _looked(inventory, job, node, "list", [], json, deadline=60.0)


@app.command("verify")
def verify(
    job: JobArgument = None,
    step: _Steps = None,
    node: NodeOption = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Compare size and hash of every file with its manifest; exit code 1 if one is not whole."""
    return _looked(inventory, job, node, "verify", _steps(step), json, deadline=_HASH_S)


@app.command("aside")
def aside(
    job: JobArgument = None,
    step: _Steps = None,
    newer_than: Annotated[
        int | None, typer.Option("--newer-than", metavar="STEP", min=0, help="All checkpoints of later steps.")
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: written into the manifest.")] = "",
    node: NodeOption = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Set checkpoints aside, whole: all of them, or those named. The job must not run (on any of its nodes)."""
    options = _steps(step) + (["--newer-than", str(newer_than)] if newer_than is not None else [])

    def show(said: dict[str, Any]) -> None:
        what = (
            f"set aside: {said['files']} files, now in {said['to']}"
            if said["moved"]
            else "there is nothing to set aside"
        )
        console().print(what, markup=False)

    return _moved(inventory, job, node, "aside", [*options, "--reason", reason], json, show)


@app.command("restore")
def restore(
    job: JobArgument = None,
    stamp: Annotated[
        str, typer.Option("--stamp", metavar="STAMP", help="Which; `list` shows them. Else the newest.")
    ] = "",
    node: NodeOption = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Bring back what was set aside. The job must not run, and no checkpoint of the same name may be there."""

    def show(said: dict[str, Any]) -> None:
        console().print(f"brought back: {said['restored']} of {said['stamp']}, now in {said['to']}", markup=False)

    _, whole = load_job(inventory, job)
    if stamp and node is None and whole.nodes:
        raise UsageError(
            "each node has set aside under a stamp of its own", f"--stamp {stamp}", "add --node K, or leave --stamp out"
        )
    return _moved(inventory, job, node, "restore", ["--stamp", stamp] if stamp else [], json, show)


def _steps(step: list[int] | None) -> list[str]:
    return [word for one in step or () for word in ("--step", str(one))]


def _asked(
    inventory: Path | None, job: str | None, node: int | None, what: str, options: list[str], deadline: float
) -> dict[str, Any]:
    """The answer of the job, or of the nodes that are meant, one after the other: they may share one folder.

    Raises:
        NodesFailed: of some nodes. JobBusy: checkpoints are to be moved, and one of the nodes runs.
    """
    from dflash_ops.cli.adopted import client_at
    from dflash_ops.hosts.factory import Hosts
    from dflash_ops.nodes import on_nodes

    loaded, whole = load_job(inventory, job)
    meant = whole.at_node(node)
    with Hosts(loaded) as hosts, waiting().stage(f"checkpoints {what}", asking([meant])):

        def ask(part: Job) -> dict[str, Any]:
            client = client_at(loaded, hosts, part)
            folder = ["--checkpoints", part.checkpoints]
            said = client.ask("checkpoints", what, *folder, *options, deadline=deadline)
            return {**said, "kind": f"checkpoints.{what}", "job": part.name, "host": part.host}

        if what in ("aside", "restore"):
            options = [*options, "--actor", actor()]
        if not meant.nodes:
            return ask(meant)
        if what in ("aside", "restore"):
            _none_runs(meant, [client_at(loaded, hosts, p) for p in meant.nodes])
        return on_nodes(meant, f"checkpoints.{what}", meant.nodes, ask, most=1)


def _none_runs(job: Job, clients: list[JobClient]) -> None:
    """
    Raises:
        JobBusy: a node of the job runs. HostError: one cannot be asked; nothing was moved.
    """
    from dflash_ops.contracts import LIVE_STATES
    from dflash_ops.errors import HostUnreachable, JobBusy

    for client in clients:
        seen = client.snapshot()
        where = f"{client.job.host}: {client.job.root}"
        if not seen.reachable:
            raise HostUnreachable(f"{client.job.label}: {seen.snapshot.detail}", where, "nothing was moved on any node")
        if seen.snapshot.state in LIVE_STATES:
            raise JobBusy(f"{client.job.label} of job {job.name} runs", where, f"dflash-ops stop {job.name}")


def _moved(
    inventory: Path | None, job: str | None, node: int | None, what: str, options: list[str], json: bool,
    show: Callable[[dict[str, Any]], None],
) -> int:  # fmt: skip
    return _told(_asked(inventory, job, node, what, options, 600.0), json, show)


def _told(said: dict[str, Any], json: bool, show: Callable[[dict[str, Any]], None]) -> int:
    if json:
        print_json(said)
        return 0
    for one in said.get("nodes", ()):
        console().print(f"node {one['node']} ({one['host']})", markup=False)
        show(one["result"])
    if "nodes" not in said:
        show(said)
    return 0


def _looked(
    inventory: Path | None, job: str | None, node: int | None, what: str, options: list[str], json: bool, *,
    deadline: float,
) -> int:  # fmt: skip
    said = _asked(inventory, job, node, what, options, deadline)
    _told(said, json, _show)
    answers = [one["result"] for one in said["nodes"]] if "nodes" in said else [said]
    return 1 if any(one["verified"] is False for answer in answers for one in answer["checkpoints"]) else 0


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
        out.print(table, markup=False)
        out.print(f"in {clean(said['folder'])}", markup=False)
    else:
        out.print(f"no checkpoint in {clean(said['folder'])}", markup=False)
    for one in said["aside"]:
        why = f": {one['reason']}" if one["reason"] else ""
        out.print(
            f"set aside {one['stamp']}, {counted(one['files'], 'file')}, {size(one['bytes'])}{clean(why)}", markup=False
        )
