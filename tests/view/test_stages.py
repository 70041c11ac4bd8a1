"""Stages on a pipe: one line each, a failed one named, a slow one not silent; on a terminal a mark for each."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from dflash_ops.view.live import Live
from dflash_ops.view.pace import Pace
from dflash_ops.view.stages import Plain, Stages, Told, Waiting


def test_one_plain_line_a_stage_with_its_result() -> None:
    out = io.StringIO()
    stages = Plain(out)
    with stages.stage("send", "sending") as stage:
        stage.bytes(10, 100)
        stage.done("2 files")
    assert out.getvalue().startswith("send: 2 files (")
    assert out.getvalue().count("\n") == 1


def test_a_slow_stage_speaks_up_again_and_again() -> None:
    out = io.StringIO()
    with Plain(out, patience=0.05).stage("stop", "waiting for the save") as stage:
        wait_for(out, "...", 4)
        stage.done("saved")
    lines = out.getvalue().splitlines()
    assert lines[0] == "stop: ... waiting for the save (0 s)"
    assert all(line.startswith("stop: ... ") for line in lines[:-1])
    assert lines[-1].startswith("stop: saved")


def wait_for(out: io.StringIO, word: str, times: int) -> None:
    end = time.monotonic() + 30
    while out.getvalue().count(word) < times and time.monotonic() < end:
        time.sleep(0.01)
    assert out.getvalue().count(word) >= times


def test_rates_and_the_time_that_is_left_are_those_of_the_last_seconds() -> None:
    now = [0.0]
    pace = Pace("", lambda: now[0])
    pace.update(0, 40 << 20)
    assert pace.text() == "0 B of 40.0 MiB" and pace.rate is None
    for second in range(1, 11):
        now[0] = second
        pace.update(second << 20, 40 << 20)
    assert pace.text() == "10.0 MiB of 40.0 MiB, 1.0 MiB/s, 30 s left"
    now[0] = 30.0  # it hangs: the rate falls while nobody says anything
    assert pace.text().startswith("10.0 MiB of 40.0 MiB, 341.3 KiB/s, 1 min left")
    for second in range(31, 61):
        now[0] = second
        pace.update(min(40, 10 + second - 30) << 20, 40 << 20)
    assert pace.text() == "40.0 MiB of 40.0 MiB" and pace.share == 1.0
    pace.update(0, 10)  # a second try begins anew
    assert pace.rate is None and pace.share == 0.0


def test_counts_and_what_is_left_of_a_time() -> None:
    now = [0.0]
    told = Told("stop", "save and stop", lambda: now[0])
    told.until(60, "before KILL")
    now[0] = 12.5
    assert told.now() == "47 s before KILL: save and stop"
    now[0] = 100.0
    assert told.now() == "0 s before KILL: save and stop"
    told = Told("verify", "hashing", lambda: now[0])
    told.count(1, 8, "checkpoints")
    now[0] = 110.0
    told.count(3, 8, "checkpoints")
    assert told.now() == "3 of 8 checkpoints, 0.2 checkpoints/s, 25 s left" and told.kept() == "hashing"
    told.say("reading the list")
    assert told.now() == "reading the list"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_only_waited_for_shows_itself_when_it_lasts_and_leaves_nothing() -> None:
    quick, plain, screen = io.StringIO(), io.StringIO(), Screen()
    with Waiting(quick, terminal=False).stage("status", "asking gpu"):
        pass
    assert quick.getvalue() == ""
    with Waiting(plain, terminal=False, patience=0.05).stage("status", "asking gpu") as stage:
        wait_for(plain, "asking gpu", 2)
        stage.bytes(1, 2)
        wait_for(plain, "1 B of 2 B", 1)
    assert plain.getvalue().startswith("status: ... asking gpu (0 s)\n") and "\x1b" not in plain.getvalue()
    with Waiting(screen, terminal=True, patience=0.05).stage("status", "asking gpu"):
        wait_for(screen, "asking gpu", 2)
    assert screen.getvalue().endswith("\r\x1b[K") and "\n" not in screen.getvalue()


def test_a_terminal_is_left_alone_while_a_person_is_asked_something() -> None:
    """A question that a spinner wipes away would never be answered."""
    person = {"asked": True}
    looks: list[bool] = []

    def asked() -> bool:
        looks.append(person["asked"])
        return person["asked"]

    def left_alone(stages: Stages, out: io.StringIO) -> None:
        person["asked"] = True
        looks.clear()
        with stages.stage("status", "asking gpu"):
            end = time.monotonic() + 30
            while len(looks) < 5 and time.monotonic() < end:
                time.sleep(0.01)
            assert looks[:5] == [True] * 5
            assert "asking gpu" not in out.getvalue()
            person["asked"] = False
            wait_for(out, "asking gpu", 2)

    out = Screen()
    left_alone(Waiting(out, terminal=True, patience=0.05, asked=asked), out)
    out = Screen()
    left_alone(Live(Console(file=out, force_terminal=True, color_system=None), asked), out)


def test_a_terminal_sees_bytes_rate_and_time_that_is_left_without_a_word_from_the_sender() -> None:
    out = io.StringIO()
    live = Live(Console(file=out, force_terminal=True, width=120, color_system=None))
    with live.stage("send", "sending") as stage:
        stage.bytes(0, 1000)
        time.sleep(0.6)  # half a second until there is a rate
        stage.bytes(100, 1000)
        wait_for(out, "B/s, ", 1)
        wait_for(out, "s left", 2)


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
