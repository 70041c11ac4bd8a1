"""From the evidence to the one thing that is wrong, and the steps that its ladder has for it.

The rules here: a ladder's grades are the playbook's, never better than the action's own; a step that the playbook does
not list for this kind needs the owner's word (grade B at least); a condition in words that no code knows needs it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dflash_ops.contracts import (
    RULES,
    Action,
    Diagnosis,
    EvidenceLine,
    Ledger,
    Outcome,
    Policy,
    Remedy,
    State,
    worse_grade,
)
from dflash_ops.supervise.detect import gpu
from dflash_ops.supervise.situation import Situation
from dflash_ops.supervise.stacks import odd, parse
from dflash_ops.triage.playbook import Playbooks
from dflash_ops.triage.predicates import PREDICATES

HANG = "hang_stack_dump"
#: An end of which nobody wrote anything down: everything was killed at once, or the machine went away.
NO_RECORD = "pane_dead_nostatus"
REBOOTED = "host_rebooted"
NAN = "nan_loss"
#: Verdicts of triage that name no cause: a hang is then judged by where it stands.
_NO_CAUSE = frozenset({"healthy", "root_cause_not_shown", "unrecognised_error"})
#: First steps of kinds that come from outside and pass: a config change of ours is not to blame for them.
_PASSING = frozenset(
    {
        Action.RESTART,
        Action.WAIT_MEMORY,
        Action.WAIT_DISK,
        Action.WAIT_NETWORK,
        Action.WAIT_LOCK,
        Action.RESUME_EARLIER,
        Action.RESUME_LATEST,
        Action.NEW_PORT,
        Action.RAISE_NOFILE,
    }
)
#: An error that the card contained: only the process that it hit has to start again.
_CONTAINED = 94
_MOST_LINES = 8


@dataclass(frozen=True)
class Step:
    """One step of a ladder."""

    action: Action
    grade: str
    limit: int
    text: str = ""
    command: str = ""
    when: str = ""


@dataclass(frozen=True)
class Problem:
    """What is wrong. `blamed`: layers of ours that brought it about; then kind and ladder are those of the failure that
    the layer was for, and `now` says what came instead."""

    kind: str
    fingerprint: str
    title: str = ""
    entity: str | None = None
    step: int | None = None
    evidence: tuple[EvidenceLine, ...] = ()
    diagnosis: Diagnosis | None = None
    blamed: tuple[str, ...] = ()
    now: str = ""


def key(*parts: object) -> str:
    """16 hex digits that stand for these parts."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode("utf-8", "replace")).hexdigest()[:16]


def find(situation: Situation, ledger: Ledger) -> Problem | None:
    """What is wrong; None: nothing, or it is not diagnosed yet."""
    own = own_problem(situation)
    if own is None:
        return None
    return _of_blamed(own, situation, ledger) or own


def own_problem(situation: Situation) -> Problem | None:
    """What is wrong with this attempt, whatever was done before it."""
    if situation.state is State.CRASHED:
        return _crash(situation)
    if situation.state is State.HUNG:
        return _hang(situation)
    nan = next((f for f in situation.findings if f.name == NAN), None)
    if nan is not None and situation.state in (State.STEPPING, State.SLOW):
        lines = tuple(EvidenceLine(line) for line in (nan.text, *nan.evidence))
        return Problem(NAN, key(NAN, "live"), nan.text, step=situation.step, evidence=lines[:_MOST_LINES])
    return None


def _crash(situation: Situation) -> Problem | None:
    diagnosis = situation.diagnosis
    if diagnosis is None:
        return None
    unknown = situation.signal is None and situation.rc is None
    ended = situation.signal or ("nobody wrote down how" if unknown else f"exit code {situation.rc}")
    lines = (*diagnosis.evidence, EvidenceLine(f"attempt {situation.attempt} ended: {ended}", role="match"))
    if unknown and diagnosis.kind in _NO_CAUSE:
        kind = REBOOTED if situation.rebooted else NO_RECORD
        if situation.cut:
            # The end of whoever started it says nothing of the trainer: one cut is not the other come again, and only
            # the hour's budget counts them together.
            cut = key(kind, situation.attempt)
            title = f"the start of attempt {situation.attempt} was cut short"
            return Problem(kind, cut, title, step=situation.step, evidence=lines[-_MOST_LINES:])
        return Problem(kind, key(kind), kind, step=situation.step, evidence=lines[-_MOST_LINES:])
    fingerprint = diagnosis.fingerprint or key(diagnosis.kind, situation.signal, situation.rc)
    return Problem(
        diagnosis.kind,
        fingerprint,
        diagnosis.title or diagnosis.kind,
        diagnosis.entity,
        situation.step,
        lines[:_MOST_LINES],
        diagnosis,
    )


