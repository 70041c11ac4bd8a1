"""The state of a session that we did not start, from its pane and its processes. Pure.

The rule here: a process that lives is never called crashed, one that is gone is called what its last words say, and
where they say nothing the answer is `unknown`: an exit code that nobody wrote down is not made up.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_ops.contracts import Limits, State
from dflash_ops.supervise.dialects import Said


@dataclass(frozen=True)
class Sight:
    """One look.

    Attributes:
        alive: the trainer's process lives (pid and start time); None: it was never seen, only a shell.
        session: the session is there; None: tmux does not answer.
        pane_dead: tmux keeps the pane of a command that has ended; `pane_status` its exit code, None where tmux does
            not know it (3.3a often does not).
        output_t: when the newest output came, None where nothing tells.
        started: when the trainer's process began.
        stop_requested: we have sent it TERM.
    """

    said: Said
    now: float
    alive: bool | None
    session: bool | None = True
    pane_dead: bool = False
    pane_status: int | None = None
    output_t: float | None = None
    started: float | None = None
    stop_requested: bool = False


def judge(sight: Sight, limits: Limits) -> tuple[State, str]:
    """State and detail."""
    said = sight.said
    step = said.progress.step if said.progress is not None else None
    total = said.progress.total if said.progress is not None else None
    where = "" if step is None else f"step {step}" + (f" of {total}" if total else "")
    if sight.alive:
        return _alive(sight, limits, where)
    if sight.alive is None:
        if sight.session is False:
            return State.UNKNOWN, "the session is gone, and no trainer was seen in it"
        return State.UNKNOWN, "only a shell runs in the session"
    after = f" after {where}" if where else ""
    if said.error:
        return State.CRASHED, said.error
    if sight.pane_status not in (None, 0):
        return State.CRASHED, f"exit code {sight.pane_status}{after}"
    if sight.stop_requested or said.interrupted:
        return State.STOPPED, f"ended on request{after}"
    if said.done or sight.pane_status == 0 or (step is not None and total and step >= total):
        return State.FINISHED, f"it ended{after}"
    return State.UNKNOWN, f"the trainer has ended{after}; nothing in the pane tells how"


def _alive(sight: Sight, limits: Limits, where: str) -> tuple[State, str]:
    quiet = sight.now - sight.output_t if sight.output_t is not None else None
    if where:
        if quiet is not None and quiet > limits.step_s:
            return State.HUNG, f"no output for {quiet:.0f} s, last {where}"
        return State.STEPPING, where
    if quiet is not None and quiet > limits.loading_s:
        return State.HUNG, f"no output for {quiet:.0f} s, and no step yet"
    return State.LOADING, sight.said.loading or "no step seen yet"


def warnings(sight: Sight) -> tuple[str, ...]:
    """What a person should know beside the state."""
    told = []
    if sight.session is False and sight.alive:
        told.append("the tmux session is gone; the trainer lives, its output is not seen any more")
    if sight.session is None:
        told.append("tmux does not answer")
    if sight.alive and sight.said.error:
        told.append(f"the pane shows a traceback: {sight.said.error}")
    return tuple(told)
