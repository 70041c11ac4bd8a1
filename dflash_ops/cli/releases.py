"""`dflash-ops releases`: which releases are there, and which of them ran."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dflash_ops.cli.common import InventoryOption, JsonOption, console
from dflash_ops.cli.several import AllOption, JobsArgument, chosen, each_whole, show_errors, worst

if TYPE_CHECKING:
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Job


def command(
    job: JobsArgument = None, every: AllOption = False, json: JsonOption = False, inventory: InventoryOption = None
) -> int:
    """List the releases of a job: which is current, which ran in which attempt, how large."""
    from dflash_ops.cli.adopted import refuse_adopted
    from dflash_ops.cli.watching import print_json
    from dflash_ops.client import JobClient

    loaded, jobs = chosen(inventory, job, every)

    def look(one: Job, host: Host, python: str) -> Any:
        refuse_adopted(one, "releases", always=True)
        said = JobClient(host, one, python).ask("releases")
        return {**said, "job": one.name, "host": one.host}

    outcomes = each_whole(loaded, jobs, "releases", look)
    if len(outcomes) == 1 and outcomes[0].error is not None and not outcomes[0].result:
        raise outcomes[0].error
    if json and len(outcomes) == 1:
        print_json(outcomes[0].result)
    elif json:
        code = worst(outcomes)
        print_json({"schema": 1, "kind": "releases.all", "exit": code, "jobs": [o.to_json() for o in outcomes]})
    else:
        for outcome in outcomes:
            if outcome.job.nodes:
                for node in outcome.result["nodes"]:
                    if node["result"]:
                        _show(node["result"], f"{outcome.job.name}, node {node['node']} on {node['host']}")
            elif outcome.error is None:
                _show(outcome.result, f"{outcome.job.name} on {outcome.job.host}" if len(outcomes) > 1 else "")
    show_errors(outcomes)
    return worst(outcomes)


def _show(said: dict[str, Any], title: str) -> None:
    from rich.table import Table

    from dflash_ops.view.text import clean, duration, size

    table = Table(box=None, pad_edge=False, header_style="bright_black", title_justify="left")
    if title:
        table.title = clean(title)
    for head in ("release", "", "came", "files", "size", "attempts", "source"):
        table.add_column(head, no_wrap=head != "source", overflow="fold")
    now = time.time()
    for one in said["releases"]:
        words = [w for w in ("running", "current", "previous") if one[w]]
        words += ["damaged"] if one["damaged"] else []
        ran = one["attempts"]
        shown = ", ".join(map(str, ran[-5:])) if ran else "never ran"
        came = f"{duration(max(0.0, now - one['t']))} ago" if one["t"] else "-"
        more = "... " if len(ran) > 5 else ""
        table.add_row(
            one["release"], ", ".join(words), came, str(one["files"]), size(one["bytes"]), more + shown,
            clean(one["source"]),
        )  # fmt: skip
    out = console()
    if said["releases"]:
        out.print(table)
    else:
        out.print(f"{clean(title or said['job'])}: no release is there")
