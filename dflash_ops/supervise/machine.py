"""The drawn state machine: which state may follow which inside one attempt (docs/supervise.md, States).

The rule here: evidence decides the state (health.assess), the drawing decides whether it can be true. A change that is
not drawn means that the evidence contradicts what was known: the state is then `unknown`, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_ops.contracts import State

_S = State
_ENDS = frozenset({_S.CRASHED, _S.FINISHED, _S.STOPPED})
_LIVES = frozenset({_S.LOADING, _S.COMPILING, _S.STEPPING, _S.SLOW, _S.HUNG})

#: From a state to those that may follow it. `unreachable` is said from outside: from and to every state.
TRANSITIONS: Mapping[State, frozenset[State]] = {
    **{state: (_LIVES | _ENDS | {_S.UNKNOWN}) - {state} for state in _LIVES},
    _S.CRASHED: frozenset({_S.FINISHED, _S.STOPPED, _S.UNKNOWN}),
    _S.FINISHED: frozenset({_S.UNKNOWN}),
    _S.STOPPED: frozenset({_S.UNKNOWN}),
    _S.UNKNOWN: _LIVES | _ENDS,
}


def drawn(before: State | None, after: State) -> bool:
    """Whether `after` may follow `before`; a first look (None) may find any state."""
    if before is None or before is after or _S.UNREACHABLE in (before, after):
        return True
    return after in TRANSITIONS[before]


def follow(before: State | None, after: State, detail: str) -> tuple[State, str]:
    """The state that is told: `after`, or `unknown` where that is not drawn."""
    if drawn(before, after):
        return after, detail
    assert before is not None
    return _S.UNKNOWN, f"the evidence contradicts itself: it was {before.value}, and seems {after.value} now ({detail})"
