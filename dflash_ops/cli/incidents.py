"""`dflash-ops incidents [list | show N | reset] [JOB]`: what failed, what was done about it, what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption, console
from dflash_ops.cli.several import (
    AllOption,
    JobsArgument,
    NodeOption,
    Outcome,
    at_node,
    chosen,
    each,
    perform,
    show_errors,
    worst,
)
from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.contracts import Incident
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.view.stages import Stages

app = typer.Typer(
    help="What failed, what was done about it, what showed that it helped, and what it cost.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
#: Seconds: the journal of months is some megabytes.
_READ_S = 60.0
#: Seconds: a pass that acts is waited for, and a supervisor that had left comes up.
_RESET_S = 60.0


@app.callback(invoke_without_command=True)
def _default(context: typer.Context) -> int:
    """What failed, what was done about it, what showed that it helped, and what it cost."""
    if context.invoked_subcommand is not None:
        return 0
    raise typer.Exit(list_them())


@app.command("list")
def list_them(
    job: JobsArgument = None,
    every: AllOption = False,
    node: NodeOption = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Every incident of a job, oldest first: when, what, what was done, how it ended, what it cost."""
    outcomes = _asked(*_parts(inventory, job, every, node))
    if json:
        _print(outcomes)
    else:
        for outcome in outcomes:
            if outcome.error is None:
                _table(outcome, titled=len(outcomes) > 1)
    show_errors(outcomes)
    return worst(outcomes)


@app.command("show")
def show(
    number: int = typer.Argument(..., metavar="N", min=1, help="Its number in the list."),
    job: JobArgument = None,
    node: NodeOption = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """One incident whole: time line, evidence, diagnosis, what was done and exactly how, proof, cost."""
    loaded, parts = _parts(inventory, [job] if job is not None else None, False, node)
    if len(parts) > 1:
        raise UsageError(
            "each node has incidents of its own",
            f"incidents show {number}",
            f"name one: --node 0 ... --node {len(parts) - 1}",
        )
    outcomes = _asked(loaded, parts)
    (outcome,) = outcomes
    found = [one for one in outcome.result if one.number == number]
    if not found:
        there = f"there are 1 to {len(outcome.result)}" if outcome.result else "there is none"
        raise UsageError(
            f"no incident {number}: {there}", f"job {outcome.job.name}", "dflash-ops incidents list shows them"
        )
    if json:
        outcome.result = found
        _print(outcomes)
        return 0
    from dflash_ops.view.incidents import whole

    out = console()
    for line in whole(found[0], outcome.job.label):
        out.print(line, soft_wrap=True)
    return 0


def _parts(
    inventory: Path | None, names: list[str] | None, every: bool, node: int | None
) -> tuple[Inventory, list[Job]]:
    """The jobs (or nodes) that are meant."""
    loaded, jobs = chosen(inventory, names, every)
    return loaded, [part for one in at_node(jobs, node) for part in one.parts]


@app.command("reset")
def reset(
    job: JobsArgument = None,
    every: AllOption = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why: written into the journal.")] = "",
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Clear what the supervisor counted: you have looked, and it may try again what it had given up.

    Tries, budget and pauses begin anew, and it judges the job at once. Its changes stay; a person's stop stays too.
    """
    from dflash_ops.cli.adopted import refuse_adopted
    from dflash_ops.cli.supervise import reset_outside
    from dflash_ops.cli.watching import actor
    from dflash_ops.client import JobClient

    if not reason.strip():
        raise UsageError("why the counts are cleared is not said", "incidents reset", "--reason TEXT")
    loaded, jobs = chosen(inventory, job, every)

    def work(one: Job, host: Host, python: str, progress: Stages) -> dict[str, object]:
        refuse_adopted(one, "incidents", always=True)
        here = reset_outside(loaded, one, reason, actor())
        with progress.stage("reset", f"{one.label}: clearing what was counted") as stage:
            if here:
                progress.note(f"{one.label}: what `supervise` counted on this machine is cleared")
            options = ["--reason", reason, "--actor", actor()]
            answer = JobClient(host, one, python).ask("reset", *options, deadline=_RESET_S)
            stage.done(f"{one.label}: {_cleared(answer)}")
        return {**answer, "kind": "incidents.reset", "job": one.name, "host": one.host, "outside": here}

    return perform(loaded, jobs, "incidents.reset", work, as_json=json)


def _cleared(answer: dict[str, Any]) -> str:
    from dflash_ops.view.text import counted

    counts = answer["cleared"]
    tries = "1 try" if counts["actions"] == 1 else f"{counts['actions']} tries"
    said = f"cleared: {counted(counts['failures'], 'failure')}, {tries}"
    if answer["stopped"]:
        return f"{said}; a person stopped the job, so only a start goes on: dflash-ops deploy"
    return f"{said}; it is judged anew" if answer["watched"] else f"{said}; no supervisor came up: run/resident.log"


def _asked(loaded: Inventory, parts: list[Job]) -> list[Outcome]:
    """Each one's incidents, from its journal; of a single one its error is raised."""

    def look(one: Job, host: Host, python: str) -> tuple[Incident, ...]:
        from dflash_ops.cli.adopted import refuse_adopted
        from dflash_ops.client import JobClient
        from dflash_ops.contracts import Event, from_dict
        from dflash_ops.tell.incidents import incidents

        refuse_adopted(one, "incidents", always=True)
        said = JobClient(host, one, python).ask("journal", "--json", deadline=_READ_S)
        return incidents([from_dict(Event, e, "journal") for e in said["events"]])

    outcomes = each(loaded, parts, look)
    if len(outcomes) == 1 and outcomes[0].error is not None:
        raise outcomes[0].error
    return outcomes


def _table(outcome: Outcome, *, titled: bool) -> None:
    from dflash_ops.view.incidents import table
    from dflash_ops.view.text import clean

    out = console()
    if not out.is_terminal:
        out.width = 250  # a row of a pipe stays one line
    name = clean(f"{outcome.job.label} on {outcome.job.host}")
    if titled and outcome.result:
        out.print(name, markup=False)
    out.print(table(outcome.result) if outcome.result else f"{name}: no incident", markup=False)


def _print(outcomes: list[Outcome]) -> None:
    from dflash_ops.cli.watching import print_json
    from dflash_ops.contracts import to_dict

    jobs = [
        {
            "job": o.job.name,
            "node": o.job.node.rank if o.job.node is not None else None,
            "host": o.job.host,
            "error": o.to_json()["error"],
            "incidents": to_dict(list(o.result or ())),
        }
        for o in outcomes
    ]
    print_json({"schema": 1, "kind": "incidents", "jobs": jobs})
