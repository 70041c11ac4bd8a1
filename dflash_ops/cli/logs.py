"""`dflash-ops logs`: the job's output, raw."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument


def command(
    job: JobArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay and print what comes.")] = False,
    worker: Annotated[
        str | None, typer.Option("--worker", "-w", metavar="NAME", help="One worker's own log, e.g. drafter0.")
    ] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", metavar="N", min=1, help="Else the newest.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="Lines from the end.")] = 100,
    inventory: InventoryOption = None,
) -> int:
    """The job's output, from one worker or all."""
    from dflash_ops.cli.watching import job_client

    client = job_client(inventory, job)
    out = sys.stdout.buffer
    try:
        for raw in client.logs(follow=follow, worker=worker, attempt=attempt, lines=lines):
            # As bytes: a trainer's output need not be UTF-8, and its colours are its own.
            out.write(raw + b"\n")
            out.flush()
    except BrokenPipeError:  # `| head` has seen enough
        sys.stdout = None
    finally:
        client.host.close()
    return 0
