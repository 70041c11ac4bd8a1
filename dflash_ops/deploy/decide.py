"""What a deploy will do, from what is there and what was asked: pure, so that every case is a test."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_ops.contracts import LIVE_STATES, Snapshot, State
from dflash_ops.errors import JobBusy, PreflightError
from dflash_ops.inventory import Job
from dflash_ops.resident.preflight import Check
from dflash_ops.resident.probe import Probe

#: Seconds of difference between the clocks of two machines that are worth a word.
CLOCK_S = 5.0


@dataclass(frozen=True)
class Options:
    """What the operator asked for.

    Args:
        plan: say what would happen, touch nothing.
        replace: a running attempt may be stopped (TERM, then KILL after `grace_s`).
        begin: what to do with checkpoints that are there: `resume`, `fresh`, or empty (refuse).
        grace_s: seconds between TERM and KILL; None = the job's.
        gate: try the release beside the running job first; None = where a job is replaced or its topology changes.
        watch_s: seconds of the watch window; None = the job's.
        rollback: go back to what ran before if the new attempt crashes in the window.
        playbooks: the inventory's own kinds, as JSON for the resident.
    """

    plan: bool = False
    replace: bool = False
    begin: str = ""
    reason: str = ""
    actor: str = "operator"
    grace_s: float | None = None
    gate: bool | None = None
    watch_s: float | None = None
    rollback: bool = True
    playbooks: str = ""

    def grace(self, job: Job) -> float:
        """Seconds between TERM and KILL; 0 is KILL at once."""
        return job.grace_s if self.grace_s is None else self.grace_s


@dataclass(frozen=True)
class Steps:
    send_resident: bool
    send_release: bool
    make_venv: bool
    gate: bool
    stop: bool
    aside: bool

    @property
    def execs(self) -> int:
        """Commands that are run on the machine: connect (which takes what is sent), preflight, start and watch, and one
        for each of these.
        """
        return 4 + sum((self.make_venv, self.gate, self.stop, self.aside))


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


def decide(
    probe: Probe, options: Options | None = None, topology: tuple[int, int] | None = None, *, can_gate: bool = False
) -> Steps:
    """Which stages have work to do.

    Args:
        topology: targets and drafters, None for a job with its own command. can_gate: there is a way to try it.
    """
    options = options or Options()
    stop = running(probe)
    changed = topology is not None and probe.topology is not None and topology != probe.topology
    gate = (stop or changed) if options.gate is None else options.gate
    return Steps(
        send_resident=not probe.resident,
        send_release=probe.release in ("missing", "damaged"),
        make_venv=bool(probe.venv) and not probe.venv.get("there"),
        gate=gate and can_gate,
        stop=stop,
        aside=options.begin == "fresh",
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


def clock(there: float, before: float, after: float) -> Check:
    """That machine's clock, which was read between two looks at ours."""
    offset = there - before if there < before else max(0.0, there - after)
    text = f"{abs(offset):.0f} s {'behind' if offset < 0 else 'ahead'}"
    if abs(offset) <= CLOCK_S:
        return Check("clock", "ok", "its clock is ours")
    return Check(
        "clock",
        "warn",
        f"its clock is {text}",
        "times in logs and journal are that machine's; let the (Proxmox) host keep time: chrony or systemd-timesyncd",
    )


def worth_going_back(before: Snapshot | None) -> bool:
    """Whether the attempt before is one to go back to: it ran, or was stopped after it had made steps."""
    if before is None or before.attempt is None:
        return False
    if before.state in LIVE_STATES:
        return True
    return before.state is State.STOPPED and before.progress is not None and before.progress.step is not None
