"""`pace`: what a change of the split is decided from: the running attempt's records, its job, what starts cost before.

The rule here: nothing is changed and nothing is judged. What cannot be read is named beside what could.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_ops.contracts import JobSpec, Layout, Process, to_dict
from dflash_ops.errors import ContractError, DflashError, StateError
from dflash_ops.resident import attempts, daemon, journal, lease, machine, proc, spec
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import read_json, read_tail
from dflash_ops.resident.watch import Watcher

#: Bytes of metrics.jsonl that are read, and lines of them that are told, the newest.
TAIL = 4 << 20
RECORDS = 2000

#: Attempts of which it is told what their start and their stop took, and of which records are looked for.
STARTS = 8

#: Bytes at the head of metrics.jsonl in which the first record stands.
HEAD = 1 << 16

#: run/switch.json: the change that is at work, or was last (resident/switch.py).
SWITCH = "switch.json"


def main(args: list[str]) -> int:
    """As a command, with `--root`; or through deploy/boot.py, with one line `{root}` on standard input."""
    from dflash_ops.resident.receive import say
    from dflash_ops.resident.tmux import clean_environment

    parser = argparse.ArgumentParser(prog="pace")
    parser.add_argument("--root", type=Path, default=None)
    root = parser.parse_args(args).root
    clean_environment()
    if root is None:
        root = Path(json.loads(sys.stdin.buffer.readline())["root"])
    return say(lambda: pace(Layout(root.absolute())))


def pace(layout: Layout) -> dict[str, Any]:
    """`{schema, kind, now, cpus, snapshot, launcher, newest, measured, before, starts, gpus, gpus_note, lease, switch,
    events, events_note}`.

    `newest` = `{attempt, spec}` of the newest attempt; `measured` = `{attempt, spec, alive, records, damaged}` of the
    newest one that has records; `before` = `{attempt, spec}` that the newest change of the split took the place of;
    each may be null. `starts` = `[{attempt, load_s, stop_s}]`, seconds from the start to the first record, and from the
    stop to the end. `events_note`: why `events` is empty though there may be some.
    """
    numbers = attempts.numbers(layout)
    recent = [attempts.read(layout, n) for n in reversed(numbers[-STARTS:])]
    newest = recent[0] if recent else None
    seen = None
    if newest is not None:
        seen = daemon.fresh_snapshot(layout) or Watcher(layout, daemon.last_snapshot(layout)).look(None)
    events, unread = _events(layout)
    gpus, note = machine.gpus() if newest is None or newest.spec is None or spec.on_gpus(newest.spec) else ((), "")
    return {
        "schema": 1,
        "kind": "pace",
        "now": time.time(),
        "cpus": len(os.sched_getaffinity(0)),
        "snapshot": to_dict(seen) if seen is not None else None,
        "launcher": newest.start.launcher.pid if newest and newest.start and newest.launcher_alive else None,
        "newest": {"attempt": newest.number, "spec": _spec(newest.spec)} if newest is not None else None,
        "measured": next(filter(None, map(_measured, recent)), None),
        "before": _before(layout, events),
        "starts": [_start(a) for a in recent],
        "gpus": [{"index": g.index, "total": g.total, "used": g.used} for g in gpus or ()],
        "gpus_note": note,
        "lease": _holder(layout),
        "switch": switch_record(layout),
        "events": events,
        "events_note": unread,
    }


def switch_record(layout: Layout) -> dict[str, Any] | None:
    """run/switch.json with `alive`: whether who wrote it is still at work; None where none can be read."""
    try:
        said = read_json(layout.run / SWITCH)
    except (StateError, OSError):
        return None  # it is only about a change that was cut off, and the journal tells of that too
    if not isinstance(said, dict):
        return None
    pid, start = said.get("pid"), said.get("start")
    alive = isinstance(pid, int) and isinstance(start, int) and proc.alive(Process(pid, start))
    return {**said, "alive": alive}


def _spec(job: JobSpec | None) -> Any:
    return to_dict(job) if job is not None else None


def _measured(attempt: Attempt) -> dict[str, Any] | None:
    raw, begin = read_tail(attempt.layout.metrics, TAIL)
    lines = raw.split(b"\n")
    last = lines.pop()  # a line that is being written, or nothing
    if begin and lines:
        lines.pop(0)
    records, damaged = [], 0
    for line in lines[-RECORDS:]:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    damaged += bool(last.strip()) and not attempt.launcher_alive
    if not records and not damaged:
        return None
    return {
        "attempt": attempt.number,
        "spec": _spec(attempt.spec),
        "alive": attempt.launcher_alive,
        "records": records,
        "damaged": damaged,
    }


def _before(layout: Layout, events: list[dict[str, Any]]) -> dict[str, Any] | None:
    number = events[0].get("attempt") if events else None
    if not isinstance(number, int):
        return None
    return {"attempt": number, "spec": _spec(attempts.read(layout, number).spec)}


def _start(attempt: Attempt) -> dict[str, Any]:
    first: float | None = None
    with suppress(OSError, ValueError, RecursionError), attempt.layout.metrics.open("rb") as file:
        record = json.loads(file.read(HEAD).partition(b"\n")[0])
        if isinstance(record, dict) and isinstance(record.get("t"), (int, float)):
            first = float(record["t"])
    began = attempt.start.t if attempt.start is not None else None
    return {
        "attempt": attempt.number,
        "load_s": round(max(0.0, first - began), 1) if first is not None and began is not None else None,
        "stop_s": round(max(0.0, attempt.exit.t - attempt.stop.t), 1) if attempt.exit and attempt.stop else None,
    }


def _holder(layout: Layout) -> dict[str, Any] | None:
    try:
        held = lease.holder(layout)
    except (StateError, ContractError) as error:
        return {"owner": f"not known: {error.what}", "pid": 0}
    return {"owner": held.owner, "pid": held.pid} if held is not None else None


def _events(layout: Layout) -> tuple[list[dict[str, Any]], str]:
    """The newest `rebalancing` and what came after it that tells of it; and why that cannot be told."""
    try:
        events = journal.read(layout.journal)[0]
    except (OSError, DflashError) as error:
        return [], f"the journal cannot be read: {error}"
    begun = max((i for i, e in enumerate(events) if e.event == "rebalancing"), default=None)
    if begun is None:
        return [], ""
    told = ("rebalancing", "rebalanced", "deployed", "rolled_back", "attempt_started")
    first, *later = [to_dict(e) for e in events[begun:] if e.event in told]
    return [first, *later[-19:]], ""
