"""Health: one truth for each kind of evidence (docs/contracts.md, States)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.contracts import LIVE_STATES, ExitRecord, Limits, Progress, StageInfo, State
from dflash_ops.supervise.health import Evidence, assess, quantile, warnings

LIMITS = Limits(loading_s=100, compiling_s=200, step_s=30, slow_factor=0.5)
T0 = 1_000_000.0
ALIVE = Evidence(attempt=2, started=T0, launcher_alive=True, wrapper_alive=True)


def stepping(at: float, step: int = 7, **more: Any) -> Evidence:
    return replace(ALIVE, stage=StageInfo("stepping"), progress=Progress(at, step, 100), sign_t=at, output_t=at, **more)


def state(evidence: Evidence, now: float = T0 + 1) -> State:
    return assess(evidence, now, LIMITS).state


def test_nothing_was_ever_started() -> None:
    verdict = assess(Evidence(), T0, LIMITS)
    assert (verdict.state, verdict.detail) == (State.UNKNOWN, "never started")


# -- ended -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rc", "signal", "requested", "expected", "words"),
    [
        (0, None, None, State.FINISHED, "exit code 0 (finished)"),
        (3, None, None, State.STOPPED, "exit code 3"),
        (3, None, "TERM", State.STOPPED, "after TERM from outside"),
        (None, "SIGINT", "INT", State.STOPPED, "after Ctrl-C"),
        (None, "SIGKILL", "stop", State.STOPPED, "on request (ended by SIGKILL)"),
        (None, "SIGKILL", None, State.CRASHED, "ended by SIGKILL"),
        (None, "SIGTERM", None, State.STOPPED, "SIGTERM"),
        (1, None, None, State.CRASHED, "exit code 1"),
        (4, None, None, State.CRASHED, "the loss was not finite"),
    ],
)
def test_an_exit_record_decides(
    rc: int | None, signal: str | None, requested: str | None, expected: State, words: str
) -> None:
    record = ExitRecord(2, rc, signal, T0 + 50, 50.0, requested)
    verdict = assess(replace(stepping(T0 + 40), launcher_alive=False, exit=record), T0 + 900, LIMITS)
    assert verdict.state is expected
    assert words in verdict.detail
    assert verdict.since == T0 + 50


def test_an_exit_record_says_why_it_could_not_be_started() -> None:
    record = ExitRecord(2, 127, None, T0, 0.0, detail="/x/python: No such file or directory")
    verdict = assess(Evidence(attempt=2, exit=record), T0 + 1, LIMITS)
    assert verdict.state is State.CRASHED
    assert "/x/python: No such file" in verdict.detail


def test_a_jobs_own_codes_of_success_count() -> None:
    record = ExitRecord(2, 17, None, T0, 1.0)
    assert state(replace(ALIVE, exit=record, finished_rc=(0, 17))) is State.FINISHED
    assert state(replace(ALIVE, exit=record)) is State.CRASHED


# -- gone without a record -----------------------------------------------------------------------------------------

GONE = replace(stepping(T0 + 40), launcher_alive=False, wrapper_alive=False)


def test_gone_without_a_record_is_a_crash_with_unknown_exit() -> None:
    verdict = assess(GONE, T0 + 60, LIMITS)
    assert verdict.state is State.CRASHED
    assert "exit unknown" in verdict.detail
    assert verdict.since == T0 + 40


def test_a_reboot_is_named() -> None:
    assert "rebooted" in assess(replace(GONE, rebooted=True), T0 + 60, LIMITS).detail


def test_a_recorded_stop_is_no_crash_even_without_a_record() -> None:
    assert state(replace(GONE, stop_requested=True)) is State.STOPPED


def test_the_trainers_own_last_word_counts_when_its_code_was_lost() -> None:
    assert state(replace(GONE, last_event="finished")) is State.FINISHED
    assert state(replace(GONE, last_event="stopped")) is State.STOPPED
    assert state(replace(GONE, last_event="checkpoint")) is State.CRASHED


def test_a_wrapper_that_cannot_write_is_not_guessed_over() -> None:
    assert state(replace(GONE, wrapper_alive=True)) is State.UNKNOWN


def test_a_start_at_work_and_a_start_cut_short() -> None:
    half = Evidence(attempt=3)
    assert state(replace(half, starting=True)) is State.LOADING
    assert state(half) is State.CRASHED
    assert state(replace(half, damaged=("run/attempts/3/start.json",))) is State.UNKNOWN


# -- alive -----------------------------------------------------------------------------------------------------------


def test_loading_counts_and_then_hangs() -> None:
    loading = replace(ALIVE, stage=StageInfo("loading", 1, 3, "target0"), sign_t=T0 + 5, output_t=T0 + 5)
    verdict = assess(loading, T0 + 50, LIMITS)
    assert (verdict.state, verdict.detail, verdict.since) == (State.LOADING, "loading 1 of 3 (target0)", T0 + 5)
    hung = assess(loading, T0 + 106, LIMITS)
    assert hung.state is State.HUNG
    assert "while loading" in hung.detail
    assert hung.since == T0 + 105


def test_compiling_has_its_own_limit() -> None:
    compiling = replace(ALIVE, stage=StageInfo("compiling"), sign_t=T0, output_t=T0)
    assert state(compiling, T0 + 150) is State.COMPILING
    assert state(compiling, T0 + 201) is State.HUNG


def test_a_foreign_trainer_that_says_nothing_readable_is_not_hung_while_it_writes() -> None:
    silent = replace(ALIVE, output_t=T0 + 5000)
    verdict = assess(silent, T0 + 5050, LIMITS)
    assert (verdict.state, verdict.detail) == (State.LOADING, "running, no progress lines seen yet")
    assert state(silent, T0 + 5101) is State.HUNG
    assert state(ALIVE, T0 + 99) is State.LOADING


def test_noise_does_not_hide_a_hang_once_steps_came() -> None:
    noisy = replace(stepping(T0 + 10), output_t=T0 + 500)
    verdict = assess(noisy, T0 + 500, LIMITS)
    assert verdict.state is State.HUNG
    assert "step 7 of 100" in verdict.detail
    assert verdict.since == T0 + 40


def test_the_limit_follows_the_runs_own_pace() -> None:
    slow_lines = stepping(T0 + 1000, gaps=(60.0,) * 50)
    assert state(slow_lines, T0 + 1000 + 179) is State.STEPPING
    assert state(slow_lines, T0 + 1000 + 181) is State.HUNG


def test_the_pace_known_before_the_observer_was_restarted_still_holds() -> None:
    assert state(stepping(T0, p99_floor_s=60.0), T0 + 170) is State.STEPPING


def test_saving_may_take_as_long_as_loading() -> None:
    saving = replace(stepping(T0), stage=StageInfo("saving"))
    assert state(saving, T0 + 90) is State.STEPPING
    assert state(saving, T0 + 101) is State.HUNG


def test_slow_is_against_the_runs_own_median() -> None:
    usual = (1.0,) * 20
    assert state(stepping(T0, step_s=(*usual, 1.9, 1.9, 1.9, 1.9))) is State.STEPPING
    verdict = assess(stepping(T0, step_s=(*usual, 2.5, 2.5, 2.5, 2.5)), T0 + 1, LIMITS)
    assert verdict.state is State.SLOW
    assert "40%" in verdict.detail


def test_one_slow_step_is_not_slow_and_neither_is_a_young_run() -> None:
    assert state(stepping(T0, step_s=(*(1.0,) * 20, 30.0))) is State.STEPPING
    assert state(stepping(T0, step_s=(1.0, 1.0, 9.0, 9.0, 9.0, 9.0))) is State.STEPPING


def test_slow_ends_only_with_a_margin() -> None:
    speed_55 = (*(1.0,) * 20, 1.8, 1.8, 1.8, 1.8)
    assert state(stepping(T0, step_s=speed_55)) is State.STEPPING
    assert state(stepping(T0, step_s=speed_55, previous=State.SLOW, previous_since=T0 - 9)) is State.SLOW


def test_since_is_kept_while_the_state_stays() -> None:
    first = assess(stepping(T0 + 3), T0 + 3, LIMITS)
    later = replace(stepping(T0 + 9, 9), previous=first.state, previous_since=first.since)
    assert assess(later, T0 + 9, LIMITS).since == T0 + 3


# -- warnings --------------------------------------------------------------------------------------------------------


def test_who_else_died_is_a_warning_not_a_state() -> None:
    alone = replace(stepping(T0), wrapper_alive=False)
    assert state(alone) is State.STEPPING
    told = warnings(alone, session_alive=False)
    assert any("wrapper is gone" in w for w in told)
    assert any("tmux session is gone" in w for w in told)
    assert warnings(stepping(T0), session_alive=True) == ()
    assert warnings(stepping(T0), session_alive=None) == ("tmux does not answer",)


def test_lost_log_bytes_are_told() -> None:
    ended = replace(GONE, exit=ExitRecord(2, 0, None, T0, 1.0, log_lost_bytes=77))
    assert any("77 bytes" in w for w in warnings(ended, None))


# -- over all ----------------------------------------------------------------------------------------------------------

TIMES = st.none() | st.floats(T0, T0 + 1e5)


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Evidence,
        attempt=st.none() | st.integers(1, 9),
        started=TIMES,
        exit=st.none() | st.builds(ExitRecord, st.just(1), st.integers(0, 9), st.none(), st.just(T0), st.just(1.0)),
        launcher_alive=st.booleans(),
        wrapper_alive=st.booleans(),
        starting=st.booleans(),
        stop_requested=st.booleans(),
        rebooted=st.booleans(),
        stage=st.none() | st.sampled_from(["loading", "compiling", "stepping", "saving", "odd"]).map(StageInfo),
        last_event=st.sampled_from(["", "finished", "stopped"]),
        output_t=TIMES,
        sign_t=TIMES,
        gaps=st.lists(st.floats(0, 1e4), max_size=20).map(tuple),
        step_s=st.lists(st.floats(0, 1e4), max_size=20).map(tuple),
        previous=st.none() | st.sampled_from(sorted(LIVE_STATES)),
        previous_since=TIMES,
    ),
    st.floats(T0, T0 + 1e6),
)
def test_no_evidence_breaks_it_and_the_dead_are_never_said_to_live(evidence: Evidence, now: float) -> None:
    verdict = assess(evidence, now, LIMITS)
    assert verdict.state is not State.UNREACHABLE
    if evidence.attempt is not None and evidence.exit is None and evidence.launcher_alive:
        assert verdict.state in LIVE_STATES
    elif not (evidence.starting and evidence.started is None):
        assert verdict.state not in LIVE_STATES
    if evidence.stop_requested and evidence.exit is None and not evidence.launcher_alive and evidence.started:
        assert verdict.state is not State.CRASHED


def test_quantile_is_the_smallest_value_that_covers_the_share() -> None:
    assert quantile((), 0.5) is None
    assert quantile((5.0,), 0.99) == 5.0
    for n, q in itertools.product((1, 2, 3, 10, 99, 100, 101), (0.01, 0.5, 0.99, 1.0)):
        values = [float(i) for i in range(n)]
        found = quantile(values, q)
        assert found is not None
        assert sum(v <= found for v in values) >= q * n
        assert sum(v < found for v in values) < q * n
