"""`dflash-ops deploy`: send the code, check the machine, start the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli.common import InventoryOption, JsonOption
from dflash_ops.cli.several import AllOption, JobsArgument, Part, chosen, perform
from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.view.stages import Stages


def command(
    job: JobsArgument = None,
    every: AllOption = False,
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
    gate: Annotated[
        bool | None,
        typer.Option("--gate/--no-gate", help="Try some steps at tiny size first; else where a job is replaced."),
    ] = None,
    watch_window: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="How long a crash counts as a failed deploy.")
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback/--no-rollback", help="After a crash in the watch window: start what ran before.")
    ] = True,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: written into the journal.")] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Send the code, check the machine, start the job.

    A running job is not touched without --replace, and only after every check has passed.
    """
    if resume and fresh:
        raise UsageError("--resume and --fresh exclude each other", "dflash-ops deploy", "give one of them")
    loaded, jobs = chosen(inventory, job, every)
    jobs = [one.with_overrides(target_gpus, drafter_gpus, sets or ()) for one in jobs]

    import os
    import shlex

    from dflash_ops.cli.adopted import refuse_adopted
    from dflash_ops.cli.watching import actor
    from dflash_ops.deploy.decide import Options
    from dflash_ops.deploy.nodes import NodesDeployment, once
    from dflash_ops.deploy.run import Deployment
    from dflash_ops.deploy.spec import build_release

    options = Options(
        plan=plan,
        replace=replace,
        begin="resume" if resume else "fresh" if fresh else "",
        reason=reason,
        actor=actor(),
        grace_s=grace,
        gate=gate,
        watch_s=watch_window,
        rollback=rollback,
        playbooks=_own_playbooks(loaded),
    )

    def run(deployment: Deployment | NodesDeployment, progress: Stages) -> Any:
        try:
            result = deployment.run()
        except KeyboardInterrupt:
            progress.note(deployment.interrupted())
            raise
        if not plan:
            progress.note(f"watch it: dflash-ops status {shlex.quote(deployment.job.name)} --watch")
        return result

    def work(one: Job, host: Host, python: str, progress: Stages) -> Any:
        refuse_adopted(one, "deploy")
        return run(Deployment(host, one, options, progress, python=python, environ=os.environ), progress).to_json()

    def together(one: Job, parts: Sequence[Part], progress: Stages) -> Any:
        build = once(lambda: build_release(one))
        nodes = [
            Deployment(p.host, p.job, options, p.stages, python=p.python, environ=os.environ, build=build)
            for p in parts
        ]
        return run(NodesDeployment(one, nodes, options, progress), progress)

    return perform(loaded, jobs, "deploy", work, as_json=json, together=together)


def _own_playbooks(loaded: Inventory) -> str:
    """The inventory's own kinds as the resident reads them; empty where it has none."""
    if not loaded.playbooks:
        return ""
    from dflash_ops.collect.job import folders
    from dflash_ops.deploy.zipapp import playbooks_bytes
    from dflash_ops.playbooks import load_documents

    return playbooks_bytes(load_documents(folders(loaded), bundle=False)).decode()
