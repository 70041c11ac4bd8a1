"""`status --watch`: the screen on a terminal; elsewhere one plain line, or one JSON object, for each change."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_ops.cli.common import discard_output
from dflash_ops.cli.watch_terminal import has_screen
from dflash_ops.contracts import State

if TYPE_CHECKING:
    from dflash_ops.client import JobClient
    from dflash_ops.fleet.follow import Look
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.view.nodes import NodeSeen

#: States in which nothing more will come of this attempt, and the exit code of each.
ENDS = {State.FINISHED: 0, State.STOPPED: 0, State.CRASHED: 1}

#: Seconds without news after which it is looked whether all has ended.
WAIT_S = 1.0


def watch(loaded: Inventory, jobs: Sequence[Job], *, as_json: bool = False, until_end: bool = False) -> int:
    """Show the jobs: on a terminal until `q`, else until all have ended.

    Args:
        until_end: end with the jobs on a terminal too.

    Returns:
        0; where it ends with the jobs 1 if one crashed or was never deployed.

    Raises:
        KeyboardInterrupt: Ctrl-C, or `q` where `until_end` was asked for.
    """
    from dflash_ops.cli.adopted import client_at
    from dflash_ops.hosts.factory import Hosts

    hosts = Hosts(loaded)
    try:
        clients = [[client_at(loaded, hosts, p) for p in job.parts] for job in jobs]
        if as_json or not has_screen(os.environ):
            try:
                return plain(jobs, clients, as_json=as_json)
            except BrokenPipeError:  # `| head` has seen enough
                discard_output()
                return 0
        from dflash_ops.cli.watch import run

        return run(loaded, jobs, clients, until_end=until_end)
    finally:
        hosts.close()


def plain(jobs: Sequence[Job], clients: Sequence[Sequence[JobClient]], *, as_json: bool) -> int:
    """One line a change, until all jobs have ended: 0, or 1 where one crashed or was never deployed."""
    from dflash_ops.fleet import follow

    last: dict[int, object] = {}
    known: dict[int, list[NodeSeen]] = {}
    streams = {(n, rank): client for n, mine in enumerate(clients) for rank, client in enumerate(mine)}
    with follow.Watch(streams, ends=True, pauses=follow.PAUSES_S) as news:
        over = False
        while not over:
            over = news.over  # before the look: what was said last is still to be told
            looks = news.looks()
            for n, job in enumerate(jobs):
                mine = [looks[n, rank] for rank in range(len(job.parts))]
                if any(look.seen is None and look.lost_since is None for look in mine):
                    continue  # each was asked, not each has answered
                known[n] = [_seen(job, rank, look) for rank, look in enumerate(mine)]
                if (key := _key(known[n])) != last.get(n):
                    last[n] = key
                    print(_said(job, known[n], as_json=as_json), flush=True)
            if not over:
                news.wait(WAIT_S)
    seen = [node for n in range(len(jobs)) for node in known.get(n, ())]
    return max((ENDS.get(node.snapshot.state, 1) for node in seen), default=1)


def _seen(job: Job, rank: int, look: Look) -> NodeSeen:
    """What is known of one machine; a link that is lost is the state `unreachable`."""
    from dflash_ops.view.nodes import NodeSeen

    seen, part = look.state(job.name), job.parts[rank]
    return NodeSeen(rank, part.host, part.root, seen.snapshot, seen.now, seen.deployed)


def _key(nodes: Sequence[NodeSeen]) -> object:
    from dflash_ops.view.status import change_key

    return [change_key(n.snapshot) for n in nodes]


def _said(job: Job, nodes: Sequence[NodeSeen], *, as_json: bool) -> str:
    from dflash_ops.view.nodes import lines, nodes_json, seen_json
    from dflash_ops.view.status import line

    if as_json:
        entry = nodes_json(nodes) if job.nodes else seen_json(nodes[0])
        said = {"schema": 1, "kind": "status", "jobs": [entry]}
        return json.dumps(said, ensure_ascii=False, allow_nan=False)
    return lines(nodes) if job.nodes else line(nodes[0].snapshot, nodes[0].now)
