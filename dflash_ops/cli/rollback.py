"""`dflash-ops rollback`: back to a release that ran before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import InventoryOption, JsonOption, load_inventory
from dflash_ops.cli.several import Part, perform
from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.view.stages import Stages

_ID = re.compile(r"[0-9a-f]{4,12}")


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID] [JOB]",
            help="Release (or its first digits), else the one before; and the job.",
            autocompletion=complete.releases_and_jobs,
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would happen; touch nothing.")] = False,
    grace: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="Time to save before KILL; else the job's.")
    ] = None,
    watch_window: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="How long a crash counts as a failure.")
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: written into the journal.")] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Stop what runs, and start a release that ran before, with the config of its last attempt.

    It goes on from the newest checkpoint. What would not run is refused before the job is touched.
    """
    loaded = load_inventory(inventory)
    release, job = meant(loaded, words or [])

    import os

    from dflash_ops.cli.adopted import refuse_adopted
    from dflash_ops.cli.watching import actor
    from dflash_ops.deploy.back import Rollback
    from dflash_ops.deploy.decide import Options
    from dflash_ops.deploy.nodes_back import NodesRollback

    options = Options(plan=plan, reason=reason, actor=actor(), grace_s=grace, watch_s=watch_window)

    def work(one: Job, host: Host, python: str, progress: Stages) -> Any:
        refuse_adopted(one, "rollback", always=True)
        return Rollback(host, one, release, options, progress, python=python, environ=os.environ).run().to_json()

    def together(one: Job, parts: Sequence[Part], progress: Stages) -> Any:
        backs = [
            Rollback(p.host, p.job, release, options, p.stages, python=p.python, environ=os.environ) for p in parts
        ]
        return NodesRollback(one, backs, options, progress).run()

    return perform(loaded, [job], "rollback", work, as_json=json, together=together)


def meant(loaded: Inventory, words: list[str]) -> tuple[str | None, Job]:
    """Release and job of `[ID] [JOB]`; a single word that is the name of a job is one.

    Raises:
        UsageError: neither, or too many.
    """
    if len(words) > 2:
        raise UsageError(f"{len(words)} words where a release and a job may stand", "rollback [ID] [JOB]", "give two")
    if len(words) == 1 and words[0] in loaded.jobs:
        return None, loaded.job(words[0])
    if words and not _ID.fullmatch(words[0]):
        if len(words) == 1:
            loaded.job(words[0])  # says that there is no such job
        raise UsageError(f"{words[0]!r} is no release", "rollback [ID] [JOB]", "dflash-ops releases lists them")
    return (words[0] if words else None), loaded.job(words[1] if len(words) == 2 else None)
