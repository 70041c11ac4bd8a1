"""What the evidence adds to the journal before anything is decided: diagnosed, progress, what became of an action.

The rule here: each is said once. `notice` compares evidence and ledger; what it gives is written down and folded, and
then it gives nothing more for the same evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_ops.contracts import LIVE_STATES, Case, Decision, Ledger, Outcome, State, Verdict, to_dict
from dflash_ops.supervise.decide import PENDING_S, told_key
from dflash_ops.supervise.gates import closed
from dflash_ops.supervise.ledger import passed
from dflash_ops.supervise.problem import NAN, Problem, own_problem, passing
from dflash_ops.supervise.situation import Situation
from dflash_ops.triage.playbook import Playbooks

#: Seconds for which a finding that was told is not told again.
FINDING_S = 3600.0


@dataclass(frozen=True)
class Note:
    """An event to be written: its name, the attempt that it is about, its data."""

    event: str
    attempt: int | None
    data: dict[str, Any] = field(default_factory=dict)


def notice(evidence: Situation, playbooks: Playbooks, ledger: Ledger, now: float) -> tuple[Note, ...]:
    """Events to write down, in order. Pure; nothing on evidence that nothing may be decided on."""
    # A stop or a lost lease forbids acting, not noticing; stale and partial evidence forbids both.
    if evidence.missing or not abs(now - evidence.t) <= 60.0 or evidence.attempt is None:
        return ()
    notes: list[Note] = []
    notes += _progress(evidence, ledger)
    proven = any(note.event == "action_outcome" for note in notes)
    problem = own_problem(evidence)
    ready = evidence.state not in LIVE_STATES or evidence.stacks is not None or bool(evidence.stacks_failed)
    if problem is not None and ready and closed(evidence, ledger, now) is None:
        case = ledger.cases.get(problem.fingerprint)
        if case is None or evidence.attempt not in case.attempts:
            notes.append(_diagnosed(problem, evidence))
            if not proven:
                notes += _outcome(problem, case, evidence, playbooks, ledger)
    notes += _lost(evidence, ledger, now)
    for finding in evidence.findings:
        last = ledger.told.get(finding.key)
        if last is None or now - last > FINDING_S:
            notes.append(Note("finding", evidence.attempt, to_dict(finding)))
    return tuple(notes)


def held(decision: Decision) -> Note | None:
    """The event that says that a person was told: `held` where nothing is left, `proposed` what would be done.

    None for other decisions, and for what was told already.
    """
    if decision.verdict not in (Verdict.HOLD, Verdict.PROPOSE) or not decision.notify:
        return None
    data = {
        "key": told_key(decision),
        "fingerprint": decision.fingerprint,
        "kind": decision.kind,
        "reason": decision.reason,
        "text": decision.command,
    }
    if decision.verdict is Verdict.PROPOSE:
        return Note("proposed", decision.attempt, {**data, "id": decision.id, "action": decision.action})
    # Only where nothing is left; what waits for its budget takes its layers back with its start.
    return Note("held", decision.attempt, {**data, "drop": [] if decision.action else list(decision.drop)})


def _diagnosed(problem: Problem, s: Situation) -> Note:
    diagnosis = problem.diagnosis
    return Note(
        "diagnosed",
        s.attempt,
        {
            "kind": problem.kind,
            "title": problem.title,
            "fingerprint": problem.fingerprint,
            "entity": problem.entity,
            "step": problem.step,
            "root_exception": diagnosis.root_exception if diagnosis is not None else None,
            "confidence": diagnosis.confidence if diagnosis is not None else None,
        },
    )


def _outcome(
    problem: Problem, case: Case | None, s: Situation, playbooks: Playbooks, ledger: Ledger
) -> tuple[Note, ...]:
    """What this failure says of the action that waits for its proof."""
    found = ledger.find(ledger.awaiting)
    if found is None or found[1].started != s.attempt:
        return ()
    before, tried = found
    if before.fingerprint == problem.fingerprint:
        outcome, detail = Outcome.USELESS, f"the same failure again ({problem.kind})"
    elif tried.layer is not None and not passing(problem, playbooks):
        outcome, detail = Outcome.WORSE, f"it brought another failure: {problem.kind}"
    else:
        outcome, detail = Outcome.CHANGED, f"another failure came: {problem.kind}"
    data = {"id": tried.id, "outcome": outcome.value, "fingerprint": problem.fingerprint, "detail": detail}
    return (Note("action_outcome", s.attempt, data),)


def _progress(s: Situation, ledger: Ledger) -> tuple[Note, ...]:
    """A step that lies beyond one at which it had failed, or, after starts of ours, beyond all before.

    Also of an attempt that has crashed since: nobody may have looked between its progress and its end.
    """
    if s.step is None or s.state not in (*LIVE_STATES, State.CRASHED) or s.attempt is None:
        return ()
    if s.nan or any(f.name == NAN for f in s.findings):
        return ()  # steps of a run that has lost its loss prove nothing
    notes: list[Note] = []
    step = s.step
    open_ids = (ledger.pending, ledger.awaiting)
    open_cases = any(
        passed(case, s.attempt, step) and any(t.id not in open_ids for t in case.tried)
        for case in ledger.cases.values()
    )
    beyond = bool(ledger.idle_starts) and (ledger.mark is None or step > ledger.mark)
    found = ledger.find(ledger.awaiting)
    proven = (
        found is not None
        and found[1].started == s.attempt
        and (found[1].past_step is None or step > found[1].past_step)
    )
    if open_cases or beyond or proven:
        notes.append(Note("progress", s.attempt, {"step": step}))
    if proven and found is not None:
        data = {"id": found[1].id, "outcome": Outcome.VERIFIED.value, "fingerprint": None, "detail": f"step {step}"}
        # Said before the progress that forgives it: what is forgiven is not found any more.
        notes.insert(0, Note("action_outcome", s.attempt, data))
    return tuple(notes)


def _lost(s: Situation, ledger: Ledger, now: float) -> tuple[Note, ...]:
    """An action that was announced and never heard of again."""
    found = ledger.find(ledger.pending)
    if found is None or now - found[1].t <= PENDING_S:
        return ()
    data = {
        "id": found[1].id,
        "outcome": Outcome.INTERRUPTED.value,
        "fingerprint": None,
        "detail": "never heard of again",
    }
    return (Note("action_outcome", found[1].attempt, data),)
