"""What a deploy will do, from what is there and what was asked: pure, so that every case is a test."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_ops.contracts import LIVE_STATES, Snapshot
from dflash_ops.errors import JobBusy, PreflightError
from dflash_ops.resident.preflight import Check
from dflash_ops.resident.probe import Probe


@dataclass(frozen=True)
class Options:
    """What the operator asked for.

    Args:
        plan: say what would happen, touch nothing.
        replace: a running attempt may be stopped (TERM, then KILL after `grace_s`).
        begin: what to do with checkpoints that are there: `resume`, `fresh`, or empty (refuse).
        grace_s: seconds between TERM and KILL; None = the job's.
    """

    plan: bool = False
    replace: bool = False
    begin: str = ""
    reason: str = ""
    actor: str = "operator"
    grace_s: float | None = None


@dataclass(frozen=True)
class Steps:
    send_resident: bool
    send_release: bool
    stop: bool


class Refused(PreflightError):
    """Preflight's failures, all at once: each of `errors` is one."""

    def __init__(self, errors: tuple[PreflightError, ...]) -> None:
        self.errors = errors
        super().__init__("\n".join(e.what for e in errors), errors[0].where, errors[0].next)


def running(probe: Probe) -> bool:
    """Whether an attempt is alive: its launcher is, or the resident says so."""
    return probe.launcher is not None or (probe.snapshot is not None and probe.snapshot.state in LIVE_STATES)


def describe(snapshot: Snapshot | None, now: float) -> str:
    """`attempt 3 is stepping, step 120/500`."""
    if snapshot is None:
        return "an attempt runs"
    text = f"attempt {snapshot.attempt} is {snapshot.state.value}"
    if snapshot.progress is not None and snapshot.progress.step is not None:
        text += f", step {snapshot.progress.step}"
        text += f"/{snapshot.progress.total}" if snapshot.progress.total else ""
    return text


def decide(probe: Probe) -> Steps:
    """Which stages have work to do."""
    return Steps(
        send_resident=not probe.resident,
        send_release=probe.release in ("missing", "damaged"),
        stop=running(probe),
    )


def busy(probe: Probe, options: Options, job: str, where: str) -> JobBusy | None:
    """Why a running job is not touched, or None."""
    if not running(probe) or options.replace:
        return None
    return JobBusy(
        f"job {job} runs: {describe(probe.snapshot, probe.now)}",
        where,
        f"look: dflash-ops status {job}; stop it and start anew: dflash-ops deploy {job} --replace --resume",
    )


def refusal(checks: tuple[Check, ...], where: str) -> PreflightError | JobBusy | None:
    """All failing checks as one error; a session name that is taken, and nothing else, is a JobBusy."""
    failed = [c for c in checks if c.status == "failed"]
    if not failed:
        return None
    if all(c.name == "session" for c in failed):
        return JobBusy(failed[0].what, where, failed[0].next)
    return Refused(tuple(PreflightError(f"{c.name}: {c.what}", where, c.next) for c in failed))
