"""`begin`: from a release that is there to a trainer that runs, in one step: one exec, however slow the way.

The rule here: what is written down comes before what it announces, and each step is whole by itself: after a cut the
next command finds either the old or the new, never half of one.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from pathlib import Path
from typing import Any

from dflash_ops.contracts import JobSpec, Layout, from_dict
from dflash_ops.errors import ContractError
from dflash_ops.resident import journal, receive, releases, start
from dflash_ops.resident.answer import say
from dflash_ops.resident.content import sync_tree
from dflash_ops.resident.files import run_lock
from dflash_ops.resident.records import activate
from dflash_ops.resident.tmux import clean_environment


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="begin", description="JSON on standard input: use, deployed, spec, keep_releases"
    )
    parser.add_argument("--root", required=True, type=Path)
    root = parser.parse_args(args).root.absolute()
    request = read_request("begin")
    clean_environment()
    say(begin(root, request))
    return 0


def read_request(command: str) -> dict[str, Any]:
    """The object on standard input.

    Raises:
        ContractError: it is none.
    """
    try:
        request = json.loads(sys.stdin.buffer.read())
    except ValueError as error:
        raise ContractError(f"standard input is no JSON: {error}", command, "send one object") from None
    if not isinstance(request, dict):
        raise ContractError("standard input is no JSON object", command, "send one object")
    return request


def begin(root: Path, request: dict[str, Any]) -> dict[str, Any]:
    """`{use, deployed, spec, keep_releases}`: the resident's id, the journal's data, a JobSpec, how many releases stay.

    Returns:
        `start`'s answer, with `previous` (release that `current` was) and `removed` (old releases).

    Raises:
        as `start`, `activate` and `receive`.
    """
    layout = Layout(root)
    spec = from_dict(JobSpec, request["spec"], "job.json")
    layout.run.mkdir(parents=True, exist_ok=True)
    if spec.release is not None and layout.release(spec.release).is_dir():
        sync_tree(layout.release(spec.release))  # from here on it may be believed after a power cut
    if request.get("use"):
        receive.use(root, str(request["use"]), secrets.token_hex(4))
    with run_lock(layout.lock, "begin"):
        journal.append(layout.journal, "deployed", actor=spec.actor, data=dict(request.get("deployed") or {}))
        previous = activate(layout, spec.release, spec.actor) if spec.release is not None else None
    answer = start.start(root, spec)
    keep = int(request.get("keep_releases") or 0)
    removed = releases.prune(layout, keep, spec.actor) if keep else []
    return {**answer, "previous": previous, "removed": removed}
