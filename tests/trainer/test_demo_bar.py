"""Progress of the commands, and how they end when a person or the disk says stop."""

from __future__ import annotations

import io
import time

import pytest

from trainer.bar import Bar, duration
from trainer.cli.guard import told
from trainer.errors import TrainerError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_every_two_seconds_and_at_the_end() -> None:
    now, out = [0.0], io.StringIO()
    bar = Bar("responses", 100, "prompts", done=40, stream=out, clock=lambda: now[0])
    bar.update(40, "loading")
    now[0] = 10.0
    bar.start()
    for done in range(41, 101):
        now[0] += 0.5
        bar.update(done, "900 tok/s")
    bar.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "responses: 40/100 prompts  loading"
    assert lines[1] == "responses: 41/100 prompts  2.0/s  30s left  900 tok/s"  # the 40 of an earlier run do not count
    assert lines[-1] == "responses: 100/100 prompts  2.0/s  took 30s  900 tok/s"
    assert len(lines) == 17 and all("\r" not in line for line in lines)


def test_a_terminal_has_one_line_that_is_drawn_anew() -> None:
    now, out = [0.0], Terminal()
    bar = Bar("evaluate", 4, "prompts", stream=out, clock=lambda: now[0])
    for done in range(1, 5):
        now[0] += 1.0
        bar.update(done)
    bar.close()
    assert out.getvalue().count("\n") == 1 and out.getvalue().endswith("\n")
    assert out.getvalue().rpartition("\r")[2].startswith("\x1b[K" + "█" * 24 + " evaluate: 4/4")


def test_nothing_done_nothing_shown() -> None:
    out = Terminal()
    Bar("demo target", 10, "steps", stream=out).close()
    assert out.getvalue() == ""


def wait_for(out: io.StringIO, word: str, times: int) -> None:
    deadline = time.monotonic() + 30
    while out.getvalue().count(word) < times and time.monotonic() < deadline:
        time.sleep(0.005)
    assert out.getvalue().count(word) >= times


def test_a_long_step_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.bar.PLAIN_EVERY_S", 0.02)
    out = io.StringIO()
    bar = Bar("evaluate", 4, "prompts", stream=out)
    with bar.alive():
        bar.update(0, "loading the target")
        wait_for(out, "evaluate: 0/4 prompts  loading the target", 4)
        bar.weights(3, 9)
        wait_for(out, "loading the target: 3 of 9 weights", 2)
        bar.phase("writing", 7, "MiB", poll=lambda: 5)  # nobody says how far it is: the file is asked
        wait_for(out, "writing: 5/7 MiB", 2)
        bar.phase("verifying", 3, "MiB")
        bar.add(2 << 20)
        wait_for(out, "verifying: 2/3 MiB", 2)
    unknown = io.StringIO()
    Bar("features", 0, "", stream=unknown).update(0, "reading target and data")
    assert unknown.getvalue() == "features: reading target and data\n"
    ended = out.getvalue()
    time.sleep(0.1)
    assert out.getvalue() == ended


def test_a_line_is_no_wider_than_the_terminal_and_what_is_said_stands_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    bar = Bar("evaluate", 4, "prompts", stream=out)
    bar.update(4, "x" * 100)
    bar.say("left out: line 3")
    bar.close()
    drawn, _, said = out.getvalue().partition("\r\x1b[K")[2].partition("\r\x1b[K")
    assert len(drawn) == 39 and said == "left out: line 3\n"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    Bar("evaluate", 4, "prompts", stream=out, clock=lambda: 1.0).update(4)
    assert out.getvalue() == "evaluate: 4/4 prompts\n"


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.4, 59.6, 3599, 3661)] == ["0s", "59s", "1m00s", "59m59s", "1h01m"]


def test_interrupt_and_full_disk_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, told("writing", "the same command goes on"):
        raise KeyboardInterrupt
    assert left.value.code == 130
    assert "interrupted: the same command goes on" in capsys.readouterr().err
    with pytest.raises(TrainerError, match="writing failed: No space left on device") as caught, told("writing", ""):
        raise OSError(28, "No space left on device", "/data/out.jsonl")
    assert caught.value.where == "/data/out.jsonl" and caught.value.next
