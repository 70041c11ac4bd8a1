"""`triage --job J --what-if`: what the supervisor would do now, decided here from what the machine says."""

from __future__ import annotations

from dataclasses import replace

from dflash_ops.client import JobClient
from dflash_ops.collect.job import Examined, folders
from dflash_ops.contracts import LIVE_STATES, Action, Decision, Event, Ledger, Snapshot, State, from_dict
from dflash_ops.errors import ContractError
from dflash_ops.inventory import Inventory, Job
from dflash_ops.inventory.remedies import remedy_table
from dflash_ops.playbooks import load_documents
from dflash_ops.supervise.decide import decide
from dflash_ops.supervise.ledger import by_supervisor, rebuild
from dflash_ops.supervise.notice import notice
from dflash_ops.supervise.situation import CheckpointSeen, Situation
from dflash_ops.triage import compile_playbooks

#: Seconds for verifying checkpoints: every file of them is read.
VERIFY_S = 600.0


def what_if(
    client: JobClient, inventory: Inventory, seen: Examined, playbooks: tuple[str, ...] = ()
) -> tuple[Decision, ...]:
    """The decision for the newest attempt; of a hang also the one after the stacks.

    The lease is taken for ours: the question is what would be done by whoever holds it.

    Raises:
        HostError, DflashError: the machine cannot be asked, or what it says is not understood.
    """
    job = client.job
    looked = client.snapshot()
    events = _journal(client)
    situation = _situation(job, looked.snapshot, looked.now, seen, events, _checkpoints(client, seen))
    books = compile_playbooks(load_documents([*folders(inventory), *playbooks]))
    ledger = rebuild(events)
    for note in notice(situation, books, ledger, looked.now):
        # What the supervisor would write down first; here it is only thought of.
        event = Event(ledger.seq + 1, looked.now, note.event, "supervisor", note.attempt, note.data)
        ledger = rebuild([event], ledger)
    first = decide(situation, books, ledger, job.policy, looked.now)
    if first.action != Action.DUMP_STACKS.value:
        return (first,)
    then = replace(situation, stacks_failed="not asked: this only asks what would be done")
    return first, decide(then, books, _dumped(ledger, situation), job.policy, looked.now)


def _dumped(ledger: Ledger, situation: Situation) -> Ledger:
    return ledger if situation.attempt is None else replace(ledger, dumped=(*ledger.dumped, situation.attempt))


def _journal(client: JobClient) -> list[Event]:
    said = client.ask("journal", "--json")
    events = said.get("events")
    if not isinstance(events, list):
        raise ContractError("the journal came without events", client.host.name, "deploy the resident anew")
    return [from_dict(Event, e, "journal.jsonl") for e in events]


def _checkpoints(client: JobClient, seen: Examined) -> tuple[CheckpointSeen, ...]:
    """Verified only where the answer matters: reading them all takes long."""
    matters = any(r.action in ("resume_earlier", "resume_latest", "fresh_start_aside") for r in seen.diagnosis.remedies)
    if not matters or seen.alive:
        return ()
    said = client.ask("checkpoints", "verify", deadline=VERIFY_S)
    there = said.get("checkpoints") or ()
    return tuple(CheckpointSeen(int(c["step"]), str(c["path"]), c.get("verified")) for c in there)


def _situation(
    job: Job,
    snapshot: Snapshot,
    now: float,
    seen: Examined,
    events: list[Event],
    checkpoints: tuple[CheckpointSeen, ...],
) -> Situation:
    # As a person last started it: what the supervisor added since stands in the ledger's layers.
    started = [e for e in events if e.event == "attempt_started" and not by_supervisor(e.actor)]
    argv = started[-1].data.get("argv") if started else None
    crashed = snapshot.state is State.CRASHED
    end = snapshot.exit
    return Situation(
        t=now,
        lease=True,
        missing=() if seen.attempt == snapshot.attempt else ("the newest attempt's texts (a new one began meanwhile)",),
        job=job.name,
        attempt=snapshot.attempt,
        state=snapshot.state,
        since=min(snapshot.since, now),
        started=snapshot.started,
        step=snapshot.progress.step if snapshot.progress is not None else None,
        rc=end.rc if end is not None else None,
        signal=end.signal if end is not None else None,
        requested=(end.requested or "") if end is not None else "",
        diagnosis=seen.diagnosis if crashed or snapshot.state in LIVE_STATES else None,
        checkpoints=checkpoints,
        table=remedy_table(job),
        argv=tuple(map(str, argv)) if isinstance(argv, list) else (),
        adopted=job.adopted,
    )
