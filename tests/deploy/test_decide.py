"""What a deploy decides from what is there: nothing is sent twice, nothing that runs is touched unasked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_ops.contracts import LIVE_STATES, Progress, Snapshot, State
from dflash_ops.deploy.decide import Options, Refused, busy, decide, describe, refusal
from dflash_ops.errors import JobBusy
from dflash_ops.resident.preflight import Check
from dflash_ops.resident.probe import Probe

NOTHING = Probe(now=1.0, release="missing", resident=False)
RUNS = replace(
    NOTHING, release="whole", resident=True, launcher=7,
    snapshot=Snapshot("j", 1.0, State.STEPPING, 0.0, attempt=3, progress=Progress(t=1.0, step=12, total=50)),
)  # fmt: skip


def test_what_is_missing_or_damaged_is_sent() -> None:
    assert decide(NOTHING).send_release
    assert decide(NOTHING).send_resident
    assert decide(replace(NOTHING, release="damaged")).send_release
    assert not decide(RUNS).send_release
    assert not decide(RUNS).send_resident
    assert not decide(replace(NOTHING, release="none")).send_release


@pytest.mark.parametrize("state", list(State))
def test_a_job_that_lives_is_busy_unless_it_is_to_be_replaced(state: State) -> None:
    assert RUNS.snapshot is not None
    probe = replace(RUNS, launcher=None, snapshot=replace(RUNS.snapshot, state=state))
    error = busy(probe, Options(), "j", "h")
    assert (error is not None) == (state in LIVE_STATES)
    assert decide(probe).stop == (state in LIVE_STATES)
    assert busy(probe, Options(replace=True), "j", "h") is None


def test_a_living_launcher_counts_whatever_the_records_say() -> None:
    probe = replace(RUNS, snapshot=Snapshot("j", 1.0, State.UNKNOWN, 0.0, "start.json is damaged"))
    assert decide(probe).stop
    error = busy(probe, Options(), "j", "h")
    assert error is not None
    assert error.exit_code == 4
    assert "--replace --resume" in error.next


def test_failures_are_told_all_at_once_and_a_taken_name_alone_is_busy() -> None:
    session = Check("session", "failed", "taken", "end it")
    disk = Check("disk", "failed", "full", "make room")
    fine = (Check("root", "ok", "fine"), Check("shm", "warn", "w", "x"), Check("config", "skipped", "later"))
    assert refusal(fine, "h") is None
    assert isinstance(refusal((*fine, session), "h"), JobBusy)
    both = refusal((*fine, session, disk), "h")
    assert isinstance(both, Refused)
    assert both.exit_code == 3
    assert [e.next for e in both.errors] == ["end it", "make room"]


def test_words_for_a_running_attempt() -> None:
    assert describe(RUNS.snapshot, 1.0) == "attempt 3 is stepping, step 12/50"
    assert describe(None, 1.0) == "an attempt runs"
