"""Stages on a pipe: one line each, a failed one named, a slow one not silent; on a terminal a mark for each."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from dflash_ops.view.stages import Live, Plain


def test_one_plain_line_a_stage_with_its_result() -> None:
    out = io.StringIO()
    stages = Plain(out)
    with stages.stage("send", "sending") as stage:
        stage.bytes(10, 100)
        stage.done("2 files")
    assert out.getvalue().startswith("send: 2 files (")
    assert out.getvalue().count("\n") == 1


def test_a_slow_stage_speaks_up_again_and_again_ever_more_seldom() -> None:
    out = io.StringIO()
    with Plain(out, patience=0.05).stage("stop", "waiting for the save") as stage:
        end = time.monotonic() + 20
        while out.getvalue().count("...") < 3 and time.monotonic() < end:
            time.sleep(0.01)
        stage.done("saved")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("stop: ... waiting for the save (")
    assert 3 <= len(lines) - 1 <= 12
    assert lines[-1].startswith("stop: saved")


def test_a_stage_that_fails_says_so_and_lets_the_error_through() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="no"), Plain(out).stage("send", "sending"):
        raise ValueError("no")
    assert out.getvalue() == "send: failed (sending)\n"


def test_on_a_terminal_each_stage_keeps_one_line_with_a_mark() -> None:
    out = io.StringIO()
    live = Live(Console(file=out, force_terminal=True, width=80, color_system=None))
    with live.stage("send", "sending") as stage:
        stage.bytes(5, 10)
        stage.done("10 B")
    with pytest.raises(ValueError, match="no"), live.stage("start", "starting"):
        raise ValueError("no")
    text = out.getvalue()
    assert "✔ send       10 B" in text
    assert "✖ start      starting" in text


def test_a_long_result_is_wrapped_beside_its_stage_and_the_seconds_stay_whole() -> None:
    out = io.StringIO()
    with Live(Console(file=out, force_terminal=True, width=40, color_system=None)).stage("plan", "x") as stage:
        stage.done("release cdc34f55bb50: 50 files, the bundled trainer")
    text = out.getvalue()
    kept = text[text.index("✔") :].splitlines()
    assert kept[0].startswith("✔ plan       release cdc34f55bb50:") and kept[0].rstrip().endswith(" s")
    assert kept[1].startswith(" " * 13 + "50 files") and len(kept) == 3
