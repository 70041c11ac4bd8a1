"""What is done from outside: wait for a lock, start a stopped container where the owner allows it, tell a person.

The rules here are the laws of the inside, through the same `decide`: an action is announced in a journal first, counts
whether it was done or not, and is done on evidence of this very moment only. What runs in the container is not ours to
end or start: once it is up, its own supervisor is asked, which goes on by the job's policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dflash_ops.contracts import LIVE_STATES, Action, Decision, Ledger, Outcome, Verdict, to_dict
from dflash_ops.errors import ContainerLocked, DflashError
from dflash_ops.hosts.base import Completed, Host
from dflash_ops.hosts.lxc import CLEAN
from dflash_ops.hosts.pct import error_of, first_line, status_of
from dflash_ops.inventory import Job
from dflash_ops.resident import journal
from dflash_ops.supervise.decide import decide
from dflash_ops.supervise.ledger import SUPERVISOR, fold, rebuild
from dflash_ops.supervise.notice import held, notice
from dflash_ops.supervise.outside import LOCKED, STOPPED, Look, Memory, situation
from dflash_ops.triage.playbook import Playbooks

#: Seconds for `pct status`, for `pct start`, and until the container answers after it.
STATUS_S = 20.0
START_S = 120.0
UP_S = 60.0


class Container:
    """A container and the host that has `pct`."""

    def __init__(self, via: Host, id: int) -> None:
        self._via = via
        self.id = id

    @property
    def name(self) -> str:
        return f"{self._via.name} {self.id}"

    @property
    def via(self) -> str:
        return self._via.name

    @property
    def command(self) -> str:
        return f"pct start {self.id} (on {self._via.name})"

    def _pct(self, word: str, seconds: float) -> Completed:
        return self._via.run(["env", "-i", *CLEAN, "pct", word, str(self.id)], deadline=seconds)

    def start(self) -> str | None:
        """Start it if it is stopped at this moment; why not, None where it was started.

        Raises:
            ContainerLocked: another task has just taken it. HostError: the Proxmox host cannot be asked.
        """
        asked = self._pct("status", STATUS_S)
        status = status_of(asked.text)
        if status is None:
            said = first_line(asked.error_text) or first_line(asked.text)
            return f"pct status ended with {asked.rc}" + (f": {said}" if said else "")
        if status != "stopped":
            return f"pct says that it is {status}, not stopped"
        done = self._pct("start", START_S)
        said = (done.error_text.strip() or done.text.strip())[:300]
        locked = error_of(done.error_text, done.rc, self.id, self._via.name) if done.rc else None
        if isinstance(locked, ContainerLocked):
            raise locked
        return None if done.rc == 0 else f"pct start ended with {done.rc}: {said}"


def outside_pass(
    look: Look, memory: Memory, job: Job, container: Container | None, playbooks: Playbooks, record: Path,
    ask: Callable[[], object],
) -> list[str]:  # fmt: skip
    """Decide over one look, do what may be done, and say what was done.

    Args:
        memory: after this look. record: the journal of what was done from outside (docs/supervise.md).
        ask: asks the resident in the container once, which brings it up.

    Raises:
        OSError, DflashError: the journal cannot be written; nothing is done.
    """
    progress(look, record)
    freed = _freed(look, record)
    if not look.fault or container is None:
        return freed
    evidence = situation(look, memory, job.name, container.name)
    ledger = rebuild(journal.read(record)[0])
    if look.fault == LOCKED and _waits(ledger):
        return []  # said once; a start that was announced before the lock came is finished after it
    for note in notice(evidence, playbooks, ledger, time.time()):
        said = journal.append(record, note.event, actor=SUPERVISOR, attempt=note.attempt, data=note.data)
        ledger = fold(ledger, said)
    decision = decide(evidence, playbooks, ledger, job.policy, time.time())
    if decision.verdict is Verdict.ACT and decision.action == Action.WAIT_LOCK.value:
        decision = replace(decision, command=f"pct config {container.id} (on {container.via}), again and again")
        announce(decision, record)
        return ["it waits until the other task lets the container go: the lock is not broken"]
    if decision.verdict is not Verdict.ACT or decision.action != Action.START_CONTAINER.value:
        told = held(decision)
        if told is None:
            # A gate is closed: said where the condition begins.
            new = look.fault in (STOPPED, LOCKED) and memory.since.get(look.fault) == look.t
            why = [f"nothing is done: {decision.reason}"] if new and decision.verdict is Verdict.NONE else []
            return [*freed, *why]
        journal.append(record, told.event, actor=SUPERVISOR, attempt=told.attempt, data=told.data)
        return [*freed, f"nothing is done: {decision.reason}"]
    return [*freed, *_start(replace(decision, command=container.command), container, record, ask)]


def _waits(ledger: Ledger) -> bool:
    """Whether something that was announced waits for the lock's end."""
    found = ledger.find(ledger.pending)
    return found is not None and found[1].outcome is Outcome.INTENDED


