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
    events = pace(layout)["events"]
    assert (events[0]["event"], events[0]["attempt"]) == ("rebalancing", 1)
    assert events[-1]["attempt"] == 41
    assert len(events) <= 20
