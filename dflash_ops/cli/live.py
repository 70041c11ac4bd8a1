"""The live screen of one job: fed by one stream, drawn at 2 Hz on a terminal, one line a change elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_ops.cli.common import console, is_plain
from dflash_ops.client import JobClient, Seen
from dflash_ops.contracts import State
from dflash_ops.errors import CommandFailed, DflashError, HostError
from dflash_ops.parallel import merged
from dflash_ops.view.status import change_key, job_json, line, render

if TYPE_CHECKING:
    from dflash_ops.view.nodes import NodeSeen

#: States in which nothing more will come, and the exit code of each.
ENDS = {State.FINISHED: 0, State.STOPPED: 0, State.CRASHED: 1}

#: Seconds between tries once the machine cannot be reached, doubled up to the last one.
RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0)

REFRESH_HZ = 2


def watch(client: JobClient, *, as_json: bool = False) -> int:
    """Show the job until it ends: 0 finished or stopped, 1 crashed or never deployed."""
    if as_json or is_plain(sys.stdout):
        return _plain(client, as_json=as_json)
    return _screen(client)


def watch_nodes(clients: Sequence[JobClient], *, as_json: bool = False) -> int:
    """Show a job of several nodes until all of them have ended: 0, or 1 where one crashed or was never deployed."""
    if as_json or is_plain(sys.stdout):
        return _plain_nodes(clients, as_json=as_json)
    from rich.live import Live

    from dflash_ops.view.nodes import render_nodes

    out = console()
    nodes: list[NodeSeen] = []
    with Live(console=out, refresh_per_second=REFRESH_HZ, vertical_overflow="crop") as live:
        for nodes in nodes_stream(clients):
            live.update(render_nodes(nodes, out.width))
    return _code(nodes)


def nodes_stream(clients: Sequence[JobClient]) -> Iterator[list[NodeSeen]]:
    """All nodes whenever one has news, once each was seen; ends when all have ended.

    Raises:
        DflashError: what one of them says that cannot be understood, or a fault of ours.
    """
    from dflash_ops.view.nodes import NodeSeen

    known: dict[int, NodeSeen] = {}
    for news in merged(clients, stream, lambda client: client.job.label):
        for rank, seen in news:  # of a burst only the last is worth drawing
            if isinstance(seen, DflashError):
                raise seen
            job = clients[rank].job
            known[rank] = NodeSeen(rank, job.host, job.root, seen.snapshot, seen.now, seen.deployed)
        if len(known) == len(clients):
            yield [known[n] for n in sorted(known)]


def _code(nodes: Sequence[NodeSeen]) -> int:
    return max((ENDS.get(n.snapshot.state, 1) for n in nodes), default=1)


def _plain_nodes(clients: Sequence[JobClient], *, as_json: bool) -> int:
    from dflash_ops.view.nodes import lines, nodes_json

    last: object = None
    nodes: list[NodeSeen] = []
    for nodes in nodes_stream(clients):
        key = [change_key(n.snapshot) for n in nodes]
        if key == last:
            continue
        last = key
        one = {"schema": 1, "kind": "status", "jobs": [nodes_json(nodes)]} if as_json else None
        print(json.dumps(one, ensure_ascii=False, allow_nan=False) if one else lines(nodes), flush=True)
    return _code(nodes)


def stream(client: JobClient) -> Iterator[Seen]:
    """Snapshots until the job has ended; a machine that cannot be reached is one more state, asked again and again."""
    failures = 0
    while True:
        first = client.snapshot()
        yield first
        if first.snapshot.state in ENDS or not first.deployed:
            return
        if first.reachable:
            failures = 0
            try:
                for seen in client.follow():
                    yield seen
                    if seen.snapshot.state in ENDS:
                        return
            except HostError as error:
                yield client.unreachable(error)
            except CommandFailed:
                # The resident was replaced or killed under us: the next look says what is true now.
                failures += 1
        else:
            failures += 1
        time.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])


def _plain(client: JobClient, *, as_json: bool) -> int:
    last, code = None, 1
    for seen in stream(client):
        code = ENDS.get(seen.snapshot.state, 1)
        key = change_key(seen.snapshot)
        if key == last:
            continue
        last = key
        if as_json:
            one = job_json(seen.snapshot, seen.now, client.job.host, client.job.root, deployed=seen.deployed)
            text = json.dumps({"schema": 1, "kind": "status", "jobs": [one]}, ensure_ascii=False, allow_nan=False)
        else:
            text = line(seen.snapshot, seen.now)
        print(text, flush=True)
    return code


def _screen(client: JobClient) -> int:
    from rich.live import Live

    out, code = console(), 1
    with Live(console=out, refresh_per_second=REFRESH_HZ, vertical_overflow="crop") as live:
        for seen in stream(client):
            code = ENDS.get(seen.snapshot.state, 1)
            live.update(render(seen.snapshot, seen.now, out.width))
    return code
