"""What a person reads: each number that is known, a dash for what is not, no control codes of a foreign text."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from dflash_ops.contracts import (
    CheckpointInfo,
    ErrorInfo,
    Event,
    ExitRecord,
    Progress,
    ResidentInfo,
    SessionInfo,
    Snapshot,
    StageInfo,
    State,
    WorkerShares,
)
from dflash_ops.view.status import Row, change_key, line, render, table
from dflash_ops.view.text import age, bar, duration, ktok, percent, size

NOW = 1_000_000.0

FULL = Snapshot(
    job="main",
    t=NOW - 0.4,
    state=State.STEPPING,
    since=NOW - 750,
    detail="step 120 of 500",
    attempt=3,
    life=1,
    release="0123456789ab",
    started=NOW - 7500,
    stage=StageInfo("stepping"),
    progress=Progress(
        t=NOW - 1, step=120, total=500, epoch=0.48, loss=2.3101, acc=0.412, tau=2.91, block_tok_s=13500.0,
        ctx_tok_s=20100.0, lr=5.9e-4, ring_ready=3, ring_slots=8, eta_s=812.0,
    ),
    workers={
        **{f"target{i}": WorkerShares(wait=0.12, compute=0.78, copy=0.08, sync=0.02, life=i % 2) for i in range(5)},
        **{f"drafter{i}": WorkerShares(wait=0.30, compute=0.60, copy=None, sync=0.10) for i in range(3)},
    },
    last_event=Event(7, NOW - 240, "checkpoint", data={"step": 100, "path": "checkpoints/step-00000100"}),
    checkpoint=CheckpointInfo(100, "checkpoints/step-00000100", NOW - 240),
    session=SessionInfo("dflash", "dflash-ops", True),
    resident=ResidentInfo(True, 77, 1234, "abc"),
)  # fmt: skip


def shown(what: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(what)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_everything_that_is_known_is_on_the_screen(width: int) -> None:
    text = shown(render(FULL, NOW, width), width)
    for part in (
        "main", "stepping", "since 12 min", "120/500", "24 %", "ETA 13 min", "loss 2.3101", "acc 41 %", "tau 2.91",
        "block 13.5 Ktok/s", "context 20.1 Ktok/s", "3/8 ready", "life 1", "0123456789ab", "started 2 h 05 min ago",
        "step 100, 4 min ago", "checkpoint step=100", "dflash-ops attach main", "0.4 s ago", "target4", "drafter2",
        "78 %", "12 %",
    ):  # fmt: skip
        assert part in text, part
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24  # eight workers on a terminal of 80x24


def test_a_share_that_is_not_known_is_a_dash_and_not_zero() -> None:
    row = next(r for r in shown(render(FULL, NOW)).splitlines() if r.startswith("drafter0"))
    assert "–" in row
    assert "0 %" not in row.replace("60 %", "").replace("10 %", "").replace("30 %", "")


def test_a_crash_shows_its_first_cause_its_exit_and_the_next_command() -> None:
    crashed = replace(
        FULL,
        state=State.CRASHED,
        detail="ended by SIGKILL",
        error=ErrorInfo("target3", "CUDA error: device-side assert\nsecond line \x1b[31mred\x07", NOW - 3),
        exit=ExitRecord(3, None, "SIGKILL", NOW - 2, 7000.0),
    )
    text = shown(render(crashed, NOW))
    assert "target3: CUDA error: device-side assert" in text
    assert "ended by SIGKILL, 2 s ago" in text
    assert "dflash-ops deploy main --resume" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_old_data_and_a_dead_resident_do_not_look_healthy() -> None:
    text = shown(render(replace(FULL, resident=ResidentInfo(False)), NOW + 120))
    assert "2 min ago" in text
    assert "resident does not run" in text


def test_clocks_that_differ_give_no_negative_ages() -> None:
    assert "since 0 s" in shown(render(FULL, NOW - 5000))


def test_before_the_first_step_the_stage_is_shown() -> None:
    early = Snapshot("m", NOW, State.LOADING, NOW - 9, stage=StageInfo("loading", 1, 3, "target0"), attempt=1)
    assert "loading 1/3 target0" in shown(render(early, NOW))
    assert "loading 1/3 target0" in line(early, NOW)


def test_the_last_stage_of_a_run_is_told_only_where_it_ended_badly() -> None:
    saving = replace(FULL, stage=StageInfo("saving", 0, 1, "step-500"))
    assert "saving 0/1 step-500" in shown(render(saving, NOW))
    assert "saving 0/1 step-500" in shown(render(replace(saving, state=State.CRASHED), NOW))
    assert "saving" not in shown(render(replace(saving, state=State.FINISHED), NOW))


def test_a_foreign_trainers_own_rate_and_missing_total() -> None:
    one = Snapshot("m", NOW, State.STEPPING, NOW, progress=Progress(t=NOW, step=7, rate=3.25))
    text = shown(render(one, NOW))
    assert "3.25 (as the trainer says)" in text
    assert "step       7" in text
    assert not {"quality", "acc", "tau", "loss"} & set(text.split()), "no dashes for what it never tells"
    told = shown(render(replace(one, progress=Progress(t=NOW, step=7, loss=2.5)), NOW))
    assert "loss 2.5000" in told
    assert not {"acc", "tau", "rate", "Ktok/s"} & set(told.split())
    assert FULL.progress is not None
    bundled = shown(render(replace(FULL, progress=replace(FULL.progress, acc=None, block_tok_s=None)), NOW))
    assert "acc –" in bundled and "block – Ktok/s" in bundled


def test_one_line_holds_the_state_the_numbers_and_the_cause() -> None:
    text = line(FULL, NOW)
    assert "\n" not in text
    for part in ("main", "stepping", "step 120/500", "loss 2.3101", "tau 2.91", "13.5 Ktok/s", "ETA 13 min"):
        assert part in text
    crashed = replace(
        FULL, state=State.CRASHED, error=ErrorInfo("t0", "boom\nbang"), exit=ExitRecord(3, 1, None, NOW, 1)
    )
    assert "cause t0: boom bang" in line(crashed, NOW)
    assert "exit code 1" in line(crashed, NOW)


def test_a_line_is_due_for_a_step_or_a_state_and_not_for_time_alone() -> None:
    assert change_key(FULL) == change_key(replace(FULL, t=NOW + 1, seq=9))
    assert FULL.progress is not None
    assert change_key(FULL) != change_key(replace(FULL, progress=replace(FULL.progress, step=121)))
    assert change_key(FULL) != change_key(replace(FULL, state=State.HUNG))
    assert change_key(FULL) != change_key(replace(FULL, attempt=4))


def test_a_table_has_one_line_a_job() -> None:
    gone = Snapshot("other", NOW, State.UNREACHABLE, NOW - 60, "no route")
    lines = shown(table([Row("main", "gpu", FULL, NOW), Row("other", "lab", gone, NOW)]), 100).splitlines()
    assert len(lines) == 3
    assert "120/500" in lines[1]
    assert "unreachable" in lines[2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1, "0 s"),
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3660, "1 h 01 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text


def test_numbers_for_people() -> None:
    assert (ktok(13500), ktok(123456), ktok(420), ktok(None)) == ("13.5", "123", "0.42", "–")
    assert (percent(0.245), percent(None)) == ("24 %", "–")
    assert (age(0.44), age(12), age(None)) == ("0.4 s", "12 s", "–")
    assert (size(512), size(3_250_586), size(21_474_836_480)) == ("512 B", "3.1 MiB", "20.0 GiB")
    assert [bar(s, 4) for s in (None, 0.0, 0.5, 1.0, 7.0)] == ["    ", "    ", "██  ", "████", "████"]
