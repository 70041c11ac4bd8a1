"""`dflash-ops doctor`: what this machine and a job's host still need, and what to do for each thing missing."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JsonOption, console, load_inventory
from dflash_ops.cli.several import AllOption, JobsArgument, Outcome, chosen, each_part, show_errors, worst
from dflash_ops.errors import InventoryError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_ops.doctor.report import Report
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Inventory, Job

#: Sign and style of each status; the words stand beside the signs, so that nothing is said by colour alone.
SIGNS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("fail", "bold red"), "skip": ("skip", "dim")}


def command(
    job: JobsArgument = None,
    every: AllOption = False,
    accept_new: Annotated[
        bool,
        typer.Option(
            "--accept-new",
            help="Take and remember host keys that known_hosts does not know yet (compare the fingerprint first). "
            "A changed key is refused all the same.",
        ),
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check this machine and a job's host, and say what to do for each thing missing. Exits 3 if anything fails."""
    if every or len(job or ()) > 1:
        return _several(inventory, job, every, accept_new=accept_new, as_json=as_json)
    report = _report(inventory, job[0] if job else None, accept_new=accept_new)
    if as_json:
        print(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        _render(report)
    return 0 if report.ok else 3


def _several(inventory: Path | None, names: list[str] | None, every: bool, *, accept_new: bool, as_json: bool) -> int:
    """Every job's report, hosts side by side; this machine is shown once."""
    from dflash_ops.cli.watching import print_json

    loaded, jobs = chosen(inventory, names, every)
    outcomes = _examined(loaded, jobs, accept_new=accept_new)
    seen: set[str] = set()
    for outcome in outcomes:
        if outcome.error is None:
            report: Report = outcome.result
            outcome.code, outcome.result = (0 if report.ok else 3), report.to_dict()
            if not as_json:
                fresh = tuple(s for s in report.sections if s.place not in seen)
                seen.update(s.place for s in report.sections)
                _render(replace(report, sections=fresh))
    if as_json:
        code = worst(outcomes)
        print_json({"schema": 1, "kind": "doctor.all", "exit": code, "jobs": [o.to_json() for o in outcomes]})
    show_errors(outcomes)
    return worst(outcomes)


def _examined(loaded: Inventory, jobs: Sequence[Job], *, accept_new: bool) -> list[Outcome]:
    """A report for each job; of one with nodes all their places in one report."""
    from dflash_ops.cli.watching import asking
    from dflash_ops.doctor.examine import examine, merged

    def look(job: Job, host: Host, python: str) -> Report:
        return examine(loaded, job, host, os.environ)

    outcomes = []
    what = f"{asking(jobs)} (importing torch there takes a while)"
    for job, mine in zip(jobs, each_part(loaded, jobs, look, accept_new=accept_new, what=what), strict=True):
        failed = next((o for o in mine if o.error is not None), None)
        whole = replace(failed or mine[0], job=job)
        if job.nodes and failed is None:
            whole.result = merged([o.result for o in mine], job)
        outcomes.append(whole)
    return outcomes


def _report(inventory: Path | None, name: str | None, *, accept_new: bool) -> Report:
    from dflash_ops.doctor.examine import without_job

    try:
        loaded = load_inventory(inventory)
        job = loaded.job(name)
    except InventoryError as error:
        return without_job(error)  # this machine can be looked at all the same
    except UsageError as error:
        if name is not None:
            raise  # a job was named, and it is not there
        return without_job(error)
    (outcome,) = _examined(loaded, [job], accept_new=accept_new)
    if outcome.error is not None:
        raise outcome.error
    report: Report = outcome.result
    return report


def _render(report: Report) -> None:
    from rich.text import Text

    out = console()  # soft_wrap below: a command that rich breaks into lines cannot be copied
    for section in report.sections:
        out.print(Text(section.place, style="bold"))
        width = max(len(c.name) for c in section.checks)
        for check in section.checks:
            sign, style = SIGNS[check.status]
            out.print(
                Text.assemble("  ", (sign, style), f"  {check.name:<{width}}  ", check.what.replace("\n", " ")),
                soft_wrap=True,
            )
            if check.next:
                out.print(Text.assemble(" " * (width + 10), ("next: ", "green"), check.next), soft_wrap=True)
    failed, warned = report.count("fail"), report.count("warn")
    if failed:
        out.print(Text(f"{failed} to mend" + (f", {warned} to look at" if warned else ""), style="bold red"))
    else:
        out.print(Text("all is ready" + (f"; {warned} to look at" if warned else ""), style="bold green"))
