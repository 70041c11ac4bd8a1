"""journal -> Ledger: a pure fold, so that a supervisor that was killed knows all that was ever announced.

The rules here: an event counts once (by its number); an action counts from its announcement on, whether it was done or
not; what cannot be understood of an announcement is counted as far as it can be, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dflash_ops.contracts import Action, Case, Decision, Event, Ledger, Outcome, Tried, Verdict, from_dict
from dflash_ops.errors import ContractError

#: Actor of everything that the supervisor does; whoever else starts or stops something is a person.
SUPERVISOR = "supervisor"

_MOST_CASES = 200
_MOST_STARTS = 64
_MOST_ATTEMPTS = 20


def rebuild(events: Iterable[Event], ledger: Ledger | None = None) -> Ledger:
    """All events folded, from an empty ledger or a kept copy of it."""
    ledger = ledger if ledger is not None else Ledger()
    for event in events:
        ledger = fold(ledger, event)
    return ledger


def fold(ledger: Ledger, event: Event) -> Ledger:
    """The ledger after this event. Pure; raises nothing; an event that is in it already changes nothing."""
    if event.seq <= ledger.seq:
        return ledger
    handler = _HANDLERS.get(event.event)
    return replace(handler(ledger, event) if handler is not None else ledger, seq=event.seq)


def by_supervisor(actor: str) -> bool:
    return actor.split(" ")[0] == SUPERVISOR


# -- attempts


def _attempt_started(ledger: Ledger, event: Event) -> Ledger:
    number = event.attempt
    if by_supervisor(event.actor):
        ledger = replace(ledger, attempt=number, begun_by=event.actor)
        found = ledger.find(ledger.pending)
        if found is None or not found[1].starts:
            return ledger
        done = replace(found[1], outcome=Outcome.DONE, started=number)
        return replace(_put(ledger, found[0], done), pending=None, awaiting=done.id)
    # A person's start runs what he wrote: none of our changes, and nothing of ours is waited for any more.
    for id in (ledger.pending, ledger.awaiting):
        ledger = _settle(ledger, id, Outcome.INTERRUPTED, "a person started the job")
    return replace(ledger, attempt=number, begun_by=event.actor, stopped=False, layers=(), pending=None, awaiting=None)


def _attempt_exited(ledger: Ledger, event: Event) -> Ledger:
    step = whole(event.data.get("step"))
    if step is not None:
        ledger = replace(ledger, mark=max(step, ledger.mark or 0))
    ours = ledger.pending is not None and event.data.get("requested") != "INT"
    if event.data.get("state") == "stopped" and not ours:
        return replace(ledger, stopped=True)
    return ledger


def _stop_requested(ledger: Ledger, event: Event) -> Ledger:
    return ledger if by_supervisor(event.actor) else replace(ledger, stopped=True)


def _checkpoints_aside(ledger: Ledger, event: Event) -> Ledger:
    """A person's fresh start counts its steps from nothing; ours must pass the old ones to be believed."""
    if by_supervisor(event.actor):
        return ledger
    cases = {k: replace(case, step=None) for k, case in ledger.cases.items()}
    return replace(ledger, mark=None, cases=cases)


# -- what was seen


def _diagnosed(ledger: Ledger, event: Event) -> Ledger:
    key = str(event.data.get("fingerprint") or "")
    # Before the first step: what comes next must get beyond all that was ever reached, not merely begin.
    said = whole(event.data.get("step"))
    step = said if said is not None else ledger.mark
    old = ledger.cases.get(key) or Case(key, first_t=event.t)
    seen = event.attempt is not None and event.attempt in old.attempts
    case = replace(
        old,
        kind=str(event.data.get("kind") or old.kind),
        last_t=event.t,
        times=old.times + (0 if seen else 1),
        step=_furthest(old.step, step),
        attempts=old.attempts if seen or event.attempt is None else (*old.attempts, event.attempt)[-_MOST_ATTEMPTS:],
    )
    mark = ledger.mark if step is None else max(step, ledger.mark or 0)
    return replace(ledger, cases=_bounded({**ledger.cases, key: case}), mark=mark)


