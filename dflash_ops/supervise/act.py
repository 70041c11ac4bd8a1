"""Carrying out a decision: announced first, then done step by step through `Effects`, then written down.

The rules here (laws 5, 7, 8): before every step the lease is asked anew; nothing is done that was not announced; what
lives is ended before anything is started, and a start waits until the GPU memory of the ended one is back. Killed
between any two steps, the next supervisor finds the announcement, gets the same decision, and finishes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dflash_ops.contracts import GOES_BACK, RULES, Action, Decision, Ledger, Overlay, Verdict, to_dict
from dflash_ops.errors import LeaseLost
from dflash_ops.supervise.effects import EffectFailed, Effects
from dflash_ops.supervise.notice import held

#: Deadlines in seconds.
DUMP_S = 60.0
END_S = 300.0
MEMORY_S = 120.0
WAIT_S: dict[Action, tuple[str, float]] = {
    Action.WAIT_MEMORY: ("memory", 600.0),
    Action.WAIT_DISK: ("disk", 3600.0),
    Action.WAIT_NETWORK: ("network", 3600.0),
}


@dataclass(frozen=True)
class Done:
    """How it went. `attempt`: the one that was started; `error`: why it could not be done."""

    attempt: int | None = None
    detail: str = ""
    error: str = ""


def carry_out(decision: Decision, effects: Effects, ledger: Ledger) -> Done:
    """Do it.

    Args:
        ledger: as it was when this was decided.

    Raises:
        LeaseLost: somebody else may act by now; nothing more is done, and the journal says nothing more of it.
        OSError, DflashError: the journal could not be written: nothing is done.
    """
    if decision.verdict is not Verdict.ACT:
        raise ValueError(f"a decision {decision.verdict.value!r} is not for carrying out")
    _fenced(effects)
    if not decision.resumes:
        effects.journal("action_intended", {"decision": to_dict(decision)}, decision.attempt)
    try:
        done = _steps(decision, effects, ledger)
    except EffectFailed as failed:
        _fenced(effects)
        if decision.layer is not None:
            effects.write_overlay(Overlay(ledger.layers).without((decision.id, *decision.drop)))
        effects.journal("action_failed", {"id": decision.id, "error": str(failed)}, decision.attempt)
        return Done(error=str(failed))
    data: dict[str, Any] = {"id": decision.id, "attempt": done.attempt, "detail": done.detail}
    effects.journal("action_done", data, decision.attempt)
    return done


def say_held(decision: Decision, effects: Effects, ledger: Ledger) -> None:
    """Tell a person once: that nothing is left (what did not help is then taken back), or what would be done."""
    note = held(decision)
    if note is None:
        return
    _fenced(effects)
    effects.journal(note.event, note.data, note.attempt)
    if note.data.get("drop"):
        effects.write_overlay(Overlay(ledger.layers).without(decision.drop))
    effects.tell(decision.title or decision.kind, f"{decision.reason}\n{decision.command}", decision.fingerprint)


def _steps(decision: Decision, effects: Effects, ledger: Ledger) -> Done:
    action = Action(decision.action)
    if action is Action.DUMP_STACKS:
        effects.dump_stacks(decision.attempt or 0, DUMP_S)
        return Done(detail="stacks written")
    if RULES[action].side != "inside":
        raise EffectFailed(f"{action.value} is done from outside the container", "supervise", RULES[action].text)
    if not decision.starts:
        return Done(detail="nothing to do here")
    if decision.attempt is not None:
        # Also where it has ended: what it left behind is ended with it. Nothing there is nothing to do.
        effects.end(decision.attempt, END_S)
    _fenced(effects)
    if action in WAIT_S:
        what, seconds = WAIT_S[action]
        effects.wait_for(what, seconds)
        _fenced(effects)
    effects.wait_for("memory", MEMORY_S)
    _fenced(effects)
    detail = ""
    if action in GOES_BACK:
        # Also for the newest one that verifies: a trainer takes the newest, whole or not.
        detail = effects.set_aside(int(decision.params["step"]), decision.reason)
    elif action is Action.FRESH_START_ASIDE:
        detail = effects.set_aside(None, decision.reason)
    overlay = overlay_of(decision, effects, ledger)
    _fenced(effects)
    effects.write_overlay(overlay)
    _fenced(effects)
    release = decision.params.get("release")
    number = effects.start(
        overlay,
        fresh=action is Action.FRESH_START_ASIDE,
        release=str(release) if release else None,
        decision=decision.id,
        reason=decision.reason,
    )
    return Done(number, detail)


def overlay_of(decision: Decision, effects: Effects, ledger: Ledger) -> Overlay:
    """What is in force with this decision; a free port is chosen anew at each start."""
    overlay = Overlay(ledger.layers).without(decision.drop).with_layer(decision.layer)
    if all("{free_port}" not in text for x in overlay.layers for text in (*x.env.values(), *x.args)):
        return overlay
    port = str(effects.free_port())
    layers = tuple(
        replace(
            x,
            env={k: v.replace("{free_port}", port) for k, v in x.env.items()},
            args=tuple(a.replace("{free_port}", port) for a in x.args),
        )
        for x in overlay.layers
    )
    return replace(overlay, layers=layers)


def _fenced(effects: Effects) -> None:
    if not effects.fenced():
        raise LeaseLost("the lease is not ours any more", "run/lease", "nothing to do: another supervisor acts")
