"""`dflash-ops status`: one job's screen, all jobs as a table, JSON, or live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JsonOption, console, load_inventory
from dflash_ops.cli.fleet import DeadlineOption, HostOption, JobOption, NodesOption, SortOption, StateOption
from dflash_ops.cli.several import AllOption, JobsArgument, NodeOption, at_node, chosen
from dflash_ops.errors import UsageError

if TYPE_CHECKING:
    from dflash_ops.fleet.jobs import JobSeen


def command(
    job: JobsArgument = None,
    every: AllOption = False,
    node: NodeOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and show how it goes (docs/watch.md).")] = False,
    state: StateOption = None,
    host: HostOption = None,
    named: JobOption = None,
    sort: SortOption = None,
    nodes: NodesOption = False,
    deadline: DeadlineOption = 20.0,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """State, progress and rates of a job; without a name and with several jobs, of all of them."""
    from dflash_ops.cli.fleet import look_all, show, show_errors
    from dflash_ops.fleet.jobs import Filters, ordered

    filters = Filters.of(state, host, named)
    ordered([], sort or "file", [])  # refused before anybody is asked
    if not job and not every:
        loaded = load_inventory(inventory)
        every = bool(filters) or (loaded.default_job is None and len(loaded.jobs) > 1)
    loaded, jobs = chosen(inventory, job, every)
    jobs = filters.chosen(loaded, jobs)
    jobs = at_node(jobs, node)
    if watch:
        from dflash_ops.cli.live import watch as stay

        if state:
            raise UsageError("--state and --watch exclude each other: states change", "--state", "leave --state out")
        if sort or nodes:
            option = "--sort" if sort else "--nodes"
            why = "on the screen jobs keep their places, and a job opens by Enter"
            raise UsageError(f"{option} and --watch exclude each other: {why}", option, f"leave {option} out")
        return stay(loaded, jobs, as_json=json)
    alone = len(jobs) == 1 and not filters
    seen = look_all(loaded, jobs, deadline=deadline, quiet=json)
    if alone and len(seen[0].errors) == 1 and seen[0].errors[0] is not None:
        raise seen[0].errors[0]
    if json:
        from dflash_ops.cli.watching import print_json

        rows = ordered(filters.shown(seen), sort or "file", jobs)
        said: dict[str, object] = {"schema": 1, "kind": "status", "jobs": [entry(one) for one in rows]}
        if filters:
            said |= {"filters": filters.to_json(), "asked": len(seen)}
        print_json(said)
    elif alone:
        _show(seen[0])
    else:
        show(seen, filters, order=sort or "trouble", jobs=jobs, nodes=nodes)
    show_errors(seen)
    return max(one.code for one in seen)


def entry(one: JobSeen) -> dict[str, object]:
    """One job of `status --json`."""
    from dflash_ops.view.nodes import nodes_json, seen_json

    return nodes_json(one.nodes) if one.job.nodes else seen_json(one.nodes[0])


def _show(one: JobSeen) -> None:
    from dflash_ops.view.nodes import render_nodes
    from dflash_ops.view.status import render

    out = console()
    seen = one.nodes[0]
    out.print(render_nodes(one.nodes, out.width) if one.job.nodes else render(seen.snapshot, seen.now, out.width))
