"""`dflash-ops enable`: the resident comes back when its machine boots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import InventoryOption, JsonOption
from dflash_ops.cli.several import AllOption, JobsArgument, chosen, perform

if TYPE_CHECKING:
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Job
    from dflash_ops.view.stages import Stages


def command(
    job: JobsArgument = None,
    every: AllOption = False,
    way: Annotated[
        str,
        typer.Option(
            "--way",
            metavar="auto|systemd|cron",
            help="Who starts it; auto: systemd where it runs.",
            autocompletion=complete.one_of("auto", "systemd", "cron"),
        ),
    ] = "auto",
    off: Annotated[bool, typer.Option("--off", help="Take it back.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Watch a job again after its machine has booted.

    The machine gets one entry (a systemd unit, or an @reboot line of its crontab) that starts the resident. Whether the
    trainer starts again is decided by the job's policy, as after any crash.
    """
    from dflash_ops.cli.adopted import refuse_adopted
    from dflash_ops.cli.watching import actor
    from dflash_ops.client import JobClient
    from dflash_ops.errors import UsageError

    if way not in ("auto", "systemd", "cron"):
        raise UsageError(f"there is no way {way!r}", "--way", "one of auto, systemd, cron")
    loaded, jobs = chosen(inventory, job, every)

    def work(one: Job, host: Host, python: str, progress: Stages) -> Any:
        refuse_adopted(one, "enable")
        options = ["--off"] if off else ["--way", way]
        with progress.stage(
            "enable", f"{one.name}: {'taking the entry away' if off else 'writing the entry'}"
        ) as stage:
            answer = JobClient(host, one, python).ask("enable", *options, "--actor", actor(), deadline=120.0)
            stage.done(f"{one.name}: {_told(answer)}")
        return {"schema": 1, "kind": "enable", "job": one.name, "host": one.host, **answer}

    return perform(loaded, jobs, "enable", work, as_json=json)


def _told(answer: dict[str, Any]) -> str:
    if not answer["enabled"]:
        return f"taken away: {answer['where']}" if answer["where"] else "there was no entry"
    return "; ".join([f"starts at boot by {answer['way']} ({answer['where']})", *answer["warnings"]])
