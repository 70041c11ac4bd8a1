"""`dflash-ops status`: one job's screen, all jobs as a table, JSON, or live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JsonOption, console, load_inventory
from dflash_ops.cli.several import AllOption, JobsArgument, Outcome, chosen, each, show_errors, worst

if TYPE_CHECKING:
    from dflash_ops.client import Seen
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Inventory, Job

#: Exit code of a status of which one job could not be asked (docs/contracts.md).
UNREACHABLE = 5


def command(
    job: JobsArgument = None,
    every: AllOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and show changes until the job ends.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """State, progress and rates of a job; without a name and with several jobs, of all of them."""
    from dflash_ops.cli.adopted import client_of

    if not job and not every:
        loaded = load_inventory(inventory)
        every = loaded.default_job is None and len(loaded.jobs) > 1
    loaded, jobs = chosen(inventory, job, every)
    if watch:
        return _watch(loaded, jobs, as_json=json)

    def look(one: Job, host: Host, python: str) -> Seen:
        return client_of(host, one, python).snapshot()

    outcomes = each(loaded, jobs, look)
    if len(outcomes) == 1 and outcomes[0].error is not None:
        raise outcomes[0].error
    for outcome in outcomes:
        if outcome.error is None and not outcome.result.reachable:
            outcome.code = UNREACHABLE
    if json:
        from dflash_ops.cli.watching import print_json

        print_json(_json(outcomes))
    else:
        _show(outcomes)
    show_errors(outcomes)
    return worst(outcomes)


def _seen(outcome: Outcome) -> Seen:
    """What was seen, or what is known where the job's machine answers with an error."""
    import time

    from dflash_ops.client import Seen
    from dflash_ops.contracts import Snapshot, State

    if outcome.error is None:
        seen: Seen = outcome.result
        return seen
    now = time.time()
    return Seen(Snapshot(outcome.job.name, now, State.UNKNOWN, now, outcome.error.what.splitlines()[0]), now)


def _json(outcomes: list[Outcome]) -> dict[str, object]:
    from dflash_ops.view.status import job_json

    jobs = []
    for outcome in outcomes:
        seen = _seen(outcome)
        jobs.append(job_json(seen.snapshot, seen.now, outcome.job.host, outcome.job.root, deployed=seen.deployed))
    return {"schema": 1, "kind": "status", "jobs": jobs}


def _show(outcomes: list[Outcome]) -> None:
    from dflash_ops.view.status import render, table

    out = console()
    if len(outcomes) == 1:
        one = _seen(outcomes[0])
        out.print(render(one.snapshot, one.now, out.width))
    else:
        hosts = {o.job.name: o.job.host for o in outcomes}
        seen = [_seen(o) for o in outcomes]
        out.print(table([(s.snapshot, s.now) for s in seen], hosts))


def _watch(loaded: Inventory, jobs: list[Job], *, as_json: bool) -> int:
    from dflash_ops.cli.adopted import client_of
    from dflash_ops.cli.live import watch
    from dflash_ops.errors import UsageError
    from dflash_ops.hosts.factory import open_host

    if len(jobs) != 1:
        raise UsageError(
            "--watch shows one job",
            "dflash-ops status --watch",
            f"name one of: {', '.join(j.name for j in jobs)}",
        )
    host = open_host(loaded, jobs[0].host)
    try:
        return watch(client_of(host, jobs[0], loaded.host_of(jobs[0]).python), as_json=as_json)
    finally:
        host.close()
