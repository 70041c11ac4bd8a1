"""When nothing may be done, whatever is wrong: each gate answers with its reason, or None.

The rules here are the laws 1, 7 and 9: nothing on stale or partial evidence, nothing without the lease, nothing after a
person's stop. They are asked before anything else is looked at.
"""

from __future__ import annotations

from dflash_ops.contracts import Ledger, State
from dflash_ops.supervise.situation import AHEAD_S, FRESH_S, Situation

_BLIND = frozenset({State.UNREACHABLE, State.UNKNOWN})
_OVER = frozenset({State.FINISHED, State.STOPPED})


def closed(situation: Situation, ledger: Ledger, now: float) -> str | None:
    """Why nothing may be done now, in one sentence; None: the way is free."""
    s = situation
    age = now - s.t
    if not age <= FRESH_S:  # also where it is no number
        return f"the evidence is {age:.0f} s old: too old to act on"
    if age < -AHEAD_S or s.since > now + AHEAD_S:
        return "the evidence is from the future: a clock was set; it is judged again when the clocks agree"
    if s.missing:
        return f"the evidence is partial: {', '.join(s.missing[:5])} could not be had"
    if not s.lease:
        return "the lease is not ours: another supervisor may act on this job"
    if s.lease_expires is not None and s.lease_expires <= now:
        return "our lease has run out: it must be taken anew before anything is done"
    if s.state in _BLIND:
        return f"the job is {s.state.value}: nothing is known well enough to act on"
    if s.attempt is None:
        return "nothing was ever started"
    if s.state in _OVER:
        return f"attempt {s.attempt} is {s.state.value}: nothing to repair"
    if s.requested or ledger.stopped:
        return "a person stopped this job: only a person starts it again"
    return None