def _progress(ledger: Ledger, event: Event) -> Ledger:
    """Steps beyond where it had failed: what was tried for it is forgiven, and what was waited for has helped."""
    step = whole(event.data.get("step"))
    if step is None:
        return ledger
    found = ledger.find(ledger.awaiting)
    if found is not None and (found[1].past_step is None or step > found[1].past_step):
        ledger = replace(_put(ledger, found[0], replace(found[1], outcome=Outcome.VERIFIED)), awaiting=None)
    cases = dict(ledger.cases)
    for key, case in ledger.cases.items():
        if passed(case, event.attempt, step):
            open_ids = (ledger.pending, ledger.awaiting)
            cases[key] = replace(case, tried=tuple(t for t in case.tried if t.id in open_ids))
    beyond = ledger.mark is None or step > ledger.mark
    clear = {k for k, c in cases.items() if not c.tried}
    return replace(
        ledger,
        cases=cases,
        mark=max(step, ledger.mark or 0),
        idle_starts=() if beyond else ledger.idle_starts,
        held=tuple(k for k in ledger.held if k.removeprefix("budget:") not in clear),
    )


def passed(case: Case, attempt: int | None, step: int) -> bool:
    """Whether this step of this attempt lies beyond all that the case knows: later attempt, further step."""
    before = [*case.attempts, *(t.attempt for t in case.tried if t.attempt is not None)]
    later = attempt is None or all(attempt > a for a in before)
    return bool(case.tried) and later and (case.step is None or step > case.step)


def _finding(ledger: Ledger, event: Event) -> Ledger:
    key = f"{event.data.get('name') or '?'}:{event.data.get('worker') or ''}"
    told = {**ledger.told, key: event.t}
    return replace(ledger, told=dict(sorted(told.items(), key=lambda item: item[1])[-_MOST_CASES:]))


# -- what was done


def _action_intended(ledger: Ledger, event: Event) -> Ledger:
    decision = _decision(event)
    known = ledger.find(decision.id)
    for id in (ledger.pending, ledger.awaiting if decision.starts else None):
        if id is not None and id != decision.id:
            other = ledger.find(id)
            same = other is not None and other[0].fingerprint == decision.fingerprint
            outcome = Outcome.USELESS if same and id == ledger.awaiting else Outcome.INTERRUPTED
            ledger = _settle(ledger, id, outcome, "another action came after it")
    if known is None:
        case = ledger.cases.get(decision.fingerprint) or Case(decision.fingerprint, decision.kind, event.t, event.t)
        tried = Tried(
            id=decision.id,
            action=decision.action,
            attempt=decision.attempt,
            t=event.t,
            grade=decision.grade or "A",
            starts=decision.starts,
            layer=decision.layer.id if decision.layer is not None else None,
            past_step=decision.verify.past_step if decision.verify is not None else None,
        )
        ledger = replace(ledger, cases=_bounded({**ledger.cases, case.fingerprint: _with(case, tried)}))
        if decision.starts:
            starts = (*ledger.idle_starts, event.t)[-_MOST_STARTS:]
            ledger = replace(ledger, idle_starts=starts, jitter=decision.jitter)
    dumped = ledger.dumped
    if decision.action == Action.DUMP_STACKS.value and decision.attempt is not None:
        dumped = tuple(dict.fromkeys((*dumped, decision.attempt)))[-_MOST_ATTEMPTS:]
    layers = tuple(x for x in ledger.layers if x.id not in decision.drop)
    if decision.layer is not None and all(x.id != decision.layer.id for x in layers):
        layers = (*layers, decision.layer)
    awaiting = None if decision.starts else ledger.awaiting
    return replace(ledger, pending=decision.id, awaiting=awaiting, dumped=dumped, layers=layers)


def _action_done(ledger: Ledger, event: Event) -> Ledger:
    id = str(event.data.get("id") or "")
    found = ledger.find(id)
    if found is None:
        return ledger
    case, tried = found
    started = whole(event.data.get("attempt"))
    if tried.outcome is Outcome.INTENDED or (tried.outcome is Outcome.DONE and tried.started is None):
        tried = replace(tried, outcome=Outcome.DONE, started=started if tried.starts else None)
        ledger = replace(_put(ledger, case, tried), awaiting=id if tried.starts else ledger.awaiting)
    return replace(ledger, pending=None if ledger.pending == id else ledger.pending)


