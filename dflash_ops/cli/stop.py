"""`dflash-ops stop`: save and exit; KILL only after the grace time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli.common import InventoryOption, JsonOption
from dflash_ops.cli.several import AllOption, JobsArgument, chosen, perform

if TYPE_CHECKING:
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Job
    from dflash_ops.view.stages import Stages


def command(
    job: JobsArgument = None,
    every: AllOption = False,
    grace: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="Time to save before KILL; else the job's.")
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: written into the journal.")] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Stop a job: save, then exit; by force only after the grace time."""
    from dflash_ops.cli.adopted import client_of, refuse_adopted
    from dflash_ops.cli.watching import actor
    from dflash_ops.view.stopped import stopped_text

    loaded, jobs = chosen(inventory, job, every)

    def work(one: Job, host: Host, python: str, progress: Stages) -> Any:
        refuse_adopted(one, "stop")
        client = client_of(host, one, python)
        seconds = one.grace_s if grace is None else grace
        with progress.stage("stop", f"{one.name}: asked to save and stop") as stage:
            stage.until(seconds, "before KILL")
            answer = client.stop(grace=seconds, reason=reason, actor=actor())
            told = str(answer["detail"]) if one.adopted else stopped_text(answer)
            stage.done(f"{one.name}: {told}")
        return {"schema": 1, "kind": "stop", "job": one.name, "host": one.host, **answer}

    return perform(loaded, jobs, "stop", work, as_json=json)
