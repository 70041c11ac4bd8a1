"""The ledger is the journal's: killed at any prefix it is consistent, loses nothing and repeats nothing."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from supervise_support import PLAYBOOKS, T0, Book, crashed, policies, situations

from dflash_ops.contracts import (
    Event,
    Ledger,
    Outcome,
    Policy,
    Verdict,
    decode_journal,
    dumps,
    encode_event,
    from_dict,
    to_dict,
)
from dflash_ops.supervise.decide import decide
from dflash_ops.supervise.ledger import fold, rebuild
from dflash_ops.supervise.notice import held, notice

GOLDEN = Path(__file__).resolve().parents[1] / "data/contracts"


def journal(seed: int, rounds: int = 60) -> Book:
    """A random life, with every kind of event in it."""
    rng = random.Random(seed)
    book, policy, now, attempt, step = Book(), replace(policies(rng), mode="act"), T0, 1, 0
    book.add("attempt_started", now, attempt, by="operator")
    for _ in range(rounds):
        now += rng.choice([1.0, 60.0, 900.0])
        seen = situations(rng, now, attempt, step)
        for note in notice(seen, PLAYBOOKS, book.ledger, now):
            book.add(note.event, now, note.attempt, **note.data)
        decision = decide(seen, PLAYBOOKS, book.ledger, policy, now, rng.random)
        if decision.verdict is Verdict.ACT:
            book.intend(decision, now)
            if rng.random() < 0.8:
                if decision.starts:
                    attempt += 1
                    book.add("attempt_started", now, attempt)
                book.add("action_done", now, attempt, id=decision.id, attempt=attempt)
            else:
                book.add("action_failed", now, attempt, id=decision.id, error="x")
        elif (note := held(decision)) is not None:
            book.add(note.event, now, note.attempt, **note.data)
        step += rng.randrange(0, 40)
        if rng.random() < 0.05:
            book.add("attempt_exited", now, attempt, by="resident", state="crashed", step=step)
        if rng.random() < 0.02:
            book.add(rng.choice(["supervise_reset", "checkpoints_aside", "note"]), now, attempt, by="operator")
    return book


@pytest.mark.parametrize("seed", range(5))
def test_rebuilt_from_the_journal_alone_at_every_prefix(seed: int) -> None:
    book = journal(seed)
    assert len({e.event for e in book.events}) >= 5
    raw = b"".join(map(encode_event, book.events))
    events, torn = decode_journal(raw)
    assert torn == 0
    ledger = Ledger()
    for number, event in enumerate(events, 1):
        ledger = fold(ledger, event)
        if number % 7 == 0 or number == len(events):
            assert rebuild(events[:number]) == ledger
            # a copy on disk, taken at any time, and the journal give the same
            kept = from_dict(Ledger, json.loads(dumps(ledger)))
            assert rebuild(events, kept) == rebuild(events)
    assert ledger == book.ledger


def test_an_event_counts_once_however_often_it_is_read() -> None:
    book = journal(11, 30)
    assert rebuild([e for e in book.events for _ in range(2)]) == book.ledger
    assert rebuild([*book.events, *book.events]) == book.ledger


def test_a_kill_at_any_byte_of_the_journal_repeats_nothing() -> None:
    """Whatever the next supervisor reads: it finishes what was announced, or goes on; it never announces it again."""
    policy = Policy("act")
    book = Book()
    book.add("attempt_started", T0, 1, by="operator")
    seen = crashed("segfault", T0 + 10, step=3)
    for note in notice(seen, PLAYBOOKS, book.ledger, T0 + 10):
        book.add(note.event, T0 + 10, note.attempt, **note.data)
    decision = decide(seen, PLAYBOOKS, book.ledger, policy, T0 + 10)
    book.intend(decision, T0 + 10)
    book.add("attempt_started", T0 + 11, 2)
    book.add("action_done", T0 + 11, 1, id=decision.id, attempt=2)
    raw = b"".join(map(encode_event, book.events))
    results: Counter[str] = Counter()
    for cut in range(0, len(raw) + 1, 13):
        ledger = rebuild(decode_journal(raw[:cut])[0])
        if ledger.find(decision.id) is None:
            results["not announced"] += 1
            assert ledger.idle_starts == ()
            continue
        again = decide(seen, PLAYBOOKS, ledger, policy, T0 + 12)
        if ledger.attempt == 1:
            results["announced"] += 1
            assert (again.id, again.resumes) == (decision.id, True)
        else:
            results["done"] += 1
            found = ledger.find(decision.id)
            assert found is not None
            assert (found[1].outcome, found[1].started, ledger.awaiting) == (Outcome.DONE, 2, decision.id)
            assert ledger.pending is None
            later = decide(replace(seen, attempt=2, t=T0 + 900, since=T0 + 890), PLAYBOOKS, ledger, policy, T0 + 900)
            assert later.id != decision.id
        assert ledger.idle_starts == (T0 + 10,)
    assert set(results) == {"not announced", "announced", "done"}


def test_the_golden_journal_folds() -> None:
    events, _ = decode_journal((GOLDEN / "journal.jsonl").read_bytes())
    reset = next(i for i, e in enumerate(events) if e.event == "supervise_reset")
    until_reset = rebuild(events[:reset])
    assert until_reset.mark == 121
    assert until_reset.told == {"gpu_xid:": 1764444616.0}
    assert rebuild(events).told == {}, "a person's reset begins anew"
    assert rebuild(events).mark == until_reset.mark


def test_an_announcement_that_is_not_understood_still_counts() -> None:
    strange = {"id": "77", "action": "teleport", "fingerprint": "f", "starts": True, "schema": 99}
    book = Book()
    book.add("action_intended", T0, 1, decision=strange)
    book.add("action_intended", T0 + 1, 1)
    assert book.ledger.idle_starts == (T0, T0 + 1)
    assert book.ledger.find("77") is not None
    assert book.ledger.pending == "seq2"


@pytest.mark.parametrize("event", ["diagnosed", "progress", "action_done", "action_failed", "action_outcome", "held"])
def test_events_without_their_data_change_nothing_that_matters(event: str) -> None:
    before = rebuild(journal(3, 20).events)
    after = fold(before, Event(before.seq + 1, T0, event, "supervisor", 1, {"step": "x", "id": 3, "outcome": "?"}))
    assert (after.idle_starts, after.pending, after.layers) == (before.idle_starts, before.pending, before.layers)


def test_a_persons_start_takes_our_changes_back_and_clears_the_stop() -> None:
    book = Book()
    policy = Policy("act", ("activation_checkpoint_mismatch:loss_reentrant",))
    seen = crashed("activation_checkpoint_mismatch", T0, step=3)
    book.intend(decide(seen, PLAYBOOKS, book.ledger, policy, T0), T0)
    book.add("attempt_started", T0 + 1, 2)
    assert [x.action for x in book.ledger.layers] == ["loss_reentrant"]
    book.add("stop_requested", T0 + 2, 2, by="operator ada@desk")
    book.add("attempt_started", T0 + 3, 3, by="operator ada@desk")
    assert (book.ledger.layers, book.ledger.stopped, book.ledger.awaiting) == ((), False, None)
    again = decide(replace(seen, attempt=3, t=T0 + 400, since=T0 + 400), PLAYBOOKS, book.ledger, policy, T0 + 400)
    assert again.verdict is Verdict.HOLD, "it was tried for this failure, whoever started since"


def test_the_ledger_stays_small() -> None:
    book = Book()
    for i in range(700):
        data = {"fingerprint": f"f{i}", "kind": "segfault", "step": None}
        book.add("diagnosed", T0 + i, i, **data)
        book.add("finding", T0 + i, i, name=f"n{i}")
        book.add("held", T0 + i, i, fingerprint=f"f{i}")
    assert max(len(book.ledger.cases), len(book.ledger.told), len(book.ledger.held)) <= 200
    assert "f699" in book.ledger.cases
    assert len(dumps(to_dict(book.ledger))) < 100_000
