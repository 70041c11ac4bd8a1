"""`dflash-ops status`: one job's screen, all jobs as a table, JSON, or live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JsonOption, console, load_inventory
from dflash_ops.cli.several import AllOption, JobsArgument, NodeOption, Outcome, chosen, each_part, show_errors, worst
from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.client import Seen
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.view.nodes import NodeSeen

#: Exit code of a status of which one job could not be asked (docs/contracts.md).
UNREACHABLE = 5


def command(
    job: JobsArgument = None,
    every: AllOption = False,
    node: NodeOption = None,
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
    if node is not None:
        if len(jobs) != 1:
            raise UsageError("--node is one of one job's nodes", f"--node {node}", "name that job")
        jobs = [jobs[0].at_node(node)]
    if watch:
        return _watch(loaded, jobs, as_json=json)

    def look(one: Job, host: Host, python: str) -> Seen:
        return client_of(host, one, python).snapshot()

    parts = each_part(loaded, jobs, look)
    flat = [outcome for mine in parts for outcome in mine]
    if len(flat) == 1 and flat[0].error is not None:
        raise flat[0].error
    for outcome in flat:
        if outcome.error is None and not outcome.result.reachable:
            outcome.code = UNREACHABLE
    groups = [[seen_node(o) for o in mine] for mine in parts]
    if json:
        from dflash_ops.cli.watching import print_json

        print_json(
            {"schema": 1, "kind": "status", "jobs": [entry(one, g) for one, g in zip(jobs, groups, strict=True)]}
        )
    else:
        _show(jobs, groups)
    show_errors(flat)
    return worst(flat)


def seen_node(outcome: Outcome) -> NodeSeen:
    """What was seen of a job or node, or what is known where its machine answers with an error."""
    import time

    from dflash_ops.client import Seen
    from dflash_ops.contracts import Snapshot, State
    from dflash_ops.view.nodes import NodeSeen

    job = outcome.job
    if outcome.error is None:
        seen: Seen = outcome.result
    else:
        now = time.time()
        seen = Seen(Snapshot(job.name, now, State.UNKNOWN, now, outcome.error.what.splitlines()[0]), now)
    rank = job.node.rank if job.node is not None else 0
    return NodeSeen(rank, job.host, job.root, seen.snapshot, seen.now, seen.deployed)


def entry(job: Job, nodes: Sequence[NodeSeen]) -> dict[str, object]:
    """One job of `status --json`."""
    from dflash_ops.view.nodes import nodes_json
    from dflash_ops.view.status import job_json

    if job.nodes:
        return nodes_json(nodes)
    one = nodes[0]
    return job_json(one.snapshot, one.now, one.host, one.root, deployed=one.deployed)


def _show(jobs: Sequence[Job], groups: Sequence[Sequence[NodeSeen]]) -> None:
    from dflash_ops.view.nodes import joined, render_nodes
    from dflash_ops.view.status import Row, render, table

    out = console()
    if len(jobs) == 1:
        one = groups[0][0]
        out.print(render_nodes(groups[0], out.width) if jobs[0].nodes else render(one.snapshot, one.now, out.width))
        return
    rows = []
    for job, nodes in zip(jobs, groups, strict=True):
        whole = joined(nodes) if job.nodes else nodes[0]
        rows.append(Row(job.name, whole.host, whole.snapshot, whole.now))
        rows += [Row(f"  node {n.rank}", n.host, n.snapshot, n.now, below=True) for n in nodes if job.nodes]
    out.print(table(rows))


def _watch(loaded: Inventory, jobs: list[Job], *, as_json: bool) -> int:
    from dflash_ops.cli.adopted import client_of
    from dflash_ops.cli.live import watch, watch_nodes
    from dflash_ops.hosts.factory import Hosts

    if len(jobs) != 1:
        raise UsageError(
            "--watch shows one job",
            "dflash-ops status --watch",
            f"name one of: {', '.join(j.name for j in jobs)}",
        )
    hosts = Hosts(loaded)
    try:
        clients = [client_of(hosts[p.host], p, loaded.host_of(p).python) for p in jobs[0].parts]
        return watch_nodes(clients, as_json=as_json) if jobs[0].nodes else watch(clients[0], as_json=as_json)
    finally:
        hosts.close()
