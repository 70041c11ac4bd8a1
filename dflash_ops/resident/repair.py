"""`repair`: one pass of the supervisor: gather, notice, decide, and carry out what was decided.

Started by the loop when something happened, as a process of its own: judging megabytes of log must not hold up the
snapshot of every second, and a fault in here ends a pass and not the watch. Whoever holds the lease acts; everything is
announced in the journal first, so a pass that was killed is finished by the next one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_ops.contracts import (
    LIVE_STATES,
    Action,
    Decision,
    Finding,
    Layout,
    Ledger,
    Outcome,
    Policy,
    Snapshot,
    State,
    Verdict,
    from_dict,
    to_dict,
)
from dflash_ops.errors import ContractError, DflashError, JobBusy
from dflash_ops.resident import attempts, daemon, journal, lease, playbooks
from dflash_ops.resident.answer import say
from dflash_ops.resident.effects import ResidentEffects
from dflash_ops.resident.files import write_atomic
from dflash_ops.resident.situation import gather
from dflash_ops.resident.tmux import clean_environment
from dflash_ops.resident.watch import Watcher
from dflash_ops.supervise.act import carry_out, say_held
from dflash_ops.supervise.decide import PENDING_S, decide
from dflash_ops.supervise.gates import closed
from dflash_ops.supervise.ledger import SUPERVISOR, by_supervisor, rebuild
from dflash_ops.supervise.notice import notice
from dflash_ops.triage import Triage

#: Rounds of noticing and deciding in one pass: stacks, then the diagnosis, then the action.
ROUNDS = 8


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="repair", description='{"secrets": {...}, "findings": [...]} on standard input'
    )
    parser.add_argument("--root", required=True, type=Path)
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    raw = sys.stdin.buffer.read()
    given = json.loads(raw) if raw.strip() else {}
    clean_environment()
    findings = [from_dict(Finding, f, "findings") for f in given.get("findings", ())]
    try:
        passed = one_pass(layout, dict(given.get("secrets") or {}), findings, _to_log, str(given.get("state", "")))
    except DflashError as error:
        _to_log(f"a pass of the supervisor failed: {error}")
        raise
    say({"schema": 1, "decision": to_dict(passed)})
    return 0


def _to_log(text: str) -> None:
    print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text.replace("\n", "; "), file=sys.stderr, flush=True)


def one_pass(
    layout: Layout,
    secrets: Mapping[str, str],
    findings: Sequence[Finding],
    tell: Callable[[str], None],
    state: str = "",
) -> Decision:
    """Until nothing more is to be done now; what was decided last, also in run/repair.json.

    Raises:
        JobBusy: another supervisor holds the lease.
        DflashError, OSError: the journal or the run folder cannot be read or written; nothing was done.
    """
    held = lease.take(layout, f"{SUPERVISOR} of the resident")
    if held is None:
        raise JobBusy("another supervisor holds the lease", str(layout.lease), "it acts; this one only watches")
    try:
        effects = ResidentEffects(layout, held, secrets, tell)
        triage, policy = _judge(layout)
        decision = Decision(Verdict.NONE, "nothing was looked at")
        hung: Snapshot | None = None
        for _ in range(ROUNDS):
            snapshot = _look(layout, hung)
            decision, more = _round(layout, effects, triage, policy, findings, snapshot)
            if not more:
                break
            hung = snapshot if snapshot.state is State.HUNG else None
        _remember(layout, decision, state)
        return decision
    finally:
        held.release()


def _judge(layout: Layout) -> tuple[Triage, Policy]:
    last = attempts.last(layout)
    policy = last.spec.policy if last is not None and last.spec is not None else Policy()
    return playbooks.triage(last), policy


def _look(layout: Layout, hung: Snapshot | None = None) -> Snapshot:
    """The job now: the loop's own look where it is fresh, since only who watched all the time knows of a silence.

    Args:
        hung: the look before. Asking for stacks makes a trainer write, which is no sign of life: it hangs on until a
        step comes.
    """
    now = daemon.fresh_snapshot(layout) or Watcher(layout, daemon.last_snapshot(layout)).look(None)
    if hung is None or now.attempt != hung.attempt or now.state not in LIVE_STATES:
        return now
    moved = (now.progress.step if now.progress else None) != (hung.progress.step if hung.progress else None)
    return now if moved else replace(now, state=State.HUNG, since=hung.since, detail=hung.detail)


def _round(
    layout: Layout,
    effects: ResidentEffects,
    triage: Triage,
    policy: Policy,
    findings: Sequence[Finding],
    snapshot: Snapshot,
) -> tuple[Decision, bool]:
    """One decision over one look, and its deed. Whether to look again at once."""
    events = journal.read(layout.journal)[0]
    ledger = rebuild(events)
    begun = _begun(events, ledger, snapshot, layout)
    situation = gather(layout, snapshot, ledger, triage, findings)
    if begun is not None and closed(situation, ledger, time.time()) is None:
        return begun, _do(begun, effects, ledger)
    notes = notice(situation, triage.playbooks, ledger, time.time())
    for note in notes:
        effects.journal(note.event, note.data, note.attempt)
    if notes:
        ledger = rebuild(journal.read(layout.journal)[0])
    decision = decide(situation, triage.playbooks, ledger, policy, time.time(), random.random)
    if decision.verdict is not Verdict.ACT:
        say_held(decision, effects, ledger)
        return decision, False
    return decision, _do(decision, effects, ledger)


def _do(decision: Decision, effects: ResidentEffects, ledger: Ledger) -> bool:
    """Carry it out and tell a person. Whether to look again at once."""
    done = carry_out(decision, effects, ledger)
    if done.error:
        effects.tell(f"{decision.action} could not be done", done.error, decision.fingerprint)
        return True
    if decision.starts:
        effects.tell(decision.title or decision.kind, f"{decision.action}: {decision.reason}", decision.fingerprint)
    return decision.action == Action.DUMP_STACKS.value


def _begun(events: Sequence[Any], ledger: Ledger, snapshot: Snapshot, layout: Layout) -> Decision | None:
    """An action that was announced, whose attempt was ended by us, and whose start never came: to be finished as it
    was announced. (Where the attempt still lives or had crashed by itself, the same decision comes out anew.)"""
    found = ledger.find(ledger.pending)
    last = attempts.last(layout)
    if found is None or last is None or last.stop is None or not by_supervisor(last.stop.actor):
        return None
    tried = found[1]
    if tried.outcome is not Outcome.INTENDED or tried.attempt != last.number or snapshot.state is State.FINISHED:
        return None
    if time.time() - tried.t > PENDING_S or last.launcher_alive:
        return None
    for event in reversed(events):
        said = event.data.get("decision") if event.event == "action_intended" else None
        if isinstance(said, dict) and said.get("id") == tried.id:
            try:
                return replace(from_dict(Decision, said, "journal.jsonl"), resumes=True)
            except ContractError:
                return None  # of another version: it is decided anew
    return None


def _remember(layout: Layout, decision: Decision, state: str) -> None:
    """run/repair.json: what the loop asks before it starts a pass again."""
    ledger = rebuild(journal.read(layout.journal)[0])
    found = ledger.find(ledger.awaiting)
    waits = {"attempt": found[1].started, "past_step": found[1].past_step} if found is not None else None
    last = attempts.last(layout)
    said = {
        "schema": 1,
        "t": time.time(),
        "attempt": decision.attempt if decision.attempt is not None else last.number if last is not None else None,
        "state": state,
        "final": ledger.stopped,
        "verdict": decision.verdict.value,
        "action": decision.action,
        "reason": decision.reason,
        "kind": decision.kind,
        "fingerprint": decision.fingerprint,
        "not_before": decision.not_before,
        "awaiting": waits,
    }
    write_atomic(layout.run / "repair.json", json.dumps(said, ensure_ascii=False).encode() + b"\n")
