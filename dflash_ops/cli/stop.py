"""`dflash-ops stop`: save and exit; KILL only after the grace time."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption


def command(
    job: JobArgument = None,
    grace: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="Time to save before KILL; else the job's.")
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: written into the journal.")] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Stop a job: save, then exit; by force only after the grace time."""
    from dflash_ops.cli.watching import actor, job_client, print_json, stages
    from dflash_ops.view.stopped import stopped_text

    client = job_client(inventory, job)
    seconds = client.job.grace_s if grace is None else grace
    try:
        with stages().stage("stop", f"{client.job.name}: asked to save and stop, up to {seconds:g} s") as stage:
            answer = client.stop(grace=seconds, reason=reason, actor=actor())
            stage.done(f"{client.job.name}: {stopped_text(answer, client.snapshot().snapshot)}")
    finally:
        client.host.close()
    if json:
        print_json({"schema": 1, "kind": "stop", "job": client.job.name, "host": client.job.host, **answer})
    return 0
