"""Everything that a decision may look at, gathered on this machine at one moment (`supervise.Situation`).

The rules here: what could not be read is named in `missing`, and then nothing is decided on the rest; texts are judged
only for an attempt that crashed or hangs; checkpoints are verified from the newest down to the first whole one, no
further.
"""

from __future__ import annotations

import math
import re
import resource
import time
from collections.abc import Sequence

from dflash_ops.contracts import Diagnosis, Finding, JobSpec, Layout, Ledger, RemedyTable, Snapshot, State
from dflash_ops.contracts.evidence import Evidence
from dflash_ops.errors import DflashError
from dflash_ops.resident import attempts, checkpoints, evidence, proc, releases, spec
from dflash_ops.resident.aside import folder_of
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.lease import TTL_S
from dflash_ops.supervise.ledger import by_supervisor
from dflash_ops.supervise.problem import NAN
from dflash_ops.supervise.situation import CheckpointSeen, Situation
from dflash_ops.supervise.stacks import odd
from dflash_ops.triage import Triage
from dflash_ops.triage.attempt import diagnose_attempt

#: States of which the texts are judged.
JUDGED = frozenset({State.CRASHED, State.HUNG})
_RESUMED = re.compile(rb"event=resumed step=(\d+)")
_DEVICE = re.compile(r"\b(?:cuda:|GPU |device )(\d+)\b")
_WORKER = re.compile(r"(target|drafter)(\d+)")


def gather(
    layout: Layout, snapshot: Snapshot, ledger: Ledger, triage: Triage, findings: Sequence[Finding] = ()
) -> Situation:
    """The situation, as of this moment.

    Args:
        snapshot: of this moment. ledger: says whether stacks were asked for. findings: of the loop's detectors.

    Raises:
        OSError: the run folder itself cannot be read.
    """
    now = time.time()
    last = attempts.last(layout)
    if last is None or snapshot.attempt != last.number:
        return Situation(now, job=snapshot.job, state=snapshot.state, since=snapshot.since)
    state = snapshot.state
    if state is State.STOPPED and last.stop is not None and by_supervisor(last.stop.actor):
        # The supervisor ended it and was killed before it started it again: for a decision it is down, not at rest.
        state = State.CRASHED
    judged = state in JUDGED
    texts, missing = _texts(layout, last) if judged else (None, list(last.damaged))
    diagnosis = None
    if texts is not None and last.spec is not None and not missing:
        diagnosis = diagnose_attempt(triage, texts, finished_rc=last.spec.finished_rc, progress=last.spec.progress)
    # A living run that has lost its loss is to go back too.
    looked_into = judged or any(f.name == NAN for f in findings)
    found, fault = _checkpoints(layout, _good_until(findings)) if looked_into else ((), "")
    missing += [fault] if fault else []
    stacks, failed = _stacks(last, ledger) if looked_into else (None, "")
    different = odd(stacks) if stacks is not None else None
    job, base = last.spec, persons_job(layout)
    return Situation(
        t=time.time(),
        lease=True,
        lease_expires=now + TTL_S,
        missing=tuple(missing),
        job=snapshot.job,
        attempt=last.number,
        state=state,
        since=snapshot.since,
        started=snapshot.started,
        step=snapshot.progress.step if snapshot.progress is not None else None,
        resumed_step=_resumed(texts),
        rc=snapshot.exit.rc if snapshot.exit is not None else None,
        signal=snapshot.exit.signal if snapshot.exit is not None else None,
        requested=_requested(last),
        diagnosis=diagnosis,
        findings=tuple(findings),
        stacks=stacks,
        odd=different.worker if different is not None else None,
        stacks_failed=failed,
        left=_left(last),
        rebooted=last.rebooted,
        cut=last.start is None and last.exit is None,
        checkpoints=found,
        table=job.remedies if job is not None else RemedyTable(),
        argv=base.argv if base is not None else (),
        device=_device(last, diagnosis, snapshot),
        previous_release=_previous(layout),
        nofile=_nofile(last),
        nan=_is_nan(snapshot),
    )


