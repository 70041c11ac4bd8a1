"""`dflash-ops rebalance`: another split of a job's devices into targets and drafters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption, console, load_job
from dflash_ops.cli.several import perform
from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.balance import Split
    from dflash_ops.fleet.rebalance import Result
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Job
    from dflash_ops.view.stages import Stages

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def command(
    job: JobArgument = None,
    targets: Annotated[int | None, typer.Option(metavar="N", help="Devices that run the target.")] = None,
    drafters: Annotated[int | None, typer.Option(metavar="N", help="Devices that train drafters.")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what each split would do, from what was measured; touch nothing.")
    ] = False,
    auto: Annotated[
        bool, typer.Option("--auto", help="Go to the best split, if that pays for its restart within the horizon.")
    ] = False,
    horizon: Annotated[
        str, typer.Option(metavar="TIME", help="With --auto: time in which it has to pay: 90m, 24h, 7d.")
    ] = "24h",
    devices: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="Devices that may be divided: 0-7 or cpu,cpu; else the job's.")
    ] = None,
    settle: Annotated[
        int | None, typer.Option(metavar="STEPS", min=0, help="Steps until caches are warm; else one averaging round.")
    ] = None,
    measure: Annotated[
        int | None, typer.Option(metavar="STEPS", min=1, help="Steps that are measured then; else two rounds.")
    ] = None,
    limit: Annotated[
        str, typer.Option(metavar="TIME", help="Longest time for settling and measuring: 2h, 30m.")
    ] = "2h",
    gate: Annotated[bool, typer.Option("--gate/--no-gate", help="Try some steps at tiny size first.")] = True,
    back: Annotated[
        bool, typer.Option("--back/--no-back", help="Go back where it fails or is slower than before.")
    ] = True,
    grace: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.0, help="Time to save before KILL; else the job's.")
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: written into the journal.")] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Divide a running job's devices anew into targets and drafters.

    The job saves and stops, and the same release goes on from its checkpoint with the new split. It is measured, and
    where it is slower than before by more than the interval, what ran before runs again. --plan only shows the table.
    """
    from dflash_ops.inventory.devices import parse_devices

    wanted = asked_split(targets, drafters, plan=plan, auto=auto)
    horizon_s, limit_s = seconds_of(horizon, "--horizon"), seconds_of(limit, "--limit")
    chosen = parse_devices(devices, "--devices") if devices is not None else None
    if chosen == ():
        raise UsageError("no device is named", "--devices", "write GPU numbers (0-7), or cpu once for each process")
    loaded, one = load_job(inventory, job)

    import os

    from dflash_ops.cli.watching import actor
    from dflash_ops.fleet.rebalance import Asked, Rebalance
    from dflash_ops.fleet.rebalance_choice import refuse_job

    refuse_job(one)
    asked = Asked(
        split=wanted,
        plan=plan,
        auto=auto,
        devices=chosen,
        horizon_s=horizon_s,
        settle=settle,
        measure=measure,
        limit_s=limit_s,
        grace_s=grace,
        gate=gate,
        back=back,
        reason=reason,
        actor=actor(),
    )

    def work(job: Job, host: Host, python: str, progress: Stages) -> Any:
        rebalance = Rebalance(host, job, asked, progress, python=python, environ=os.environ)
        try:
            result = rebalance.run()
        except KeyboardInterrupt:
            progress.note(rebalance.interrupted())
            raise
        if plan and not json:
            show(result)
        return result.to_json()

    return perform(loaded, [one], "rebalance", work, as_json=json)


def asked_split(targets: int | None, drafters: int | None, *, plan: bool, auto: bool) -> Split | None:
    """The split that is named, None where none is.

    Raises:
        UsageError: options that exclude each other, half of a split, or nothing that says what to do.
    """
    from dflash_ops.balance import Split

    named = [f"--{name}" for name, value in (("targets", targets), ("drafters", drafters)) if value is not None]
    if plan and auto:
        raise UsageError(
            "--plan and --auto exclude each other",
            "dflash-ops rebalance",
            "--plan shows which split --auto would choose",
        )
    if auto and named:
        raise UsageError(
            f"--auto and {named[0]} exclude each other", "dflash-ops rebalance", "--auto chooses the split itself"
        )
    if len(named) == 1:
        other = "--drafters" if targets is not None else "--targets"
        raise UsageError(f"{named[0]} is half of a split", "dflash-ops rebalance", f"give {other} as well")
    if not named and not plan and not auto:
        raise UsageError(
            "nothing says what to change", "dflash-ops rebalance", "give --targets N --drafters M, or --plan, or --auto"
        )
    return Split(targets, drafters) if targets is not None and drafters is not None else None


def seconds_of(text: str, option: str) -> float:
    """`90`, `90s`, `30m`, `24h`, `7d` in seconds.

    Raises:
        UsageError: it is none of them, or no time at all.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    value = float(found[1]) * _SECONDS[found[2]] if found is not None else 0.0
    if value <= 0:
        raise UsageError(f"{text!r} is no time", option, "write 90s, 30m, 24h or 7d")
    return value


def show(result: Result) -> None:
    from dflash_ops.view.rebalance import Shown, render

    table = result.table
    assert table is not None and result.current is not None
    console().print(
        render(
            Shown(
                job=result.job,
                host=result.host,
                current=result.current,
                rows=result.rows,
                best=table.best,
                asked=result.asked,
                measured=result.before.block_tok_s if result.before is not None else None,
                why=result.why,
                notes=table.notes,
            )
        )
    )
