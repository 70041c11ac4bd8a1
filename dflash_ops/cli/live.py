"""The live screen of one job: fed by one stream, drawn at 2 Hz on a terminal, one line a change elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from dflash_ops.cli.common import console, is_plain
from dflash_ops.client import JobClient, Seen
from dflash_ops.contracts import State
from dflash_ops.errors import CommandFailed, HostError
from dflash_ops.view.status import change_key, job_json, line, render

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
