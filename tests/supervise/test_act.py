"""Carrying out: the order of things, the lease before each of them, and a kill between any two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from supervise_support import PLAYBOOKS, T0, Book, crashed

from dflash_ops.contracts import Decision, Event, Overlay, Policy, State, Verdict
from dflash_ops.errors import LeaseLost
from dflash_ops.supervise.act import carry_out, say_held
from dflash_ops.supervise.decide import decide
from dflash_ops.supervise.effects import EffectFailed
from dflash_ops.supervise.situation import CheckpointSeen


class Killed(Exception):
    """The supervisor was killed here."""


class World:
    """Effects on a world in memory that keep the protocol's promises: each of them idempotent."""

    def __init__(self, book: Book, *, die_at: int | None = None, lose_at: int | None = None, fail: str = "") -> None:
        self.book, self.die_at, self.lose_at, self.fail = book, die_at, lose_at, fail
        self.calls: list[str] = []
        self.attempts = {1: ""}
        self.alive = {1}
        self.overlay = Overlay()
        self.aside: list[int | None] = []
        self.told: list[str] = []
        self.fences = 0

    def _call(self, name: str) -> None:
        if self.die_at is not None and len(self.calls) >= self.die_at:
            raise Killed
        self.calls.append(name)
        if self.fail and name.startswith(self.fail):
            raise EffectFailed(f"{name} failed", "here", "look")

    def fenced(self) -> bool:
        self.fences += 1
        return self.lose_at is None or self.fences <= self.lose_at

    def journal(self, event: str, data: dict[str, Any], attempt: int | None) -> Event:
        self._call(f"journal {event}")
        return self.book.add(event, T0, attempt, **data)

    def dump_stacks(self, attempt: int, seconds: float) -> str:
        self._call("dump_stacks")
        return "stacks"

    def end(self, attempt: int, seconds: float) -> None:
        self._call("end")
        self.alive.discard(attempt)

    def wait_for(self, what: str, seconds: float) -> None:
        self._call(f"wait {what}")

    def set_aside(self, newer_than: int | None, reason: str) -> str:
        self._call("aside")
        if newer_than not in self.aside:
            self.aside.append(newer_than)
        return "checkpoints.aside/1"

    def free_port(self) -> int:
        return 23456

    def write_overlay(self, overlay: Overlay) -> None:
        self._call("overlay")
        self.overlay = overlay

    def start(self, overlay: Overlay, *, fresh: bool, release: str | None, decision: str, reason: str) -> int:
        self._call(f"start fresh={fresh}")
        assert not self.alive, "started beside a living one"
        known = [n for n, d in self.attempts.items() if d == decision]
        if known:
            return known[0]
        number = max(self.attempts) + 1
        self.attempts[number] = decision
        self.alive.add(number)
        self.book.add("attempt_started", T0, number)
        return number

    def tell(self, title: str, text: str, fingerprint: str = "") -> None:
        self.told.append(f"{title}: {text}")


KIND = "activation_checkpoint_mismatch"
POLICY = Policy("act", (f"{KIND}:loss_reentrant",))
HUNG = replace(crashed("segfault", step=4), state=State.HUNG, diagnosis=None, stacks="x")


def decided(book: Book, situation: Any = None, policy: Policy = POLICY) -> Decision:
    seen = situation if situation is not None else crashed(KIND, T0, step=4)
    return decide(seen, PLAYBOOKS, book.ledger, policy, T0)


def test_announced_first_then_ended_waited_written_and_started() -> None:
    book = Book()
    world = World(book)
    done = carry_out(decided(book), world, book.ledger)
    assert world.calls == [
        "journal action_intended", "end", "wait memory", "overlay", "start fresh=False", "journal action_done",
    ]  # fmt: skip
    assert done.attempt == 2
    assert world.overlay.set == {"loss.mode": "checkpoint", "loss.reentrant": True}
    assert book.ledger.pending is None
    assert book.ledger.awaiting == world.attempts[2]


