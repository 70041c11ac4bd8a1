"""`redeploy` from outside: a job has crashed, and its release or its resident is not there as it was sent.

The rules here: only where the owner allows it; only the very release that ran (the same id, made again from the source
on this machine); never beside a process that lives or a lease that is held; once for a failure, announced in the
journal of `supervise` first. Whether files are damaged is asked once for each attempt that crashed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_ops.contracts import Action, Diagnosis, EvidenceLine, State, Verdict
from dflash_ops.errors import DflashError
from dflash_ops.inventory import Job
from dflash_ops.resident import journal
from dflash_ops.supervise.decide import decide
from dflash_ops.supervise.ledger import SUPERVISOR, fold, rebuild
from dflash_ops.supervise.notice import held, notice
from dflash_ops.supervise.outside import Inside, Look, Memory
from dflash_ops.supervise.problem import key
from dflash_ops.supervise.situation import Situation
from dflash_ops.tell.outside import announce
from dflash_ops.triage.playbook import Playbooks

KIND = "release_damaged"


@dataclass(frozen=True)
class Found:
    """What lies there. `wrong`: what is damaged or missing, "" where all is whole; `missing`: why it cannot be sent
    again as it was, "" where it can."""

    wrong: str = ""
    missing: str = ""


#: Sends the release again and starts the job: attempt that crashed, id of the decision, reason -> attempt that runs.
Send = Callable[[int, str, str], int]


def wanted(look: Look, memory: Memory, job: Job) -> bool:
    """Whether it is worth asking: a crash that may be repaired so, not asked about yet, and nobody acts there."""
    seen = look.inside
    if look.fault or seen is None or seen.state is not State.CRASHED or seen.lease or job.nodes or job.node is not None:
        return False
    return f"{KIND}:{Action.REDEPLOY.value}" in job.policy.allow and memory.inspected != seen.attempt


def situation(look: Look, seen: Inside, found: Found, job: str, place: str) -> Situation:
    """The evidence as `decide` takes it. `place`: names the job's folder for good."""
    diagnosis = Diagnosis(
        KIND,
        "Files of the release are damaged or missing",
        found.wrong,
        evidence=(EvidenceLine(found.wrong, source="probe", role="cause"),),
        fingerprint=key(KIND, place),
        confidence=1.0,
    )
    return Situation(
        look.t,
        lease=not seen.lease,
        missing=(found.missing,) if found.missing else (),
        side="outside",
        job=job,
        attempt=seen.attempt,
        state=seen.state,
        since=min(seen.t, look.t),
        step=seen.step,
        diagnosis=diagnosis,
    )


def redeploy_pass(
    look: Look, job: Job, playbooks: Playbooks, record: Path, inspect: Callable[[], Found],
    again: Callable[[], Inside | None], send: Send,
) -> list[str] | None:  # fmt: skip
    """Ask, decide, do what may be done, and say what was done; None: its time has not come, ask again.

    Args:
        record: the journal of what was done from outside. inspect: what lies there. again: a look at this very moment.

    Raises:
        OSError, DflashError: it could not be asked, or the journal cannot be written: nothing is done.
    """
    found = inspect()
    if not found.wrong or look.inside is None:
        return []
    now = again()
    if now is None or (now.state, now.attempt) != (look.inside.state, look.inside.attempt):
        return None  # somebody has begun to do something about it
    look = replace(look, t=time.time(), inside=now)
    evidence = situation(look, now, found, job.name, f"{job.host} {job.root}")
    ledger = rebuild(journal.read(record)[0])
    for note in notice(evidence, playbooks, ledger, time.time()):
        ledger = fold(
            ledger, journal.append(record, note.event, actor=SUPERVISOR, attempt=note.attempt, data=note.data)
        )
    decision = decide(evidence, playbooks, ledger, job.policy, time.time())
    if decision.verdict is Verdict.WAIT:
        return None
    if decision.verdict is not Verdict.ACT or decision.action != Action.REDEPLOY.value:
        told = held(decision)
        if told is not None:
            journal.append(record, told.event, actor=SUPERVISOR, attempt=told.attempt, data=told.data)
        return [f"{found.wrong}; nothing is done: {decision.reason}"]
    announce(
        replace(decision, command=f"send the release again to {job.host}, then start attempt {(now.attempt or 0) + 1}"),
        record,
    )
    try:
        attempt = send(decision.attempt or 0, decision.id, f"{found.wrong}; it was sent again")
    except DflashError as error:
        data = {"id": decision.id, "error": str(error)}
        journal.append(record, "action_failed", actor=SUPERVISOR, attempt=decision.attempt, data=data)
        return [f"{found.wrong}; it could not be sent again: {error.what}"]
    done = {"id": decision.id, "attempt": attempt, "detail": found.wrong}
    journal.append(record, "action_done", actor=SUPERVISOR, attempt=decision.attempt, data=done)
    return [f"{found.wrong}; it was sent again, and attempt {attempt} runs"]