def _action_failed(ledger: Ledger, event: Event) -> Ledger:
    id = str(event.data.get("id") or "")
    ledger = _settle(ledger, id, Outcome.FAILED, str(event.data.get("error") or ""))
    return replace(ledger, layers=tuple(x for x in ledger.layers if x.id != id))


def _action_outcome(ledger: Ledger, event: Event) -> Ledger:
    said = str(event.data.get("outcome") or "")
    if said not in Outcome._value2member_map_:
        return ledger
    return _settle(ledger, str(event.data.get("id") or ""), Outcome(said), str(event.data.get("detail") or ""))


def _held(ledger: Ledger, event: Event) -> Ledger:
    key = str(event.data.get("key") or event.data.get("fingerprint") or "")
    drop = event.data.get("drop")
    gone = set(drop) if isinstance(drop, (list, tuple)) else set()
    layers = tuple(x for x in ledger.layers if x.id not in gone)
    return replace(ledger, held=tuple(dict.fromkeys((*ledger.held, key)))[-_MOST_CASES:], layers=layers)


def _supervise_reset(ledger: Ledger, event: Event) -> Ledger:
    """A person has looked: all counts begin anew. What is in force (layers, a stop) stays."""
    return Ledger(
        attempt=ledger.attempt,
        begun_by=ledger.begun_by,
        stopped=ledger.stopped,
        layers=ledger.layers,
        mark=ledger.mark,
        dumped=ledger.dumped,
    )


_HANDLERS: Mapping[str, Callable[[Ledger, Event], Ledger]] = {
    "attempt_started": _attempt_started,
    "attempt_exited": _attempt_exited,
    "stop_requested": _stop_requested,
    "checkpoints_aside": _checkpoints_aside,
    "diagnosed": _diagnosed,
    "progress": _progress,
    "finding": _finding,
    "action_intended": _action_intended,
    "action_done": _action_done,
    "action_failed": _action_failed,
    "action_outcome": _action_outcome,
    "held": _held,
    "proposed": _held,
    "supervise_reset": _supervise_reset,
}


# -- small parts


def _decision(event: Event) -> Decision:
    data = event.data.get("decision")
    try:
        return from_dict(Decision, data)
    except ContractError:
        # Of a newer version, or damaged: it is counted as what it can only have been, a start.
        said: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
        return Decision(
            Verdict.ACT,
            "not understood",
            id=str(said.get("id") or f"seq{event.seq}"),
            action=str(said.get("action") or "?"),
            fingerprint=str(said.get("fingerprint") or ""),
            kind=str(said.get("kind") or ""),
            attempt=whole(said.get("attempt")),
            starts=said.get("starts") is not False,
        )


def _settle(ledger: Ledger, id: str | None, outcome: Outcome, detail: str) -> Ledger:
    found = ledger.find(id)
    if found is not None:
        ledger = _put(ledger, found[0], replace(found[1], outcome=outcome, detail=detail[:200]))
    return replace(
        ledger,
        pending=None if ledger.pending == id else ledger.pending,
        awaiting=None if ledger.awaiting == id else ledger.awaiting,
    )


def _put(ledger: Ledger, case: Case, tried: Tried) -> Ledger:
    return replace(ledger, cases={**ledger.cases, case.fingerprint: _with(case, tried)})


def _with(case: Case, tried: Tried) -> Case:
    if any(t.id == tried.id for t in case.tried):
        return replace(case, tried=tuple(tried if t.id == tried.id else t for t in case.tried))
    return replace(case, tried=(*case.tried, tried))


def _bounded(cases: dict[str, Case]) -> dict[str, Case]:
    """At most so many: of those for which nothing was done the oldest go first."""
    if len(cases) <= _MOST_CASES:
        return cases
    order = sorted(cases.values(), key=lambda c: (bool(c.tried), c.last_t))
    keep = {c.fingerprint for c in order[-_MOST_CASES:]}
    return {k: c for k, c in cases.items() if k in keep}


def _furthest(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def whole(value: Any) -> int | None:
    """A whole number of an event's data, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