def _hang(situation: Situation) -> Problem:
    diagnosis = situation.diagnosis
    line = EvidenceLine(f"attempt {situation.attempt} hangs since {situation.since:.0f}", role="match")
    if diagnosis is not None and diagnosis.kind not in _NO_CAUSE and diagnosis.fingerprint:
        lines = (*diagnosis.evidence, line)[:_MOST_LINES]
        title = diagnosis.title or diagnosis.kind
        return Problem(diagnosis.kind, diagnosis.fingerprint, title, diagnosis.entity, situation.step, lines, diagnosis)
    where, lines = "", (line,)
    if situation.stacks is not None:
        found = odd(situation.stacks)
        workers = parse(situation.stacks)
        where = found.where if found is not None else workers[0].where if workers else ""
        if found is not None:
            lines = (line, EvidenceLine(str(found), source="stacks", role="cause"))
    # Which worker hangs is the entity; where it stands is the name of the failure.
    entity = situation.odd
    return Problem(HANG, key(HANG, where), "A hang", entity, situation.step, lines)


def _of_blamed(own: Problem, situation: Situation, ledger: Ledger) -> Problem | None:
    """The failure that a change of ours was for, if this one is the change's doing (outcome `worse`)."""
    for case in ledger.cases.values():
        for tried in case.tried:
            if tried.outcome is Outcome.WORSE and tried.layer is not None and tried.started == situation.attempt:
                return replace(
                    own,
                    kind=case.kind,
                    fingerprint=case.fingerprint,
                    title=case.kind,
                    step=case.step,
                    blamed=(tried.layer,),
                    now=own.kind,
                    diagnosis=None,
                )
    return None


def passing(problem: Problem, playbooks: Playbooks) -> bool:
    """Whether this failure comes from outside and passes: nothing that we changed is to blame."""
    kind = playbooks.kinds.get(problem.kind)
    first = next((r for r in kind.remedies if r.grade != "N"), None) if kind is not None else None
    return first is not None and first.grade == "A" and first.action in {a.value for a in _PASSING}


# -- ladders


def ladder(problem: Problem, playbooks: Playbooks, policy: Policy) -> tuple[Step, ...]:
    """Steps for this problem, first to last: the owner's ladder (by fingerprint, then by kind), else the playbook's,
    in the order and choice of the diagnosis."""
    kind = playbooks.kinds.get(problem.kind)
    listed = kind.remedies if kind is not None else ()
    own = policy.ladders.get(problem.fingerprint, policy.ladders.get(problem.kind))
    if own is not None:
        return tuple(step for name in own if (step := _own_step(name, listed)) is not None)
    chosen = listed
    if problem.diagnosis is not None and problem.diagnosis.kind == problem.kind:
        order = [(r.action, r.text) for r in problem.diagnosis.remedies]
        known = {(r.action, r.text): r for r in listed}
        # Only what the playbook has: a diagnosis may choose and order, it cannot add or promote.
        chosen = tuple(known[k] for k in order if k in known) or listed
    return tuple(step for r in chosen if (step := _step(r)) is not None)


def _step(remedy: Remedy) -> Step | None:
    if remedy.action not in Action._value2member_map_:
        return None
    action = Action(remedy.action)
    grade = worse_grade(remedy.grade, RULES[action].floor)
    if remedy.when and remedy.when not in CONDITIONS and remedy.when not in PREDICATES:
        grade = worse_grade(grade, "B")
    most = 2 if action is Action.RESTART else 1
    return Step(action, grade, max(0, min(remedy.limit, most)), remedy.text, remedy.command, remedy.when)


def _own_step(name: str, listed: tuple[Remedy, ...]) -> Step | None:
    if name not in Action._value2member_map_:
        return None
    same = next((r for r in listed if r.action == name), None)
    if same is not None:
        step = _step(same)
        # An owner who names a plain restart gets the law's two.
        return replace(step, limit=2) if step is not None and step.action is Action.RESTART else step
    action = Action(name)
    grade = worse_grade(RULES[action].floor, "B")
    return Step(action, grade, 2 if action is Action.RESTART else 1, RULES[action].text)


def _no_bad_xid(problem: Problem, situation: Situation, ledger: Ledger) -> bool:
    texts = [e.text for e in problem.evidence] + [line for f in situation.findings for line in f.evidence]
    numbers = {int(match["number"]) for text in texts for match in gpu.XID.finditer(text)}
    return not numbers & (gpu.HARDWARE - {_CONTAINED})


#: Conditions that playbooks write in words, as code.
CONDITIONS: Mapping[str, Callable[[Problem, Situation, Ledger], bool]] = {
    # Triage names a cascade only where no rank has an error of its own.
    "no rank shows another error": lambda p, s, led: True,
    "the trainer's process is dead": lambda p, s, led: s.state is State.CRASHED and not s.left,
    "the kernel log shows Xid 94 or none": _no_bad_xid,
    "own_overlay_active": lambda p, s, led: bool(led.layers),
}


def holds(step: Step, problem: Problem, situation: Situation, ledger: Ledger) -> bool:
    """Whether a step's condition holds; one that triage judged was judged there."""
    condition = CONDITIONS.get(step.when)
    return condition is None or condition(problem, situation, ledger)
