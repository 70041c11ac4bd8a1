"""`dflash-ops report`: a run as one html file that needs nothing else, or as JSON."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption
from dflash_ops.cli.several import NodeOption

if TYPE_CHECKING:
    from dflash_ops.client import JobClient


def command(
    job: JobArgument = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt", metavar="N", min=1, help="One attempt; else the newest.", autocompletion=complete.attempts
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all-attempts", help="All attempts, the newest 50.")] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file; else JOB-report.html here. - prints it."),
    ] = None,
    points: Annotated[
        int, typer.Option("--points", metavar="N", min=10, max=5000, help="Points of a curve at most.")
    ] = 400,
    node: NodeOption = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """One html file of a run: curves, shares, incidents and what they cost, config, GPUs (docs/report.md)."""
    from dflash_ops.cli.adopted import refuse_adopted
    from dflash_ops.cli.watching import job_client, print_json
    from dflash_ops.errors import UsageError
    from dflash_ops.tell import file
    from dflash_ops.tell.page import page

    if every and attempt is not None:
        raise UsageError("--attempt and --all-attempts exclude each other", "--attempt", "give one of them")
    if json and output is not None:
        raise UsageError("--json goes to standard output", "--output", "leave one of them out")
    client = job_client(inventory, job, node)
    refuse_adopted(client.job, "report", always=True)
    path = None if json or output == "-" else Path(f"{client.job.name}-report.html" if output is None else output)
    if path is not None:
        file.refuse(path, "--output", "-o - prints the report")
    try:
        report = _read(client, attempt, every=every, points=points)
    finally:
        client.host.close()
    if json:
        print_json(report)
        return 0
    text = page(report)
    if path is None:
        sys.stdout.write(text)
        return 0
    content = text.encode()
    file.put(path, content, "the report", "give another file by -o")
    print(f"{path} ({len(content) // 1024} KiB)", file=sys.stderr)
    return 0


def _read(client: JobClient, attempt: int | None, *, every: bool, points: int) -> dict[str, Any]:
    """Two commands there: the course of the attempts, and the job now."""
    from dflash_ops.cli.watching import stages
    from dflash_ops.errors import DflashError
    from dflash_ops.tell.report import build
    from dflash_ops.view.text import counted

    job = client.job
    with stages().stage("report", f"read the course of {job.label}") as stage:
        history = client.history(attempt, every=every, points=points)
        try:
            seen = client.snapshot()
        except DflashError:
            seen = None  # the course is there; of the present moment nothing is told
        lines = sum(one["course"]["lines"] for one in history.attempts)
        stage.done(f"{counted(len(history.attempts), 'attempt')}, {counted(lines, 'progress line')}")
    return build(
        history,
        seen if seen is not None and seen.reachable else None,
        host=job.host,
        root=job.root,
        job=job.name if job.node is None or job.node.count == 1 else f"{job.name}, {job.label}",
        made=time.time(),
    )