def _freed(look: Look, record: Path) -> list[str]:
    """The lock that was waited for is gone (or the container runs): written down, and said."""
    if look.fault not in ("", STOPPED) or not record.exists():
        return []
    ledger = rebuild(journal.read(record)[0])
    found = ledger.find(ledger.pending)
    if found is None or found[1].action != Action.WAIT_LOCK.value or not _waits(ledger):
        return []
    text = f"the other task has let the container go, after {max(0.0, look.t - found[1].t):.0f} s"
    done: dict[str, str | None] = {"id": found[1].id, "attempt": None, "detail": text}
    journal.append(record, "action_done", actor=SUPERVISOR, attempt=found[1].attempt, data=done)
    return [text]


def announce(decision: Decision, record: Path) -> None:
    """It counts from here on, done or not; one that is only finished was announced before."""
    if not decision.resumes:
        data = {"decision": to_dict(decision)}
        journal.append(record, "action_intended", actor=SUPERVISOR, attempt=decision.attempt, data=data)


def _start(decision: Decision, container: Container, record: Path, ask: Callable[[], object]) -> list[str]:
    announce(decision, record)
    try:
        failed = container.start()
    except ContainerLocked as error:  # since the look: it stays announced, and is tried again at the next ones
        return [] if decision.resumes else [f"the container is not started yet: {error.what}"]
    except DflashError as error:
        failed = str(error)
    if failed is not None:
        data = {"id": decision.id, "error": failed}
        journal.append(record, "action_failed", actor=SUPERVISOR, attempt=decision.attempt, data=data)
        return [f"the container could not be started: {failed}"]
    done: dict[str, str | None] = {"id": decision.id, "attempt": None, "detail": container.command}
    journal.append(record, "action_done", actor=SUPERVISOR, attempt=decision.attempt, data=done)
    said = [f"the container was started: {container.command}"]
    end = time.monotonic() + UP_S
    while True:
        try:
            ask()
            return said
        except DflashError as error:
            if time.monotonic() > end:
                return [*said, f"the supervisor in it does not answer: {error.what}"]
        time.sleep(1.0)


def progress(look: Look, record: Path) -> None:
    """A step beyond the failure, of a later attempt, forgives what was done for it."""
    seen = look.inside
    if seen is None or seen.step is None or seen.state not in LIVE_STATES or not record.exists():
        return
    ledger = rebuild(journal.read(record)[0])
    for case in ledger.cases.values():
        done = [t for t in case.tried if t.outcome is Outcome.DONE]
        later = all(seen.attempt is not None and seen.attempt > a for a in case.attempts)
        if done and later and (case.step is None or seen.step > case.step):
            data = {"id": done[-1].id, "outcome": "verified", "fingerprint": None, "detail": f"step {seen.step}"}
            journal.append(record, "action_outcome", actor=SUPERVISOR, attempt=seen.attempt, data=data)
            journal.append(record, "progress", actor=SUPERVISOR, attempt=seen.attempt, data={"step": seen.step})
            return


def message(job: str, texts: Sequence[str]) -> tuple[str, str]:
    """Title and text of a notification."""
    head = texts[0].split(": ", 1)[0]
    return f"{job}: {head}"[:200], "\n".join(texts)
