"""A journal's events as sentences: of an incident's time line, and of what the supervisor did last. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dflash_ops.contracts import Event
from dflash_ops.contracts.incident import Deed
from dflash_ops.supervise.ledger import by_supervisor

#: Characters of a line; a reason may hold a whole error.
_LONGEST = 300

#: The year 2100: a damaged time must not end who reads it.
_LATEST = 4_102_444_800.0

_OUTCOMES = {
    "verified": "it helped",
    "useless": "it did not help",
    "worse": "it made things worse, and is taken back",
    "changed": "not known whether it helped",
    "interrupted": "it was interrupted",
}


def say(event: Event, *, again: bool = False, deed: Deed | None = None) -> str:
    """One line. `again`: a diagnosis that was made before; `deed`: the action that the event is about."""
    d, n = event.data, event.attempt
    at = f" at step {d['step']}" if isinstance(d.get("step"), int) else ""
    ours = by_supervisor(event.actor)
    what = deed.action if deed is not None else ""
    text = {
        # Of ours the announcement before it says why.
        "attempt_started": lambda: f"attempt {n} started" + ("" if ours else _because(d.get("reason"))),
        "attempt_exited": lambda: f"attempt {n} {d.get('state')}{at}" + _because(d.get("detail")),
        "state": lambda: f"attempt {n} hangs" + _because(d.get("detail")),
        "diagnosed": lambda: f"the same failure again: {d.get('kind')}" if again else _named(d),
        "finding": lambda: f"finding: {d.get('text') or d.get('name')}",
        "progress": lambda: f"attempt {n} is{at}: beyond the failure",
        "checkpoint": lambda: f"attempt {n} has a checkpoint{at}: beyond the failure",
        "action_intended": lambda: _intended(d),
        "action_done": lambda: f"{what} is done" + _because(d.get("detail")),
        "action_failed": lambda: f"{what} could not be done" + _because(d.get("error")),
        "action_outcome": lambda: (
            f"{what}: {_OUTCOMES.get(str(d.get('outcome')), d.get('outcome'))}" + _because(d.get("detail"), " ({})")
        ),
        "told": lambda: f"a person was told: {d.get('title') or d.get('text')}",
        "held": lambda: "a person has to look" + _because(d.get("reason")),
        "proposed": lambda: f"it would {d.get('action')}, but the policy only observes",
        "checkpoints_aside": lambda: f"checkpoints set aside to {d.get('to')}",
        "checkpoints_restored": lambda: "checkpoints brought back" + _because(d.get("to")),
        "rolled_back": lambda: f"back to attempt {d.get('to')}, release {d.get('release')}" + _because(d.get("reason")),
        "rebalancing": lambda: (
            f"the split is changed, {_split(d.get('from'))} -> {_split(d.get('to'))}" + _because(d.get("reason"))
        ),
        "rebalanced": lambda: (
            f"{_split(d.get('from'))} -> {_split(d.get('to'))} {d.get('outcome')}" + _because(d.get("why"))
        ),
        "start_failed": lambda: "a start failed" + _because(d.get("error")),
        "stop_requested": lambda: f"attempt {n} is stopped" + _because(d.get("reason")),
        "stop_escalated": lambda: f"attempt {n} did not end in {d.get('grace_s')} s: killed",
        "supervise_reset": lambda: "all counts were cleared" + _because(d.get("reason")),
    }.get(event.event)
    return text().replace("\n", "; ") if text is not None else event.event


def _because(said: Any, form: str = ": {}") -> str:
    return form.format(said) if said else ""


def _split(said: Any) -> str:
    return f"{said.get('targets')}+{said.get('drafters')}" if isinstance(said, Mapping) else "?"


def _named(d: Mapping[str, Any]) -> str:
    sure = d.get("confidence")
    certain = f", confidence {sure:.2f}" if isinstance(sure, (int, float)) else ""
    return f"named: {d.get('title') or d.get('kind')} ({d.get('kind')}{certain})"


def _intended(d: Mapping[str, Any]) -> str:
    decision = d.get("decision")
    said: Mapping[str, Any] = decision if isinstance(decision, Mapping) else {}
    return f"{said.get('action') or '?'}: {said.get('reason') or 'not understood'}"


class Deeds:
    """What the supervisor did or told last, as lines: `2026-11-29T18:31:10Z resume: ...`, at most MOST, newest last."""

    MOST = 5
    _EVENTS = frozenset(
        {"diagnosed", "finding", "action_intended", "action_failed", "action_outcome", "held", "proposed", "told"}
    )

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()
        self._actions: dict[str, str] = {}
        self._seq = -1

    def add(self, event: Event) -> None:
        """The next event of the journal; one that was added before changes nothing."""
        if event.seq <= self._seq:
            return
        self._seq = event.seq
        if event.event not in self._EVENTS or not by_supervisor(event.actor):
            return
        decision, id = event.data.get("decision"), str(event.data.get("id") or "")
        if isinstance(decision, Mapping):
            self._actions[str(decision.get("id"))] = str(decision.get("action") or "?")
        deed = Deed(id, self._actions.get(id, "an action"), event.t)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(min(max(event.t, 0.0), _LATEST)))
        self.lines = (*self.lines, f"{stamp} {say(event, deed=deed)}"[:_LONGEST])[-self.MOST :]
