"""`snapshot` and `follow`: the job's state, from the loop if that is fresh, else looked up anew."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from dflash_ops.contracts import LIVE_STATES, Layout, ResidentInfo, Snapshot, dumps
from dflash_ops.contracts.snapshot import FRESH_S
from dflash_ops.resident import daemon
from dflash_ops.resident.repairs import wanted
from dflash_ops.resident.tmux import clean_environment
from dflash_ops.resident.watch import Watcher

POLL = 0.2


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="snapshot")
    parser.add_argument("--root", required=True, type=Path)
    layout = Layout(parser.parse_args(args).root.absolute())
    clean_environment()
    _print(take(layout))
    return 0


def take(layout: Layout, watcher: Watcher | None = None) -> Snapshot:
    """The job now. With the loop down it is looked up here, said in `warnings`, and the loop started if it is needed.

    Raises:
        OSError: the run folder cannot be read.
    """
    fresh = daemon.fresh_snapshot(layout)
    if fresh is not None:
        return fresh
    watcher = watcher or Watcher(layout, daemon.last_snapshot(layout))
    record = daemon.running(layout)
    if record is not None:
        snapshot = watcher.look(ResidentInfo(True, record.pid, record.start, record.version))
        last = daemon.last_snapshot(layout)
        late = time.time() - max(record.t, last.t if last is not None else 0.0)
        if late > 2 * FRESH_S:
            text = f"the resident's loop has written nothing for {late:.0f} s; see run/resident.log"
            return replace(snapshot, warnings=(*snapshot.warnings, text))
        return snapshot
    snapshot = watcher.look(ResidentInfo(False))
    if snapshot.state not in LIVE_STATES and not wanted(layout, snapshot, watcher.attempt):
        return snapshot
    revived = daemon.ensure(layout)
    text = "the resident's loop was down" + (" and was started again" if revived else "; see run/resident.log")
    return replace(snapshot, warnings=(*snapshot.warnings, text))


def follow_main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="follow")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--forever", action="store_true", help="go on after the job has ended")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    clean_environment()
    watcher: Watcher | None = None
    printed = float("-inf")
    last: tuple[object, ...] | None = None
    stamp: object = None
    while True:
        due = time.monotonic() - printed >= 1.0
        now = _stamp(layout)
        if due or now != stamp:
            stamp = now
            if daemon.fresh_snapshot(layout) is None:
                watcher = watcher or Watcher(layout, daemon.last_snapshot(layout))
            snapshot = take(layout, watcher)
            key = (snapshot.attempt, snapshot.seq, snapshot.state, snapshot.detail)
            if due or key != last:
                _print(snapshot)
                printed, last = time.monotonic(), key
            if snapshot.state not in LIVE_STATES and not options.forever:
                return 0
        time.sleep(POLL)


def _stamp(layout: Layout) -> object:
    try:
        info = layout.snapshot.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


def _print(snapshot: Snapshot) -> None:
    sys.stdout.write(dumps(snapshot) + "\n")
    sys.stdout.flush()
