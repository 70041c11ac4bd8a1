"""The drawn state machine: page, table and health agree, and nothing leaves the drawing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.contracts import ExitRecord, Limits, Progress, StageInfo, State
from dflash_ops.supervise.health import Evidence, assess
from dflash_ops.supervise.learned import Learned, learn, limits
from dflash_ops.supervise.machine import TRANSITIONS, drawn, follow

DOC = (Path(__file__).resolve().parents[2] / "docs/supervise.md").read_text("utf-8")
T0 = 1_000_000.0


def test_the_page_draws_what_the_table_allows() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", DOC, re.MULTILINE)
    page = {State(a): frozenset(State(b) for b in re.findall(r"`(\w+)`", bs)) for a, bs in rows}
    assert page == TRANSITIONS


evidences = st.builds(
    Evidence,
    attempt=st.just(1),
    started=st.sampled_from([None, T0]),
    exit=st.sampled_from(
        [None, None, None, ExitRecord(1, 0, None, T0 + 9, 9.0), ExitRecord(1, 1, None, T0 + 9, 9.0),
         ExitRecord(1, None, "SIGTERM", T0 + 9, 9.0)]
    ),
    launcher_alive=st.booleans(),
    wrapper_alive=st.booleans(),
    stop_requested=st.booleans(),
    rebooted=st.booleans(),
    stage=st.sampled_from([None, *(StageInfo(s) for s in ("loading", "compiling", "stepping", "saving"))]),
    progress=st.sampled_from([None, Progress(T0 + 5, 5, 10)]),
    sign_t=st.sampled_from([None, T0 + 5]),
    output_t=st.sampled_from([None, T0 + 5]),
    step_s=st.sampled_from([(), (1.0,) * 20, (1.0,) * 20 + (9.0,) * 4]),
    last_event=st.sampled_from(["", "finished", "stopped"]),
    damaged=st.sampled_from([(), ("start.json",)]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(evidences, st.sampled_from([0.5, 5.0, 400.0])), min_size=2, max_size=12))
def test_no_change_outside_of_the_drawing(looks: list[tuple[Evidence, float]]) -> None:
    now, before, since = T0, None, None
    for evidence, passed in looks:
        now += passed
        verdict = assess(replace(evidence, previous=before, previous_since=since), now, Limits(step_s=30))
        assert drawn(before, verdict.state), (before, verdict)
        before, since = verdict.state, verdict.since


def test_what_contradicts_itself_is_unknown_and_says_so() -> None:
    state, detail = follow(State.FINISHED, State.STEPPING, "step 7")
    assert state is State.UNKNOWN
    assert "finished" in detail
    assert "stepping" in detail
    alive = Evidence(1, T0, launcher_alive=True, stage=StageInfo("stepping"), sign_t=T0, previous=State.FINISHED)
    assert assess(alive, T0 + 1, Limits()).state is State.UNKNOWN


@pytest.mark.parametrize("after", [State.FINISHED, State.STOPPED])
def test_a_late_exit_record_corrects_a_crash(after: State) -> None:
    assert drawn(State.CRASHED, after)
    assert not drawn(after, State.CRASHED)


def test_limits_are_learned_and_only_ever_shortened() -> None:
    plain, known = Limits(loading_s=1800, compiling_s=600), Learned()
    assert limits(plain, known, "r1") == plain
    known = learn(learn(known, "r1", "loading", 100.0), "r1", "compiling", 500.0)
    assert limits(plain, known, "r1") == plain, "one attempt is too few"
    known = learn(learn(known, "r1", "loading", 5.0), "r1", "compiling", 3.0)
    got = limits(plain, known, "r1")
    assert (got.loading_s, got.compiling_s, got.step_s) == (300.0, 600.0, plain.step_s), "the longest silence counts"
    assert limits(plain, known, "r2") == plain, "another release or topology begins anew"
    short = learn(learn(Learned(), "k", "loading", 1.0), "k", "loading", 2.0)
    assert limits(plain, short, "k").loading_s == 120.0, "never below the floor"
