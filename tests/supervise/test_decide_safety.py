"""No unsafe action, ever: 10^5 random evidences in random histories, and hypothesis on top."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervise_support import PLAYBOOKS, T0, Book, Laws, policies, situations

from dflash_ops.contracts import Ledger, Verdict
from dflash_ops.supervise.decide import decide
from dflash_ops.supervise.notice import held, notice

#: In parts, so that several processes can share them.
ROUNDS, PARTS = 100_000, 4


def history(rng: random.Random, rounds: int, seen: Counter[str]) -> int:
    """One job's life of up to `rounds` looks; gives how many there were. The world does with it what it likes."""
    book, laws, policy = Book(), Laws(), policies(rng)
    now, attempt, step = T0, 1, None
    add = book.add
    add("attempt_started", now, attempt, by="operator")

    def tell(*events: object) -> None:
        for event in book.events[laws_read[0] :]:
            laws.read(event)
        laws_read[0] = len(book.events)

    laws_read = [0]
    for number in range(rounds):
        now += rng.choice([0.5, 1.0, 1.0, 4.0, 30.0, 700.0])
        situation = situations(rng, now, attempt if rng.random() > 0.01 else None, step)
        for note in notice(situation, PLAYBOOKS, book.ledger, now):
            add(note.event, now, note.attempt, **note.data)
        tell()
        before = book.ledger
        decision = decide(situation, PLAYBOOKS, before, policy, now, rng.random)
        broken = laws.broken(decision, situation, policy, now)
        assert not broken, (broken, decision, situation, policy)
        assert decision.reason
        seen[f"{decision.verdict.value} {decision.action}"] += 1
        if decision.verdict is Verdict.ACT:
            book.intend(decision, now)
            fate = rng.random()
            if fate < 0.65:
                if decision.starts:
                    attempt += 1
                    step = None
                    add("attempt_started", now, attempt)
                add("action_done", now, attempt - decision.starts, id=decision.id, attempt=attempt)
            elif fate < 0.75:
                add("action_failed", now, attempt, id=decision.id, error="no")
            # else: the supervisor was killed there
        elif (note := held(decision)) is not None:
            add(note.event, now, note.attempt, **note.data)
        if rng.random() < 0.3:
            step = (step or 0) + rng.randrange(1, 80)
        if rng.random() < 0.02:
            add("stop_requested", now, attempt, by="operator ada@desk")
        if rng.random() < 0.03:
            attempt, step = attempt + 1, None
            add("attempt_started", now, attempt, by="operator ada@desk")
        tell()
        if book.ledger.stopped and rng.random() < 0.5:
            return number + 1
    return rounds


@pytest.mark.parametrize("seed", range(PARTS))
def test_a_hundred_thousand_random_evidences_give_no_unsafe_action(seed: int) -> None:
    rng = random.Random(20251129 + seed)
    seen: Counter[str] = Counter()
    done = 0
    while done < ROUNDS // PARTS:
        done += history(rng, 60, seen)
    # The worlds are not so poor that nothing is ever done in them.
    acts = {name.split(" ")[1]: count for name, count in seen.items() if name.startswith("act ")}
    assert len(acts) >= 15, acts
    assert sum(acts.values()) > done / 50
    for verdict in Verdict:
        assert any(name.startswith(verdict.value) for name in seen), verdict


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**64), st.integers(5, 40))
def test_hypothesis_finds_no_unsafe_action(seed: int, rounds: int) -> None:
    history(random.Random(seed), rounds, Counter())


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.floats(0, 1))
def test_any_evidence_is_answered(rng: random.Random, jitter: float) -> None:
    situation = situations(rng, T0, rng.choice([None, 1, 7]), rng.choice([None, 0, 10]))
    decision = decide(situation, PLAYBOOKS, Ledger(), policies(rng), T0, lambda: jitter)
    assert decision.reason
