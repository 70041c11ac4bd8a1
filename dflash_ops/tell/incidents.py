"""journal -> incidents: each failure from its first sign to the step beyond it. Pure.

The rules here: what fails again in an attempt that an action for it began is the same incident, also where that action
made it worse; another failure is another one. An incident is over when a later attempt shows a step beyond the furthest
that was known, or finishes. What the journal does not say is None, never a guess.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_ops.contracts import Event, EvidenceLine, Outcome, State, from_dict
from dflash_ops.contracts.incident import Deed, Incident, IncidentLine, IncidentState, Proof
from dflash_ops.errors import ContractError
from dflash_ops.supervise.ledger import by_supervisor, whole
from dflash_ops.supervise.words import say


@dataclass
class _Open:
    """One incident while the journal is read. `failed`: attempt -> (time, furthest step)."""

    number: int
    t: float
    failed: dict[int, tuple[float, int | None]] = field(default_factory=dict)
    fingerprints: list[str] = field(default_factory=list)
    diagnosis: dict[str, Any] = field(default_factory=dict)
    end: str = ""
    evidence: tuple[EvidenceLine, ...] = ()
    deeds: dict[str, Deed] = field(default_factory=dict)
    told: str = ""
    asked: IncidentState | None = None
    proof: Proof | None = None
    anew: bool = False  # a person set the checkpoints aside: steps count from nothing
    lines: list[IncidentLine] = field(default_factory=list)

    @property
    def last(self) -> int:
        return max(self.failed)

    @property
    def step(self) -> int | None:
        return max((step for _, step in self.failed.values() if step is not None), default=None)


def incidents(events: Iterable[Event]) -> tuple[Incident, ...]:
    """All incidents of a journal, oldest first. Raises nothing: an event that cannot be understood is left out."""
    reading = _Reading(sorted(events, key=lambda e: e.seq))
    reading.read()
    return tuple(reading.closed(one) for one in reading.all)


class _Reading:
    def __init__(self, events: list[Event]) -> None:
        self.all: list[_Open] = []
        self._lasting: list[_Open] = []  # those without a proof
        self._events = events
        self._of_attempt: dict[int, _Open] = {}
        self._of_deed: dict[str, _Open] = {}
        self._begun: dict[int, str] = {}  # attempt -> id of the decision that began it
        self._numbers: list[int] = []  # attempts that began, ascending
        self._first: dict[int, int] = {}  # attempt -> step that it went on from
        self._saved: int | None = None  # step of the newest checkpoint
        self._hung: dict[int, Event] = {}
        self._findings: list[Event] = []
        # Only the event after a diagnosis says that our own change brought it.
        self._worse = {e.attempt for e in events if e.event == "action_outcome" and e.data.get("outcome") == "worse"}
        self._tells = any(e.event in ("checkpoint", "resumed") for e in events)

    def read(self) -> None:
        for event in self._events:
            handler = _HANDLERS.get(event.event)
            if handler is not None:
                handler(self, event)
        self._numbers = sorted(self._begun)

    # -- attempts

    def attempt_started(self, e: Event) -> None:
        if e.attempt is None:
            return
        self._begun[e.attempt] = str(e.data.get("decision") or "")
        if (step := self._from(e)) is not None:
            self._first[e.attempt] = step
        self._findings = []
        if not by_supervisor(e.actor):
            for one in self._lasting:
                one.asked = None
        id = self._begun[e.attempt]
        if (found := self._of_deed.get(id)) is not None:
            found.deeds[id] = replace(found.deeds[id], started=e.attempt)
            self._line(found, e)
        else:
            self._newest(e)

    def _from(self, e: Event) -> int | None:
        """Step that this attempt can only go on from; the trainer's own word (`resumed`) counts more."""
        found = self._of_deed.get(str(e.data.get("decision") or ""))
        deed = found.deeds.get(str(e.data.get("decision"))) if found is not None else None
        if deed is not None and deed.action == "fresh_start_aside":
            return 0
        return self._saved if self._saved is not None else 0 if self._tells else None

    def resumed(self, e: Event) -> None:
        step = whole(e.data.get("step"))
        if e.attempt is not None and step is not None:
            self._first[e.attempt] = step

    def checkpoint(self, e: Event) -> None:
        step = whole(e.data.get("step"))
        if step is not None:
            self._saved = step
            self._prove(e, step)

    def checkpoints_aside(self, e: Event) -> None:
        if not e.data.get("names"):  # all of them
            self._saved = None
            if not by_supervisor(e.actor):
                for one in self._lasting:
                    one.anew = True
        self._newest(e)

    def attempt_exited(self, e: Event) -> None:
        if e.attempt is None:
            return
        step, state = whole(e.data.get("step")), e.data.get("state")
        self._prove(e, step, finished=state == State.FINISHED.value)
        if state == State.CRASHED.value:
            one = self._failed(e, step)
            one.end = str(e.data.get("detail") or "")
            self._line(one, e)
        elif (found := self._of_attempt.get(e.attempt)) is not None and found.proof is None:
            self._line(found, e)

    def state(self, e: Event) -> None:
        if e.attempt is None:
            return
        if e.data.get("state") == State.HUNG.value:
            self._hung[e.attempt] = e
        else:
            self._hung.pop(e.attempt, None)  # it went on by itself

    def stop_requested(self, e: Event) -> None:
        one = self._newest(e)
        if one is not None and not by_supervisor(e.actor):
            one.asked = IncidentState.STOPPED

    # -- what was seen

    def diagnosed(self, e: Event) -> None:
        if e.attempt is None:
            return
        print_ = str(e.data.get("fingerprint") or "")
        one = self._failed(e, whole(e.data.get("step")))
        first = not one.fingerprints
        if not first and print_ not in one.fingerprints and self._elsewhere(one, e.attempt):
            one = self._split(one, e)
            first = True
        again = print_ in one.fingerprints
        if not again:
            one.fingerprints.append(print_)
        if first:
            one.diagnosis = dict(e.data)
        self._line(one, e, again=again)

    def _elsewhere(self, one: _Open, attempt: int) -> bool:
        """Whether another fingerprint in this attempt is another incident: not where our change brought it, and not
        where it is a second look at the same end."""
        return min(one.failed) != attempt and attempt not in self._worse

    def finding(self, e: Event) -> None:
        found = self._of_attempt.get(e.attempt) if e.attempt is not None else None
        if found is not None and found.proof is None:
            self._line(found, e)
        else:
            self._findings = [*self._findings[-9:], e]

    def progress(self, e: Event) -> None:
        self._prove(e, whole(e.data.get("step")))

    # -- what was done

    def action_intended(self, e: Event) -> None:
        said = e.data.get("decision")
        decision: Mapping[str, Any] = said if isinstance(said, Mapping) else {}
        attempt = whole(decision.get("attempt"))
        one = self._of_attempt.get(attempt if attempt is not None else e.attempt or -1)
        if one is None:
            if e.attempt is None:
                return
            one = self._failed(e, None)  # stacks of a hang are asked for before it is named
        id, action, reason, command, grade, undo = (
            str(decision.get(k) or "") for k in ("id", "action", "reason", "command", "grade", "undo")
        )
        deed = Deed(id, action, e.t, reason, command, grade, attempt, undo=undo)
        if deed.id not in one.deeds:
            one.deeds[deed.id] = deed
        self._of_deed[deed.id] = one
        one.asked = None
        one.diagnosis = {**{k: decision.get(k) for k in ("kind", "title", "fingerprint")}, **one.diagnosis}
        if not one.evidence:
            one.evidence = _evidence(decision.get("evidence"))
        self._line(one, e)

    def action_done(self, e: Event) -> None:
        self._settle(e, Outcome.DONE.value, str(e.data.get("detail") or ""), whole(e.data.get("attempt")))

    def action_failed(self, e: Event) -> None:
        self._settle(e, Outcome.FAILED.value, str(e.data.get("error") or ""))

    def action_outcome(self, e: Event) -> None:
        self._settle(e, str(e.data.get("outcome") or "?"), str(e.data.get("detail") or ""))

    def _settle(self, e: Event, outcome: str, detail: str, started: int | None = None) -> None:
        id = str(e.data.get("id") or "")
        one = self._of_deed.get(id)
        if one is None:
            return
        deed = one.deeds[id]
        one.deeds[id] = replace(
            deed,
            outcome=outcome,
            detail=detail or deed.detail,
            started=started if started is not None else deed.started,
        )
        self._line(one, e, deed=deed)

    def told(self, e: Event) -> None:
        """`held` and `proposed`."""
        if e.attempt is None:
            return
        one = self._failed(e, None)
        one.asked = IncidentState.HELD if e.event == "held" else IncidentState.PROPOSED
        one.told = "\n".join(str(e.data[k]) for k in ("reason", "text") if e.data.get(k))
        one.diagnosis = {**{k: e.data.get(k) for k in ("kind", "fingerprint")}, **one.diagnosis}
        self._line(one, e)

    def supervise_reset(self, e: Event) -> None:
        """A person has looked: what was left to one is judged anew."""
        for one in self._lasting:
            if one.asked in (IncidentState.HELD, IncidentState.PROPOSED):
                one.asked = None
        self._newest(e)

    def beside(self, e: Event) -> None:
        """What people and deploys do meanwhile."""
        self._newest(e)

    # -- small parts

    def _failed(self, e: Event, step: int | None) -> _Open:
        """The incident of this attempt's failure: known, that of the action that began it, or a new one."""
        attempt = e.attempt
        assert attempt is not None
        one = self._of_attempt.get(attempt)
        t = e.t
        if one is None:
            hung = self._hung.get(attempt)
            since = hung.data.get("since") if hung is not None else None
            t = float(since) if isinstance(since, (int, float)) else t  # a hang began with its silence
            one = self._of_deed.get(self._begun.get(attempt, ""))
            if one is None or one.proof is not None:
                one = self._new(t)
            if hung is not None:
                self._line(one, hung)
        self._of_attempt[attempt] = one
        before = one.failed.get(attempt)
        known = before[1] if before is not None else None
        furthest = max((s for s in (known, step) if s is not None), default=None)
        one.failed[attempt] = (before[0] if before is not None else t, furthest)
        return one

    def _new(self, t: float) -> _Open:
        one = _Open(len(self.all) + 1, t)
        self.all.append(one)
        self._lasting.append(one)
        for finding in self._findings:
            self._line(one, finding)
        self._findings = []
        return one

    def _split(self, old: _Open, e: Event) -> _Open:
        """It is another failure after all: what was written of this attempt goes with it."""
        assert e.attempt is not None
        when, step = old.failed.pop(e.attempt)
        one = self._new(when)
        one.failed[e.attempt] = (when, step)
        one.end = old.end
        started = f"attempt {e.attempt} started"
        moved = [line for line in old.lines if line.attempt == e.attempt and not line.text.startswith(started)]
        one.lines += moved
        old.lines = [line for line in old.lines if line not in moved]
        self._of_attempt[e.attempt] = one
        return one

    def _newest(self, e: Event) -> _Open | None:
        if not self._lasting:
            return None
        self._line(self._lasting[-1], e)
        return self._lasting[-1]

    def _prove(self, e: Event, step: int | None, *, finished: bool = False) -> None:
        if e.attempt is None:
            return
        for one in list(self._lasting):
            if e.attempt <= one.last:
                continue
            beyond = step is not None and (one.anew or one.step is None or step > one.step)
            if beyond or finished:
                one.proof = Proof(e.t, e.attempt, step, e.event)
                self._lasting.remove(one)
                self._line(one, e)

    def _line(self, one: _Open, e: Event, *, again: bool = False, deed: Deed | None = None) -> None:
        one.lines.append(IncidentLine(e.t, e.seq, e.actor, say(e, again=again, deed=deed), e.attempt))

    def closed(self, one: _Open) -> Incident:
        lost, resumed = self._lost(one)
        deeds = tuple(one.deeds.values())
        d = one.diagnosis
        confidence = d.get("confidence")
        return Incident(
            number=one.number,
            t=one.t,
            attempts=tuple(sorted(one.failed)),
            state=_state(one, deeds),
            kind=str(d.get("kind") or ""),
            title=str(d.get("title") or ""),
            fingerprint=str(d.get("fingerprint") or ""),
            root_exception=_text(d.get("root_exception")),
            entity=_text(d.get("entity")),
            confidence=float(confidence) if isinstance(confidence, (int, float)) else None,
            end=one.end,
            step=one.step,
            evidence=one.evidence,
            deeds=deeds,
            told=one.told,
            proof=one.proof,
            resumed=resumed,
            lost_steps=lost if one.proof is not None else None,
            down_s=max(0.0, one.proof.t - one.t) if one.proof is not None else None,
            lines=tuple(one.lines),
        )

    def _lost(self, one: _Open) -> tuple[int | None, int | None]:
        """Steps done again after each of its failures, together; the step that the first one was resumed from."""
        lost: int | None = 0
        first: int | None = None
        for number, attempt in enumerate(sorted(one.failed)):
            at = bisect_right(self._numbers, attempt)
            after = self._numbers[at] if at < len(self._numbers) else None
            begin = self._first.get(after) if after is not None else None
            first = begin if number == 0 else first
            step = one.failed[attempt][1]
            if step is None:
                continue  # it came to no step: none is done again
            lost = None if lost is None or begin is None else lost + max(0, step - begin)
        return lost, first