def persons_job(layout: Layout, release: str | None = None) -> JobSpec | None:
    """The job as a person last started it (with this release): without any change of the supervisor's."""
    for number in reversed(attempts.numbers(layout)):
        job = attempts.read(layout, number).spec
        if job is not None and not by_supervisor(job.actor) and release in (None, job.release):
            return job
    return None


def _texts(layout: Layout, last: Attempt) -> tuple[Evidence | None, list[str]]:
    """The attempt's texts, and those without which nothing may be decided."""
    try:
        found = evidence.gather(layout, last.number, gpu=last.spec is None or spec.on_gpus(last.spec))
    except DflashError as error:
        return None, [error.what]
    # No exit.json where nobody lived to write it: that is what happened, not something that could not be read.
    needed = ("log", "error_json")
    faults = [
        f"{p.name} ({p.note})"
        for p in found.parts
        if p.status == "missing" and p.kind in needed and p.note != "no such file"
    ]
    return found, [*last.damaged, *faults]


def _requested(last: Attempt) -> str:
    """Who asked for the end, if it was a person or the system and not the supervisor itself."""
    if last.stop is not None:
        return "" if by_supervisor(last.stop.actor) else "stop"
    return last.exit.requested or "" if last.exit is not None else ""


def _resumed(texts: Evidence | None) -> int | None:
    log = texts.part("log") if texts is not None else None
    found = _RESUMED.findall(log.data) if log is not None else []
    return int(found[-1]) if found else None


def _is_nan(snapshot: Snapshot) -> bool:
    loss = snapshot.progress.loss if snapshot.progress is not None else None
    return loss is not None and not math.isfinite(loss)


def _good_until(findings: Sequence[Finding]) -> float:
    """The newest step whose checkpoint may be gone back to, as far as the loss tells."""
    return min((f.numbers.get("last_good_step", math.inf) for f in findings if f.name == NAN), default=math.inf)


def _checkpoints(layout: Layout, until: float) -> tuple[tuple[CheckpointSeen, ...], str]:
    """All of them, newest first; verified from step `until` on down to the first that is whole."""
    folder = folder_of(layout)
    try:
        found = checkpoints.down_to_whole(folder, layout, until)
        return tuple(CheckpointSeen(one.step, str(one.path), one.verified) for one in found), ""
    except (OSError, DflashError) as error:
        return (), f"checkpoints ({error})"


def _stacks(last: Attempt, ledger: Ledger) -> tuple[str | None, str]:
    """The newest dump of this attempt; where none came although it was asked for, why."""
    folder = last.layout.path / "evidence"
    files = sorted(folder.glob("stacks-*.txt"), key=lambda p: p.stat().st_mtime) if folder.is_dir() else []
    if files:
        return files[-1].read_text("utf-8", "replace"), ""
    asked = last.number in ledger.dumped and ledger.pending is None
    return None, "the dump that was asked for is not there" if asked else ""


def _left(last: Attempt) -> tuple[int, ...]:
    if last.start is None or last.rebooted or last.launcher_alive:
        return ()
    return tuple(sorted(p.pid for p in proc.family(last.start.launcher)))


def _device(last: Attempt, diagnosis: Diagnosis | None, snapshot: Snapshot) -> str:
    """The device that the failure names, or that of the worker that failed first."""
    if diagnosis is None or last.spec is None:
        return ""
    named = _DEVICE.search(" ".join(filter(None, (diagnosis.entity, diagnosis.root_exception))))
    if named is not None:
        return f"cuda:{named[1]}"
    worker = _WORKER.match(snapshot.error.worker) if snapshot.error is not None else None
    if worker is None:
        return ""
    devices = last.spec.remedies.values.get(f"workers.{worker[1]}_devices")
    rank = int(worker[2])
    return str(devices[rank]) if isinstance(devices, (list, tuple)) and rank < len(devices) else ""


def _previous(layout: Layout) -> str | None:
    try:
        found = releases.listing(layout)["previous"]
    except (OSError, DflashError):
        return None  # then going back is not offered; nothing else depends on it
    return str(found) if found else None


def _nofile(last: Attempt) -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = last.spec.nofile if last.spec is not None else None
    return max(soft, raised or 0), hard
