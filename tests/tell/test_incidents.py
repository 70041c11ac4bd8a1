"""Incidents, told from a journal: one that a supervised job wrote, and single turns that it did not take."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash_ops.contracts import Event, IncidentState, decode_journal
from dflash_ops.tell.incidents import incidents
from dflash_ops.view.incidents import table, whole

DATA = Path(__file__).resolve().parents[1] / "data" / "incidents"


def recorded() -> list[Event]:
    events, torn = decode_journal((DATA / "journal.jsonl").read_bytes())
    assert not torn
    return events


def journal(*said: tuple[str, int | None, dict[str, Any]], actor: str = "resident") -> list[Event]:
    """Events ten seconds apart; `supervisor` for its own ones."""
    own = {"diagnosed", "progress", "held", "finding"}
    return [
        Event(n, 1000.0 + 10 * n, event, "supervisor" if event.startswith("action") or event in own else actor, a, d)
        for n, (event, a, d) in enumerate(said, 1)
    ]


def crash(attempt: int, step: int | None) -> tuple[str, int, dict[str, Any]]:
    return ("attempt_exited", attempt, {"state": "crashed", "step": step, "detail": "exit code 1"})


def named(attempt: int, step: int | None, fingerprint: str) -> tuple[str, int, dict[str, Any]]:
    data = {"kind": f"kind_{fingerprint}", "title": fingerprint, "fingerprint": fingerprint, "step": step}
    return ("diagnosed", attempt, {**data, "confidence": 0.9})


def deed(id: str, attempt: int, started: int) -> list[tuple[str, int, dict[str, Any]]]:
    decision = {"id": id, "action": "restart", "attempt": attempt, "reason": "r", "command": "c"}
    return [
        ("action_intended", attempt, {"decision": decision}),
        ("attempt_started", started, {"decision": id}),
        ("action_done", attempt, {"id": id, "attempt": started}),
    ]


def outcome(id: str, attempt: int, said: str) -> tuple[str, int, dict[str, Any]]:
    return ("action_outcome", attempt, {"id": id, "outcome": said, "detail": "d"})


def test_a_night_is_told_as_it_was() -> None:
    """FX error, reentrant does not help, one process a device does; a SIGKILL; an error that a person must look at."""
    out = Console(file=io.StringIO(), width=110, no_color=True, highlight=False)
    found = incidents(recorded())
    out.print(table(found))
    for one in found:
        for line in whole(one, "tiny"):
            out.print(line, soft_wrap=True)
    said = "\n".join(line.rstrip() for line in out.file.getvalue().splitlines()) + "\n"  # type: ignore[attr-defined]
    assert said == (DATA / "night.txt").read_text("utf-8")


def test_numbers_never_change_while_the_journal_grows() -> None:
    events = recorded()
    last = incidents(events)
    for n in range(len(events) + 1):
        so_far = incidents(events[:n])
        assert [one.number for one in so_far] == list(range(1, len(so_far) + 1))
        for one in so_far:
            if one.fingerprint:
                assert last[one.number - 1].fingerprint == one.fingerprint
            if one.proof is not None:
                assert last[one.number - 1].proof == one.proof


def test_another_failure_is_another_incident_unless_our_change_brought_it() -> None:
    begin: tuple[str, int, dict[str, Any]] = ("attempt_started", 1, {})
    story = [begin, crash(1, 5), named(1, 5, "a"), *deed("x", 1, 2), crash(2, 3), named(2, 3, "b")]
    changed = incidents(journal(*story, outcome("x", 2, "changed")))
    assert [(one.attempts, one.fingerprint) for one in changed] == [((1,), "a"), ((2,), "b")]
    assert changed[1].lines[0].text == "attempt 2 crashed at step 3: exit code 1"
    (worse,) = incidents(journal(*story, outcome("x", 2, "worse")))
    assert (worse.attempts, worse.fingerprint) == ((1, 2), "a")
    assert worse.lines[-1].text == "restart: it made things worse, and is taken back (d)"


def test_a_hang_begins_with_its_silence_and_its_stacks_belong_to_it() -> None:
    stacks = {"decision": {"id": "s", "action": "dump_stacks", "attempt": 1, "kind": "hang"}}
    (one,) = incidents(
        journal(
            ("attempt_started", 1, {}),
            ("state", 1, {"state": "hung", "since": 900.0, "detail": "no step for 300 s"}),
            ("action_intended", 1, stacks),
            ("action_done", 1, {"id": "s", "attempt": None}),
            named(1, 7, "h"),
            *deed("x", 1, 2),
            ("progress", 2, {"step": 8}),
        )
    )
    assert one.lines[0].text == "attempt 1 hangs: no step for 300 s"
    assert [d.action for d in one.deeds] == ["dump_stacks", "restart"]
    assert one.state is IncidentState.REPAIRED
    assert one.down_s == pytest.approx(1090.0 - 900.0)


def test_what_is_not_known_is_said_so_and_never_a_number() -> None:
    (one,) = incidents(journal(crash(1, 5), named(1, 5, "a"), *deed("x", 1, 2), ("progress", 2, {"step": 6})))
    assert one.lost_steps is None  # no checkpoint, and no word of what it went on from
    assert "not known" in "\n".join(map(str, whole(one, "j")))
    (one,) = incidents(journal(crash(1, None), ("attempt_started", 2, {}), ("progress", 2, {"step": 1})))
    assert one.lost_steps == 0
    (one,) = incidents(journal(crash(1, 5)))
    assert (one.lost_steps, one.down_s, one.state) == (None, None, IncidentState.OPEN)


def test_a_person_who_repairs_it_is_not_the_supervisor() -> None:
    said = (crash(1, 5), ("attempt_started", 2, {"reason": "lr"}), ("checkpoint", 2, {"step": 10, "path": "p"}))
    (one,) = incidents(journal(*said, actor="operator ada@desk"))
    assert one.state is IncidentState.PASSED
    assert one.lines[1].who == "operator ada@desk"
    aside = ("checkpoints_aside", None, {"to": "x"})  # a person's fresh start counts its steps from nothing
    said = (crash(1, 500), aside, ("attempt_started", 2, {}), ("checkpoint", 2, {"step": 10, "path": "p"}))
    (one,) = incidents(journal(*said, actor="operator ada@desk"))
    assert one.state is IncidentState.PASSED
    stop = ("stop_requested", 1, {"reason": "enough"})
    (one,) = incidents(journal(crash(1, 5), stop, actor="operator ada@desk"))
    assert one.state is IncidentState.STOPPED


def test_a_step_reached_before_the_next_crash_ends_the_first_incident() -> None:
    first, second = incidents(journal(crash(1, 5), ("attempt_started", 2, {}), crash(2, 9)))
    assert first.proof is not None
    assert first.proof.step == 9
    assert second.attempts == (2,)


@pytest.mark.parametrize("data", [{}, {"decision": 3}, {"decision": {"attempt": "x", "evidence": [3]}}, {"step": "x"}])
def test_an_event_of_another_form_is_no_reason_to_fail(data: dict[str, Any]) -> None:
    names = {e.event for e in recorded()}
    for n, name in enumerate(sorted(names)):
        for attempt in (None, 1):
            incidents([*journal(crash(1, 5)), Event(50 + n, 2000.0, name, "supervisor", attempt, data)])