@pytest.mark.parametrize("situation", [None, HUNG], ids=["change", "hang"])
def test_killed_between_any_two_steps_it_is_finished_and_nothing_is_done_twice(situation: Any) -> None:
    for die_at in range(12):
        book = Book()
        world = World(book, die_at=die_at)
        first = decided(book, situation)
        try:
            carry_out(first, world, book.ledger)
        except Killed:
            world.die_at = None
            if 2 not in world.attempts:
                second = decided(book, situation)
                assert second.id == first.id
                assert second.resumes == (die_at > 0)
                before = replace(book.ledger, layers=()) if first.layer else book.ledger
                carry_out(second, world, before)
        assert list(world.attempts) == [1, 2], f"killed before call {die_at}"
        assert world.alive == {2}
        assert sum(e.event == "action_intended" for e in book.events) == 1
        found = book.ledger.find(first.id)
        assert found is not None
        assert found[1].started == 2
        if first.layer is not None:
            assert world.overlay.layers == (first.layer,)


def test_a_lost_lease_ends_it_before_the_next_step() -> None:
    for lose_at in range(5):
        book = Book()
        world = World(book, lose_at=lose_at)
        with pytest.raises(LeaseLost):
            carry_out(decided(book), world, book.ledger)
        assert "start fresh=False" not in world.calls
        assert "journal action_done" not in world.calls
    assert World(Book(), lose_at=0).fenced() is False


@pytest.mark.parametrize("fail", ["end", "wait memory", "start"])
def test_what_cannot_be_done_is_written_down_and_its_change_taken_back(fail: str) -> None:
    book = Book()
    world = World(book, fail=fail)
    done = carry_out(decided(book), world, book.ledger)
    assert f"{fail}" in done.error
    assert world.calls[-1] == "journal action_failed"
    assert world.overlay == Overlay()
    assert book.ledger.layers == ()
    assert decided(book).verdict is Verdict.HOLD, "an action that failed is not tried a second time"


def test_stacks_only_are_looked_at() -> None:
    book = Book()
    world = World(book)
    carry_out(decided(book, replace(HUNG, stacks=None)), world, book.ledger)
    assert world.calls == ["journal action_intended", "dump_stacks", "journal action_done"]
    assert world.alive == {1}


def test_checkpoints_go_aside_after_the_end_and_before_the_start() -> None:
    seen = crashed(
        "corrupted_checkpoint",
        checkpoints=(CheckpointSeen(100, "c/100", False), CheckpointSeen(50, "c/50", True)),
    )
    book = Book()
    world = World(book)
    carry_out(decided(book, seen), world, book.ledger)
    assert world.aside == [50]
    assert [c.split(" ")[0] for c in world.calls] == ["journal", "end", "wait", "aside", "overlay", "start", "journal"]
    fresh = replace(seen, checkpoints=(CheckpointSeen(100, "c/100", False),))
    book = Book()
    world = World(book)
    policy = Policy("act", ("corrupted_checkpoint:fresh_start_aside",))
    carry_out(decided(book, fresh, policy), world, book.ledger)
    assert world.aside == [None]
    assert "start fresh=True" in world.calls


def test_a_free_port_is_chosen_at_the_start() -> None:
    book = Book()
    world = World(book)
    carry_out(decided(book, crashed("port_in_use")), world, book.ledger)
    assert world.overlay.env == {"MASTER_PORT": "23456"}
    assert book.ledger.layers[0].env == {"MASTER_PORT": "{free_port}"}, "the next start chooses anew"


def test_what_may_not_be_done_is_not_carried_out() -> None:
    book = Book()
    for policy in (Policy("observe"), Policy("act", quiet=("segfault",))):
        with pytest.raises(ValueError, match="not for carrying out"):
            carry_out(decided(book, crashed("segfault"), policy), World(book), book.ledger)
    assert book.events == []


def test_a_person_is_told_once_that_nothing_is_left() -> None:
    book = Book()
    world = World(book)
    for _ in range(3):
        say_held(decided(book, crashed("device_side_assert")), world, book.ledger)
    assert world.calls == ["journal held"]
    assert len(world.told) == 1
    assert "dflash-ops triage --job main" in world.told[0]
