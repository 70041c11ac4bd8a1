"""`dflash-ops status`: one job's screen, all jobs as a table, JSON, or live."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption, console, load_inventory

if TYPE_CHECKING:
    from dflash_ops.client import JobClient, Seen

#: Exit code of a status of which one job could not be asked (docs/contracts.md).
UNREACHABLE = 5


def command(
    job: JobArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and show changes until the job ends.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """State, progress and rates of a job; without a name and with several jobs, of all of them."""
    clients = _clients(inventory, job)
    try:
        if watch:
            return _watch(clients, as_json=json)
        seen = [(client, client.snapshot()) for client in clients]
    finally:
        for client in clients:
            client.host.close()
    if json:
        from dflash_ops.cli.watching import print_json

        print_json(_json(seen))
    else:
        _show(seen)
    return 0 if all(s.reachable for _, s in seen) else UNREACHABLE


def _clients(inventory: Path | None, name: str | None) -> list[JobClient]:
    from dflash_ops.client import JobClient
    from dflash_ops.hosts.factory import open_host

    loaded = load_inventory(inventory)
    several = name is None and loaded.default_job is None and len(loaded.jobs) > 1
    jobs = list(loaded.jobs.values()) if several else [loaded.job(name)]
    return [JobClient(open_host(loaded, j.host), j, loaded.host_of(j).python) for j in jobs]


def _json(seen: list[tuple[JobClient, Seen]]) -> dict[str, object]:
    from dflash_ops.view.status import job_json

    jobs = [job_json(s.snapshot, s.now, c.job.host, c.job.root, deployed=s.deployed) for c, s in seen]
    return {"schema": 1, "kind": "status", "jobs": jobs}


def _show(seen: list[tuple[JobClient, Seen]]) -> None:
    from dflash_ops.view.status import render, table

    out = console()
    if len(seen) == 1:
        _, one = seen[0]
        out.print(render(one.snapshot, one.now, out.width))
    else:
        hosts = {c.job.name: c.job.host for c, _ in seen}
        out.print(table([(s.snapshot, s.now) for _, s in seen], hosts))


def _watch(clients: list[JobClient], *, as_json: bool) -> int:
    from dflash_ops.cli.live import watch
    from dflash_ops.errors import UsageError

    if len(clients) != 1:
        raise UsageError(
            "--watch shows one job",
            "dflash-ops status --watch",
            f"name one of: {', '.join(c.job.name for c in clients)}",
        )
    return watch(clients[0], as_json=as_json)