_HANDLERS: Mapping[str, Callable[[_Reading, Event], None]] = {
    "attempt_started": _Reading.attempt_started,
    "attempt_exited": _Reading.attempt_exited,
    "state": _Reading.state,
    "resumed": _Reading.resumed,
    "checkpoint": _Reading.checkpoint,
    "checkpoints_aside": _Reading.checkpoints_aside,
    "checkpoints_restored": _Reading.beside,
    "rolled_back": _Reading.beside,
    "rebalancing": _Reading.beside,
    "rebalanced": _Reading.beside,
    "start_failed": _Reading.beside,
    "stop_requested": _Reading.stop_requested,
    "stop_escalated": _Reading.beside,
    "supervise_reset": _Reading.supervise_reset,
    "diagnosed": _Reading.diagnosed,
    "finding": _Reading.finding,
    "progress": _Reading.progress,
    "action_intended": _Reading.action_intended,
    "action_done": _Reading.action_done,
    "action_failed": _Reading.action_failed,
    "action_outcome": _Reading.action_outcome,
    "held": _Reading.told,
    "proposed": _Reading.told,
}


def _state(one: _Open, deeds: tuple[Deed, ...]) -> IncidentState:
    starts = [deed for deed in deeds if deed.action != "dump_stacks"]
    if one.proof is not None:
        ours = any(d.outcome == Outcome.VERIFIED.value for d in starts) or any(
            d.started == one.proof.attempt for d in starts
        )
        return IncidentState.REPAIRED if ours else IncidentState.PASSED
    if one.asked is not None:
        return one.asked
    if starts and starts[-1].outcome == Outcome.INTENDED.value:
        return IncidentState.ACTING
    if starts and starts[-1].outcome == Outcome.DONE.value:
        return IncidentState.WAITING
    return IncidentState.OPEN


def _evidence(said: Any) -> tuple[EvidenceLine, ...]:
    try:
        return tuple(from_dict(EvidenceLine, line) for line in said or ())
    except (ContractError, TypeError):
        return ()  # of another version: the rest of the announcement still counts


def _text(value: Any) -> str | None:
    return str(value) if value else None
