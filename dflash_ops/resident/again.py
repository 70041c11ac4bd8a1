"""`again`, run through deploy/boot.py: what was damaged here was sent again from outside; the job is started again.

Standard input: `{root, attempt, decision, reason, use, secrets}`. The rules here are those of a pass: nothing without
the lease, nothing after a person's stop, nothing but the attempt that was meant; the job is the person's, with the
changes that are in force, as after any restart of the supervisor's.
"""

from __future__ import annotations

import secrets as secrets_
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Layout, Overlay
from dflash_ops.errors import JobBusy
from dflash_ops.resident import attempts, journal, lease, receive
from dflash_ops.resident.answer import say
from dflash_ops.resident.begin import read_request
from dflash_ops.resident.effects import ResidentEffects
from dflash_ops.resident.tmux import clean_environment
from dflash_ops.supervise.ledger import SUPERVISOR, rebuild

#: Seconds for what the crashed attempt left behind to end, and for its GPU memory to come back.
END_S, MEMORY_S = 60.0, 120.0


def main(_args: list[str]) -> int:
    clean_environment()
    request = read_request("again")
    number = again(Path(str(request["root"])), request, {str(k): str(v) for k, v in request["secrets"].items()})
    say({"schema": 1, "kind": "again", "attempt": number})
    return 0


def again(root: Path, request: Mapping[str, Any], secrets: Mapping[str, str]) -> int:
    """Start it again; the attempt.

    Raises:
        JobBusy: the lease is held, it lives, or another attempt has begun since: nothing was done.
        LeaseLost, EffectFailed: as `supervise.Effects` says.
    """
    layout = Layout(root)
    where = str(layout.run)
    held = lease.take(layout, f"{SUPERVISOR} from outside")
    if held is None:
        raise JobBusy("the supervisor there holds the lease: nothing was done from outside", where, "it acts itself")
    try:
        last = attempts.last(layout)
        if last is None or last.number != request["attempt"] or last.launcher_alive:
            raise JobBusy("another attempt has begun since: nothing was done from outside", where, "look again")
        effects = ResidentEffects(layout, held, secrets, lambda _: None)
        _fenced(effects, where)
        if request.get("use"):
            receive.use(root, str(request["use"]), secrets_.token_hex(4))
        effects.end(last.number, END_S)
        effects.wait_for("memory", MEMORY_S)
        _fenced(effects, where)  # minutes may have passed
        ledger = rebuild(journal.read(layout.journal)[0])
        return effects.start(
            Overlay(ledger.layers),
            fresh=False,
            release=None,
            decision=str(request["decision"]),
            reason=str(request["reason"]),
        )
    finally:
        held.release()


def _fenced(effects: ResidentEffects, where: str) -> None:
    if not effects.fenced():
        raise JobBusy("a person stopped this job: nothing was started from outside", where, "a person starts it again")
