"""`stop`: TERM to the launcher (save, exit 3), KILL after the grace time, and nothing of the attempt left.

The rule here: only processes of our record are ended, each by pid and start time: the launcher, what was seen below it
and in its session. The intent is on the disk before the signal, so that a stop is never read as a crash.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Layout, Process, State, StopRecord, dumps, to_dict
from dflash_ops.errors import DflashError, StartError, StateError
from dflash_ops.resident import attempts, daemon, journal, proc
from dflash_ops.resident.answer import say
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import run_lock, write_atomic
from dflash_ops.resident.tmux import Tmux, TmuxSilent, clean_environment
from dflash_ops.resident.watch import Watcher
from dflash_ops.supervise.ledger import SUPERVISOR

#: Seconds between TERM and KILL for what outlives the launcher.
LEFT_GRACE = 3.0
#: Seconds for a killed process to be gone, and for the wrapper to write down the end.
END_WAIT = 10.0


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="stop")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--grace", type=float, default=None, help="seconds; default: the job's own")
    parser.add_argument("--reason", default="")
    parser.add_argument("--actor", default="operator")
    options = parser.parse_args(args)
    clean_environment()
    say(stop(Layout(options.root.absolute()), options.grace, options.reason, options.actor))
    return 0


def stop(layout: Layout, grace_s: float | None = None, reason: str = "", actor: str = "operator") -> dict[str, Any]:
    """End the newest attempt; fine if it has ended, or if nothing was ever started.

    Raises:
        JobBusy: another command is at work.
        StateError: start.json is damaged, so nobody is signalled.
        DflashError: something of it lives on after KILL.
    """
    found = attempts.last(layout)
    if found is None:
        return {"schema": 1, "attempt": None, "state": State.UNKNOWN.value, "already": True, "escalated": False,
                "detail": "never started", "exit": None, "checkpoint": None, "warnings": []}  # fmt: skip
    if found.start is None and found.layout.start.exists():
        raise StateError(
            f"who to stop is not known: {'; '.join(found.damaged)}",
            str(found.layout.start),
            "find the launcher with `ps`, send it TERM, then remove that file",
        )
    told: list[str] = []
    with run_lock(layout.lock, "stop", 30.0):  # a start that is just at work comes to its end first
        attempt = attempts.last(layout) or found
        already = not attempt.launcher_alive
        grace = grace_s if grace_s is not None else attempt.spec.grace_s if attempt.spec else 60.0
        if not already:
            _announce(layout, attempt, actor, reason, grace, told)
        elif actor != SUPERVISOR and not attempt.ended_well():
            # Nothing lives, but something may be about to start it again: that is stopped as well.
            _say_stop(layout, attempt, actor, reason, grace, told)
    escalated = False
    if attempt.start is not None and not attempt.rebooted:
        escalated = _end(layout, attempt, 0.0 if already else grace, actor, told, already=already)
    with run_lock(layout.lock, "stop", 30.0):
        _close_session(attempt, told)
    snapshot = Watcher(layout, daemon.last_snapshot(layout)).look(None)
    if snapshot.attempt == attempt.number:
        with suppress(OSError):
            daemon.record_end(layout, snapshot)
    daemon.poke(layout, lambda s: s.attempt != attempt.number or s.state not in _LIVE)
    return {
        "schema": 1,
        "attempt": attempt.number,
        "state": snapshot.state.value,
        "already": already,
        "escalated": escalated,
        "detail": snapshot.detail,
        "exit": to_dict(snapshot.exit),
        "checkpoint": to_dict(snapshot.checkpoint) if snapshot.attempt == attempt.number else None,
        "warnings": told,
    }


_LIVE = frozenset({State.LOADING, State.COMPILING, State.STEPPING, State.SLOW, State.HUNG})


def _announce(layout: Layout, attempt: Attempt, actor: str, reason: str, grace: float, told: list[str]) -> None:
    """Write the intent down. A disk too full for it must not keep an operator from stopping his job."""
    record = StopRecord(attempt.number, time.time(), actor, reason, grace)
    try:
        if attempt.stop is None:
            write_atomic(attempt.layout.stop, dumps(record).encode() + b"\n")
    except (OSError, DflashError) as error:
        told.append(f"the stop could not be written down: {error}")
    _say_stop(layout, attempt, actor, reason, grace, told)


def _say_stop(layout: Layout, attempt: Attempt, actor: str, reason: str, grace: float, told: list[str]) -> None:
    try:
        journal.append(
            layout.journal,
            "stop_requested",
            actor=actor,
            attempt=attempt.number,
            data={"reason": reason, "grace_s": grace},
        )
    except (OSError, DflashError) as error:
        told.append(f"the stop could not be written down: {error}")


def _end(layout: Layout, attempt: Attempt, grace: float, actor: str, told: list[str], *, already: bool) -> bool:
    """TERM, wait, KILL; whether KILL was needed for the launcher."""
    assert attempt.start is not None
    launcher = attempt.start.launcher
    # Whoever leaves the launcher's tree later (its parent died) is still known from here.
    known: set[Process] = proc.family(launcher)
    escalated = False
    if proc.send(launcher, signal.SIGTERM):
        end = time.monotonic() + grace
        while proc.alive(launcher) and time.monotonic() < end:
            known |= proc.family(launcher, known)
            _wait_gone({launcher}, min(0.5, max(0.05, end - time.monotonic())))
        if proc.alive(launcher):
            escalated = True
            data = {"pid": launcher.pid, "grace_s": grace}
            with suppress(OSError):
                journal.append(layout.journal, "stop_escalated", actor=actor, attempt=attempt.number, data=data)
            known |= proc.family(launcher, known)
            proc.send(launcher, signal.SIGKILL)
            _kill(known)
    if not _wait_gone({launcher}, END_WAIT):
        raise DflashError(
            f"launcher pid {launcher.pid} lives on after KILL",
            str(attempt.layout.path),
            "it hangs inside the kernel (state D in `ps`): look at the driver and the disks",
        )
    left = proc.family(launcher, known)
    if left and not escalated:
        for process in left:
            proc.send(process, signal.SIGTERM)
        _wait_gone(left, LEFT_GRACE)
        if already and (ended := [p for p in left if not proc.alive(p)]):
            told.append(f"left behind by the attempt, and ended now: pid {_pids(ended)}")
    left = proc.family(launcher, known)
    if left:
        told.append(f"ended by KILL after the launcher: pid {_pids(left)}")
        _kill(left)
        if not _wait_gone(left, END_WAIT):
            told.append("some of them do not end: they hang inside the kernel")
    _wait_gone({attempt.start.wrapper}, END_WAIT)
    return escalated


def _pids(processes: Iterable[Process]) -> str:
    return ", ".join(map(str, sorted(p.pid for p in processes)))


def _kill(processes: set[Process]) -> None:
    for process in processes:
        proc.send(process, signal.SIGKILL)


def _wait_gone(processes: set[Process], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(map(proc.alive, processes)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _close_session(attempt: Attempt, told: list[str]) -> None:
    if attempt.spec is None or attempt.start is None:
        return
    tmux = Tmux(attempt.spec.socket)
    try:
        panes = tmux.panes(attempt.spec.session) or []
        if any(p.process == attempt.start.wrapper.pid for p in panes):  # else it is a later attempt's, or foreign
            tmux.end(attempt.spec.session, attempt.start.wrapper.pid)
    except (TmuxSilent, StartError) as error:
        told.append(f"the session is still there: {error}")
