"""The loop seen from outside: is it there, start it, ask it to look now."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from dflash_ops.contracts import LIVE_STATES, Event, Layout, Process, Snapshot, StartRecord, State
from dflash_ops.contracts.snapshot import FRESH_S
from dflash_ops.errors import ContractError, StateError
from dflash_ops.resident import attempts, itself, journal, proc
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import load
from dflash_ops.resident.watch import Watcher

#: Seconds for the loop to come up or to go.
WAIT = 10.0


@dataclass(frozen=True)
class LoopRecord:
    """resident.json."""

    SCHEMA: ClassVar[int] = 1

    pid: int
    start: int
    version: str = ""
    t: float = 0.0
    schema: int = 1

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start)


def running(layout: Layout) -> LoopRecord | None:
    """The loop's record if the loop lives; a damaged record is none (the next loop replaces it)."""
    try:
        record = load(LoopRecord, layout.resident_pid)
    except (StateError, ContractError, OSError):
        return None
    return record if record is not None and proc.alive(record.process) else None


def ensure(layout: Layout) -> bool:
    """Have a loop of this very version running. False: it would not start (run/resident.log says why).

    Where another build was installed since (a pass or a wrapper of before an upgrade lives on), one of that build: an
    old part never brings its own loop back. A trainer does not need it, so this is no error: `snapshot` looks by itself
    and warns.
    """
    record = running(layout)
    if record is not None and (record.version == itself.version() or itself.outdated(layout.root)):
        return True
    if record is not None:
        proc.send(record.process, signal.SIGTERM)
        _until(lambda: not proc.alive(record.process), WAIT)
    try:
        done = subprocess.run(
            itself.newest(layout.root, "loop", "--root", str(layout.root)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            timeout=WAIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and running(layout) is not None


def poke(layout: Layout, enough: Callable[[Snapshot], bool], seconds: float = 3.0) -> None:
    """Let the loop look now, and wait until its snapshot shows it: what was just done is then seen by everybody."""
    record = running(layout)
    if record is None:
        return
    proc.send(record.process, signal.SIGUSR1)

    def seen() -> bool:
        snapshot = last_snapshot(layout)
        return snapshot is not None and enough(snapshot)

    _until(seen, seconds)


def last_snapshot(layout: Layout) -> Snapshot | None:
    """snapshot.json as it is, however old; None where it is missing, torn or not in the agreed form."""
    try:
        return load(Snapshot, layout.snapshot)
    except (StateError, ContractError, OSError):
        return None


def fresh_snapshot(layout: Layout) -> Snapshot | None:
    """snapshot.json if it can be believed: young, its writer lives, and no attempt began or ended since.

    The files and /proc are asked for the last part, so that a kill is told at once and not a second later.
    """
    snapshot = last_snapshot(layout)
    if snapshot is None or abs(time.time() - snapshot.t) > FRESH_S or running(layout) is None:
        return None
    found = attempts.numbers(layout)
    if (found[-1] if found else None) != snapshot.attempt:
        return None
    if snapshot.attempt is None or snapshot.state not in LIVE_STATES:
        return snapshot
    try:
        start = load(StartRecord, layout.attempt(snapshot.attempt).start)
    except (StateError, ContractError):
        return None
    return snapshot if start is not None and proc.alive(start.launcher) else None


def settle(layout: Layout, attempt: Attempt) -> None:
    """Journal how this attempt ended, unless that was done."""
    if attempt.exit is None and attempt.start is None:
        return
    record_end(layout, Watcher(layout, last_snapshot(layout)).look(None))


def record_end(layout: Layout, snapshot: Snapshot) -> Event | None:
    """Journal `attempt_exited` for an ended attempt, once."""
    if snapshot.attempt is None or snapshot.state not in (State.CRASHED, State.FINISHED, State.STOPPED):
        return None
    number, exit = snapshot.attempt, snapshot.exit
    return journal.append_unless(
        layout.journal,
        lambda e: e.attempt == number and e.event == "attempt_exited",
        "attempt_exited",
        attempt=number,
        data={
            "state": snapshot.state.value,
            "rc": exit.rc if exit else None,
            "signal": exit.signal if exit else None,
            "requested": exit.requested if exit else None,
            "duration_s": round(exit.duration_s, 3) if exit else None,
            "step": snapshot.progress.step if snapshot.progress else None,
            "detail": snapshot.detail,
        },
    )


def _until(done: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
