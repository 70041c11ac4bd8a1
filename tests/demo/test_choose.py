"""When a demo trains, follows, or takes what is there."""

from __future__ import annotations

import pytest

from dflash_ops.contracts import LIVE_STATES, Snapshot, State
from dflash_ops.demo.choose import choose, key_in, key_of, reason_of

KEY = key_of({"release": "a", "config": "b", "target": "c", "data": "d"})
OTHER = key_of({"release": "x", "config": "b", "target": "c", "data": "d"})


def job(state: State, attempt: int | None = 3) -> Snapshot:
    return Snapshot("demo", 100.0, state, 90.0, attempt=attempt)


def test_nothing_there_is_trained_from_the_beginning() -> None:
    choice = choose(job(State.UNKNOWN, None), None, KEY, replace=False)
    assert (choice.action, choice.begin, choice.replace) == ("train", "fresh", False)


def test_finished_with_the_same_key_is_reused() -> None:
    assert choose(job(State.FINISHED), reason_of(KEY), KEY, replace=False).action == "reuse"
    assert choose(job(State.FINISHED), reason_of(KEY), KEY, replace=True).action == "reuse"
    again = choose(job(State.FINISHED), reason_of(KEY), KEY, replace=False, again=True)
    assert (again.action, again.begin) == ("train", "fresh")


@pytest.mark.parametrize("reason", [reason_of(OTHER), "", "tried a larger lr", "demo 123", None])
@pytest.mark.parametrize("state", [State.FINISHED, State.CRASHED, State.STOPPED, State.UNKNOWN])
def test_what_was_trained_from_something_else_is_set_aside(state: State, reason: str | None) -> None:
    choice = choose(job(state), reason, KEY, replace=False)
    assert (choice.action, choice.begin) == ("train", "fresh")


@pytest.mark.parametrize("state", [State.CRASHED, State.STOPPED])
def test_what_did_not_finish_goes_on(state: State) -> None:
    choice = choose(job(state), reason_of(KEY), KEY, replace=False)
    assert (choice.action, choice.begin) == ("train", "resume")
    assert state.value in choice.why


@pytest.mark.parametrize("state", sorted(LIVE_STATES))
def test_a_running_demo_is_followed_or_replaced_never_started_twice(state: State) -> None:
    for reason in (reason_of(KEY), reason_of(OTHER), ""):
        follow = choose(job(state), reason, KEY, replace=False)
        assert follow.action == "follow" and "--replace" in follow.why
        new = choose(job(state), reason, KEY, replace=True)
        assert (new.action, new.begin, new.replace) == ("train", "fresh", True)


def test_key_is_found_in_its_reason_only() -> None:
    assert key_in(reason_of(KEY)) == KEY
    for text in ("", "demo", KEY, f"demo {KEY} ", f"demo {KEY.upper()}x", None):
        assert key_in(text) is None
    assert KEY != OTHER and key_of({"b": "1", "a": "2"}) == key_of({"a": "2", "b": "1"})
