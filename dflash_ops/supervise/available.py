"""Whether a step can be done here and now, with its parameters; the reason where it cannot.

The rule here: what is not known is not available. A checkpoint that nobody verified is none to go back to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_ops.contracts import LIVE_STATES, RULES, Action, Ledger, Overlay, State, forbidden
from dflash_ops.supervise.problem import Problem, Step
from dflash_ops.supervise.remedies import Change, NotAvailable, concrete, env_of
from dflash_ops.supervise.situation import CheckpointSeen, Situation


@dataclass(frozen=True)
class Ready:
    """A step that can be done: its parameters, the change it makes, and layers that are taken back with it."""

    params: dict[str, Any] = field(default_factory=dict)
    change: Change = field(default_factory=Change)
    drop: tuple[str, ...] = ()


def available(
    step: Step, problem: Problem, situation: Situation, ledger: Ledger, drop: tuple[str, ...]
) -> Ready | NotAvailable:
    """`drop`: layers that are taken back in any case (their change did not help)."""
    action, rule = step.action, RULES[step.action]
    if rule.side != situation.side:
        return NotAvailable(f"it is done from {rule.side} the container only")
    if rule.starts and situation.adopted:
        return NotAvailable("the session is adopted: how to start it again is not known")
    if (bad := forbidden(step.command)) is not None:
        return NotAvailable(f"its command asks for {bad!r}, which is never done by itself")
    if action is Action.ADOPT_SESSION:
        crashed = situation.state is State.CRASHED
        return NotAvailable("the trainer does not live" if crashed else "it is watched by pid and start time already")
    if action is Action.UNDO_OVERLAY:
        return _undo(ledger, drop)
    if action in _CHECKPOINTS:
        params = _CHECKPOINTS[action](problem, situation)
        return params if isinstance(params, NotAvailable) else Ready(params, drop=drop)
    if action is Action.ROLLBACK_RELEASE:
        if not situation.previous_release:
            return NotAvailable("there is no earlier release")
        return Ready({"release": situation.previous_release}, drop=drop)
    params = _params(step, problem, situation)
    in_force = Overlay(ledger.layers).without(drop)
    change = concrete(action, situation.table, in_force, params)
    return change if isinstance(change, NotAvailable) else Ready(params, change, drop)


def _params(step: Step, problem: Problem, situation: Situation) -> dict[str, Any]:
    if step.action is Action.ENV_CHANGE:
        return {"env": env_of(step.command)}
    if step.action is Action.EXCLUDE_DEVICE:
        return {"device": situation.device}
    if step.action is Action.QUARANTINE_SAMPLE:
        return {"sample": problem.entity}
    if step.action is Action.RAISE_NOFILE:
        soft, hard = situation.nofile or (0, 0)
        return {"nofile": hard} if hard > soft else {}
    return {}


def _undo(ledger: Ledger, drop: tuple[str, ...]) -> Ready | NotAvailable:
    """Changes that never were proven; else the newest one."""
    tried = {t.layer for case in ledger.cases.values() for t in case.tried if t.layer}
    open_ids = tuple(x.id for x in ledger.layers if x.id in tried)
    ids = drop or open_ids or tuple(x.id for x in ledger.layers[-1:])
    return Ready(drop=ids) if ids else NotAvailable("no change of ours is in force")


def _latest(problem: Problem, situation: Situation) -> dict[str, Any] | NotAvailable:
    good = next((c for c in situation.checkpoints if c.verified), None)
    return _from(good) if good is not None else NotAvailable("no checkpoint verifies")


def _earlier(problem: Problem, situation: Situation) -> dict[str, Any] | NotAvailable:
    if not situation.checkpoints:
        return NotAvailable("there is no checkpoint")
    newest = situation.checkpoints[0]
    if not _damaged(problem) and problem.step is not None:
        # Saved before it went wrong: nothing of it is in there.
        before = _went_wrong(problem, situation)
        if before is None:
            return NotAvailable("at which step the loss was lost is not known")
        good = next((c for c in situation.checkpoints if c.verified and c.step < before), None)
        return _from(good) if good is not None else NotAvailable(f"no checkpoint before step {before} verifies")
    if _damaged(problem) and newest.verified:
        return NotAvailable(f"the newest checkpoint, step {newest.step}, verifies: what is damaged is another file")
    good = next((c for c in situation.checkpoints[1:] if c.verified and c.step < newest.step), None)
    return _from(good) if good is not None else NotAvailable("no older checkpoint verifies")


def _went_wrong(problem: Problem, situation: Situation) -> int | None:
    """The first step that may be wrong; a living run has gone on since, and has saved what is wrong."""
    found = next((f for f in situation.findings if f.name == problem.kind), None)
    if found is None or situation.state not in LIVE_STATES:
        return problem.step
    good = found.numbers.get("last_good_step")
    return int(good) + 1 if good is not None else None


def _fresh(problem: Problem, situation: Situation) -> dict[str, Any] | NotAvailable:
    if _damaged(problem):
        if any(c.verified is None for c in situation.checkpoints):
            return NotAvailable("not every checkpoint was verified yet")
        good = next((c for c in situation.checkpoints if c.verified), None)
        if good is not None:
            return NotAvailable(f"the checkpoint of step {good.step} verifies: nothing needs to begin anew")
    return {"fresh": True}


def _damaged(problem: Problem) -> bool:
    return problem.kind.startswith("corrupted_")


def _from(checkpoint: CheckpointSeen) -> dict[str, Any]:
    return {"checkpoint": checkpoint.path, "step": checkpoint.step}


_CHECKPOINTS: Mapping[Action, Any] = {
    Action.RESUME_LATEST: _latest,
    Action.RESUME_EARLIER: _earlier,
    Action.FRESH_START_ASIDE: _fresh,
}
