"""The first minutes of a new attempt, and the way back if it does not survive them."""

from __future__ import annotations

import threading
import time
from typing import Any

from dflash_ops.client import JobClient, Seen
from dflash_ops.contracts import LIVE_STATES, State
from dflash_ops.deploy.operation import Operation
from dflash_ops.errors import CommandFailed, HostError, StartError
from dflash_ops.view.stages import Stage

#: Seconds for which a job is watched whose steps cannot be seen (a command without `progress`).
BLIND_S = 10.0

#: Seconds for which an attempt must have lived after its first step was seen.
STEADY_S = 1.0

#: Lines of the log that a crash repeats.
LINES = 15


class RolledBack(StartError):
    """The new attempt crashed and the one before was started again; `result` is what `deploy --json` prints."""

    result: dict[str, Any]


def window(operation: Operation, asked: float | None) -> float:
    """Seconds of the watch window."""
    job = operation.job
    seconds = job.watch_s if asked is None else asked
    blind = asked is None and job.trainer is None and not job.progress
    return min(seconds, BLIND_S) if blind else seconds


def watch(operation: Operation, attempt: int, seconds: float, stage: Stage) -> Seen:
    """The state at the attempt's first step, at its end, when the window is over, or at `operation.halt`. One stream.

    Raises:
        HostError: the way to the machine was lost; the attempt goes on without us, and the text says so.
    """
    client, end = operation.client, time.monotonic() + seconds
    stage.until(seconds, "at most")
    try:
        seen = _follow(client, attempt, end, stage, operation.halt)
    except HostError as error:
        error.next = f"attempt {attempt} was started and needs nobody to watch it: dflash-ops status {client.job.name}"
        raise
    return seen


def _follow(client: JobClient, attempt: int, end: float, stage: Stage, halt: threading.Event) -> Seen:
    last: Seen | None = None
    first_step: float | None = None
    try:
        for seen in client.follow():
            if halt.is_set():
                break  # what is true now is asked once more
            if seen.snapshot.attempt != attempt:
                continue  # its snapshot is still to come
            last = seen
            snapshot = seen.snapshot
            now = time.monotonic()
            if first_step is None and snapshot.state in (State.STEPPING, State.SLOW):
                first_step = now
            steady = first_step is not None and now >= first_step + STEADY_S
            if steady or snapshot.state not in LIVE_STATES or now >= end:
                return seen
            what = f": {snapshot.detail}" if snapshot.detail else ""
            stage.say(f"attempt {attempt} is {snapshot.state.value}{what}")
    except CommandFailed:
        # The resident ended under us; what is true is asked once more.
        pass
    if last is None or last.snapshot.state in LIVE_STATES:
        return client.snapshot()
    return last


def crash(operation: Operation, attempt: int, seen: Seen) -> StartError | None:
    """What became of an attempt that failed, with its last words; None for one that did not."""
    snapshot = seen.snapshot
    if snapshot.state is not State.CRASHED:
        return None
    client = operation.client
    how = snapshot.exit.describe() if snapshot.exit is not None else snapshot.detail
    lines = [line.decode("utf-8", "replace") for line in client.logs(attempt=attempt, lines=LINES)]
    text = operation.mask("\n".join(line for line in lines if line.strip()))
    first = ""
    if snapshot.error is not None:
        first = operation.mask(f"; first cause in {snapshot.error.worker}: {snapshot.error.message}")
    return StartError(
        f"attempt {attempt} ended at once: {how}{first}\n{text}",
        f"{operation.where}/run/attempts/{attempt}/log",
        f"see the cause: dflash-ops triage --job {client.job.name}; then: dflash-ops deploy {client.job.name}",
    )
