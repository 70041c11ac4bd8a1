"""What a rebalance is told of the changes before it."""

from __future__ import annotations

from pathlib import Path

from dflash_ops.contracts import Layout
from dflash_ops.resident import journal
from dflash_ops.resident.pace import pace


def test_a_change_that_was_never_measured_is_told_however_often_the_job_was_started_since(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.run.mkdir()
    journal.append(layout.journal, "rebalancing", attempt=1, data={"to": {"targets": 2, "drafters": 1}})
    for number in range(2, 42):
        journal.append(layout.journal, "attempt_started", attempt=number)
    said = pace(layout)
    events = said["events"]
    assert said["events_note"] == ""
    assert (events[0]["event"], events[0]["attempt"]) == ("rebalancing", 1)
    assert events[-1]["attempt"] == 41
    assert len(events) <= 20


def test_a_journal_that_cannot_be_read_is_named_and_does_not_look_like_one_without_a_change(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.journal.mkdir(parents=True)
    said = pace(layout)
    assert said["events"] == []
    assert said["events_note"].startswith("the journal cannot be read: ")
    assert "Is a directory" in said["events_note"]
