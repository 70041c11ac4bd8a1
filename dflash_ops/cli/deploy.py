"""`dflash-ops deploy`: send the code, check the machine, start the job."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption, load_job
from dflash_ops.errors import UsageError


def command(
    job: JobArgument = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would happen; touch nothing.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Stop the job if it runs: save, exit; KILL after the grace time.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set checkpoints aside (nothing is deleted) and start at step 0.")
    ] = False,
    target_gpus: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="This run's targets: 0,1,2 or 0-4 or cpu,cpu.")
    ] = None,
    drafter_gpus: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="This run's drafters: 5,6,7 or cpu.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="This run's value of one key, e.g. train.lr=1e-3; repeatable."),
    ] = None,
    grace: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="With --replace: time to save; else the job's.")
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: written into the journal.")] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Send the code, check the machine, start the job.

    A running job is not touched without --replace, and only after every check has passed.
    """
    if resume and fresh:
        raise UsageError("--resume and --fresh exclude each other", "dflash-ops deploy", "give one of them")
    loaded, found = load_job(inventory, job)
    found = found.with_overrides(target_gpus, drafter_gpus, sets or ())

    import os
    import shlex

    from dflash_ops.cli.watching import actor, print_json, stages
    from dflash_ops.deploy.decide import Options
    from dflash_ops.deploy.run import Deployment
    from dflash_ops.hosts.factory import open_host

    options = Options(
        plan=plan,
        replace=replace,
        begin="resume" if resume else "fresh" if fresh else "",
        reason=reason,
        actor=actor(),
        grace_s=grace,
    )
    host = open_host(loaded, found.host)
    python = loaded.host_of(found).python
    progress = stages()
    deployment = Deployment(host, found, options, progress, python=python, environ=os.environ)
    try:
        result = deployment.run()
    except KeyboardInterrupt:
        progress.note(deployment.interrupted())
        return 130
    finally:
        host.close()
    if not plan:
        progress.note(f"watch it: dflash-ops status {shlex.quote(found.name)} --watch")
    if json:
        print_json(result.to_json())
    return 0
