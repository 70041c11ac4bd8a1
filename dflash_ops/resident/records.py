"""`journal`, `record`, `attempts`, `activate`: what was done, and the switch of the release."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Event, Layout, Limits, Release, clock, from_dict, to_dict
from dflash_ops.errors import ContractError, ReleaseError, UsageError
from dflash_ops.resident import attempts, journal
from dflash_ops.resident.answer import say
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import read_json, run_lock, sync_folder
from dflash_ops.supervise.health import Evidence, assess

#: Events that an operator's side may write; the others are only true when the resident says them.
OPERATOR_EVENTS = frozenset({"deployed", "note", "rebalanced"})


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--root", required=True, type=Path)
    return parser


def journal_main(args: list[str]) -> int:
    parser = _parser("journal")
    parser.add_argument("--last", type=int, default=None, help="only so many, the newest")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(args)
    events, torn = journal.read(Layout(options.root.absolute()).journal)
    if options.last is not None:
        events = events[len(events) - max(0, options.last) :] if options.last < len(events) else events
    if options.json:
        say({"schema": 1, "kind": "journal", "events": to_dict(events), "torn_lines": torn})
        return 0
    for event in events:
        sys.stdout.write(_line(event) + "\n")
    return 0


def _line(event: Event) -> str:
    when = clock(event.t)
    attempt = f" attempt {event.attempt}" if event.attempt is not None else ""
    data = json.dumps(event.data, ensure_ascii=False, separators=(",", ":")) if event.data else ""
    return f"{event.seq:>6}  {when}  {event.actor}{attempt}: {event.event} {data}".rstrip()


def record_main(args: list[str]) -> int:
    parser = _parser("record")
    parser.add_argument("--event", required=True, choices=sorted(OPERATOR_EVENTS))
    parser.add_argument("--actor", default="operator")
    parser.add_argument("--attempt", type=int, default=None)
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    raw = sys.stdin.buffer.read()
    try:
        data = json.loads(raw) if raw.strip() else {}
    except ValueError as error:
        raise ContractError(f"standard input is no JSON: {error}", "record", "send one object") from None
    if not isinstance(data, dict):
        raise ContractError("standard input is no JSON object", "record", "send one object")
    layout.run.mkdir(parents=True, exist_ok=True)
    event = journal.append(layout.journal, options.event, actor=options.actor, attempt=options.attempt, data=data)
    say({"schema": 1, "event": to_dict(event)})
    return 0


def attempts_main(args: list[str]) -> int:
    layout = Layout(_parser("attempts").parse_args(args).root.absolute())
    found = [listed(attempts.read(layout, n)) for n in attempts.numbers(layout)]
    say({"schema": 1, "kind": "attempts", "attempts": found})
    return 0


def listed(attempt: Attempt) -> dict[str, Any]:
    """One entry of `attempts`."""
    start, spec = attempt.start, attempt.spec
    alive = attempt.launcher_alive
    evidence = Evidence(
        attempt=attempt.number,
        started=start.t if start else None,
        exit=attempt.exit,
        launcher_alive=alive,
        stop_requested=attempt.stop is not None,
        rebooted=attempt.rebooted,
        finished_rc=spec.finished_rc if spec else (0,),
        damaged=attempt.damaged,
    )
    verdict = assess(evidence, time.time(), Limits())
    return {
        "attempt": attempt.number,
        "alive": alive,
        "state": None if alive else verdict.state.value,  # of a living one only its snapshot knows
        "detail": "" if alive else verdict.detail,
        "release": start.release if start else spec.release if spec else None,
        "started": start.t if start else None,
        "exit": to_dict(attempt.exit),
        "overrides": start.overrides if start else {},
        "reason": start.reason if start else "",
        "damaged": list(attempt.damaged),
    }


def activate_main(args: list[str]) -> int:
    parser = _parser("activate")
    parser.add_argument("--release", required=True)
    parser.add_argument("--actor", default="operator")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    layout.run.mkdir(parents=True, exist_ok=True)
    with run_lock(layout.lock, "activate"):
        before = activate(layout, options.release, options.actor)
    say({"schema": 1, "release": options.release, "previous": before})
    return 0


def activate(layout: Layout, release: str, actor: str) -> str | None:
    """Switch `current` to a release by rename; gives the one that it was.

    Raises:
        ReleaseError: the release is not there whole.
        UsageError: `current` is a folder or file of somebody's.
    """
    if not release or "/" in release or release.startswith("."):
        raise UsageError(f"{release!r} is no release id", "activate", "use the id that `deploy` gave")
    folder = layout.release(release)
    manifest = read_json(folder / ".release.json")
    if manifest is None:
        raise ReleaseError(f"release {release} is not on this machine", str(folder), "deploy it")
    found = from_dict(Release, manifest, str(folder / ".release.json"))
    if found.id != release:
        raise ReleaseError(f"the manifest there is of release {found.id}", str(folder), "deploy it anew")
    missing = [f.path for f in found.files if not os.path.lexists(folder / f.path)]
    if missing:
        raise ReleaseError(
            f"{len(missing)} files of release {release} are missing, the first is {missing[0]}",
            str(folder),
            "deploy it anew",
        )
    before: str | None = None
    if layout.current.is_symlink():
        before = layout.current.readlink().name
    elif os.path.lexists(layout.current):
        raise UsageError("`current` is there and is no link", str(layout.current), "move it away")
    if before != release:
        data = {"release": release, "previous": before}
        journal.append(layout.journal, "activated", actor=actor, data=data)
        beside = layout.root / f".current.{os.getpid()}"
        if os.path.lexists(beside):
            beside.unlink()
        beside.symlink_to(Path("releases") / release)
        beside.replace(layout.current)
        sync_folder(layout.root)
    return before
