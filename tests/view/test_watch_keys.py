"""Keys of the watch: what is read, and what each does to what is on the screen."""

from __future__ import annotations

import fcntl
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.text import Text
from screens import STEPPING, one

from dflash_ops.cli.watch import Screen, _loop, watched
from dflash_ops.cli.watch_pages import Reading, plain
from dflash_ops.cli.watch_terminal import Terminal, decode, pen
from dflash_ops.client import Seen
from dflash_ops.contracts import State
from dflash_ops.errors import HostUnreachable
from dflash_ops.fleet.follow import Look
from dflash_ops.inventory import Job
from dflash_ops.view.paint import Painter
from dflash_ops.view.watch import ASCII, UNICODE, Place


@pytest.mark.parametrize(
    ("data", "keys", "rest"),
    [
        (b"jkq", ["down", "up", "q"], b""),
        (b"\x1b[A\x1bOB\x1b[5~", ["up", "down", "pgup"], b""),
        (b"\x1b", [], b"\x1b"),
        (b"q\x1b[", ["q"], b"\x1b["),
        (b"\x1b\x1b[B", ["esc", "down"], b""),
        (b"\x1bq", ["esc", "q"], b""),
        (b"\x1b[1;5Cx\x1b[200~l", ["x", "l"], b""),
        ("é".encode(), ["Ã", "©"], b""),
        (b"\r\n", ["enter", "enter"], b""),
    ],
)
def test_keys_are_told_apart(data: bytes, keys: list[str], rest: bytes) -> None:
    assert decode(data) == (keys, rest)


@pytest.mark.parametrize(
    ("environ", "encoding", "ascii_only"),
    [
        ({}, "utf-8", False), ({"LANG": "C.UTF-8"}, "utf-8", False), ({"LC_ALL": "C"}, "utf-8", True),
        ({"LANG": "de_DE.ISO-8859-1"}, "iso8859-1", True), ({"LANG": "en_US.UTF-8"}, "ascii", True),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, "utf-8", True),
    ],
)  # fmt: skip
def test_without_utf_8_all_is_ascii(environ: dict[str, str], encoding: str, ascii_only: bool) -> None:
    assert pen(environ, encoding) is (ASCII if ascii_only else UNICODE)


def job(name: str) -> Job:
    return Job(name=name, host="here", root=f"/srv/{name}", session=name, checkpoints="checkpoints")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def screen() -> Screen:
    clock = Clock()

    def page(kind: str, number: int) -> Reading:
        return Reading(f"{kind} {number}", lambda: [Text(f"line {n}") for n in range(100)], 5.0, again=kind == "log",
                       scroll=None if kind == "log" else 0, clock=clock)  # fmt: skip

    return Screen([job("a"), job("b"), job("c")], UNICODE, page, clock=clock)


KNOWN = [one(STEPPING)] * 3


def press(screen: Screen, *keys: str) -> None:
    for key in keys:
        screen.press(key, KNOWN)


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_jobs_up_and_down_open_and_back(screen: Screen) -> None:
    assert screen.place is Place.JOBS
    press(screen, "down", "down")
    assert screen.chosen == 2
    press(screen, "down")
    assert screen.chosen == 0  # around
    press(screen, "up", "enter")
    assert (screen.place, screen.chosen) == (Place.JOB, 2)
    press(screen, "up")
    assert (screen.place, screen.chosen) == (Place.JOB, 1)
    press(screen, "esc")
    assert screen.place is Place.JOBS
    press(screen, "?", "q")
    assert screen.place is Place.JOBS
    assert not screen.over
    press(screen, "x", "q")
    assert screen.over


def test_a_log_shows_its_end_until_it_is_scrolled(screen: Screen) -> None:
    press(screen, "down", "enter", "l")
    page = lambda: screen.choice(80, 24).page  # noqa: E731
    until(lambda: page() is not None and page().lines is not None)  # type: ignore[union-attr]
    assert page().title == "log 1"  # type: ignore[union-attr]
    assert page().scroll is None  # type: ignore[union-attr]
    press(screen, "up")
    assert page().scroll == 77  # type: ignore[union-attr]  # 100 lines on 22 rows, one up
    press(screen, "home")
    assert page().scroll == 0  # type: ignore[union-attr]
    press(screen, "pgdn", "end")
    assert page().scroll is None  # type: ignore[union-attr]
    press(screen, "?")
    assert screen.choice(80, 24).place is Place.HELP
    press(screen, "esc")
    assert (screen.place, screen.over) == (Place.PAGE, False)
    press(screen, "q")
    assert (screen.place, screen.over) == (Place.JOB, False)


def test_pause_keeps_what_was_shown_and_says_how_old_it_is(screen: Screen) -> None:
    press(screen, "p")
    assert isinstance(screen.clock, Clock)
    screen.clock.now += 42.0
    newer = [one(STEPPING)] * 3
    assert screen.shown(newer)[0] is KNOWN[0]
    assert screen.choice(80, 24).paused_s == 42.0
    press(screen, "p")
    assert screen.shown(newer) is newer
    assert screen.choice(80, 24).paused_s is None


def test_a_text_that_never_comes_is_given_up_and_one_that_fails_says_why() -> None:
    clock, free = Clock(), threading.Event()
    slow = Reading("slow", lambda: [Text(str(free.wait(20)))], 5.0, clock=clock)
    slow.start()
    clock.now += 3.0
    assert (slow.page().lines, slow.page().reading_s) == (None, 3.0)
    clock.now += 3.0
    assert "no answer for 5 s" in slow.page().error
    free.set()
    time.sleep(0.05)
    assert slow.page().lines is None  # what came too late is of no use

    def fails() -> list[Text]:
        raise HostUnreachable("no route", "192.0.2.7", "look at the cable")

    failed = Reading("failed", fails, 5.0, clock=clock)
    failed.start()
    until(lambda: bool(failed.page().error))
    assert failed.page().error == "no route\n192.0.2.7\nnext: look at the cable"
    broken = Reading("broken", lambda: [Text(str(1 // 0))], 5.0, clock=clock)
    broken.start()
    until(lambda: "ZeroDivisionError" in broken.page().error)


def test_a_log_line_has_no_control_codes_left() -> None:
    assert plain(b"\x1b[31mred\x1b[0m \x1b]0;title\x07x\ty", UNICODE) == "red x   y"
    assert plain(b" 10%\r 20%\r 30%|###\r\n", UNICODE) == " 30%|###"
    assert plain(b"\xff\xfe \x00end", UNICODE) == "\ufffd\ufffd  end"


def test_a_lost_link_is_never_a_healthy_job() -> None:
    seen = Seen(STEPPING, STEPPING.t)
    live = watched(job("a"), [Look(seen, 1.0, "live")], 1000.0)
    assert live.snapshot is not None
    assert live.snapshot.state is State.STEPPING
    gone = watched(job("a"), [Look(seen, 31.0, "retrying", 970.0, "cut", 3)], 1000.0)
    assert gone.snapshot is not None
    assert gone.snapshot.state is State.UNREACHABLE
    assert (gone.link.lost_s, gone.link.tries, gone.link.why) == (30.0, 3, "cut")
    assert gone.age_s == pytest.approx(31.0)
    assert "stepping" in gone.snapshot.detail
    hiccup = watched(job("a"), [Look(seen, 2.0, "retrying", 999.0, "cut", 1)], 1000.0)
    assert hiccup.snapshot is not None
    assert (hiccup.snapshot.state, hiccup.link.lost_s) == (State.STEPPING, None)  # it is young enough to be believed
    never = watched(job("a"), [Look(None, None, "lost", 990.0, "no route", 0)], 1000.0)
    assert never.snapshot is None
    assert never.link.lost_s == 10.0


class Clocked:
    """A terminal whose time only passes while it is waited on; after `seconds` it is to end."""

    keys, resized = True, True

    def __init__(self, seconds: float, pressed: dict[float, list[str]] | None = None) -> None:
        self.now, self.end = 0.0, seconds
        self.pressed = dict(pressed or {})
        self.written: list[tuple[float, str]] = []

    @property
    def ended(self) -> int | None:
        return 15 if self.now >= self.end else None

    def size(self) -> tuple[int, int]:
        return 80, 24

    def write(self, text: str) -> None:
        self.written.append((self.now, text))

    def wait(self, seconds: float) -> list[str]:
        until = self.now + max(0.0, seconds)
        due = min((t for t in self.pressed if t <= until), default=None)
        if due is not None:
            self.now = max(self.now, due)
            return self.pressed.pop(due)
        self.now = until
        return []


class Restless:
    """Streams in which every look has news."""

    over = False

    def __init__(self) -> None:
        self.count = 0

    def looks(self) -> dict[tuple[int, int], Look]:
        self.count += 1
        progress = replace(STEPPING.progress, step=self.count)  # type: ignore[type-var]
        return {(n, 0): Look(Seen(replace(STEPPING, progress=progress), STEPPING.t), 0.1, "live") for n in range(3)}


def looped(screen: Screen, terminal: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_ops.cli.watch.time.monotonic", lambda: terminal.now)
    monkeypatch.setattr("dflash_ops.cli.watch.time.sleep", lambda s: None)
    _loop(screen, terminal, Restless(), screen.jobs, Painter(80, 24), until_end=False)  # type: ignore[arg-type]


def test_it_is_drawn_at_most_twice_a_second(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Clocked(10.0)
    looped(screen, terminal, monkeypatch)
    assert 18 <= len(terminal.written) <= 21  # each time there was something new
    times = [t for t, _ in terminal.written]
    assert all(b - a >= 0.5 for a, b in pairwise(times))


def test_a_key_is_answered_at_once_and_a_pause_writes_only_its_age(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Clocked(10.0, {2.1: ["p"], 9.2: ["down"]})
    screen.clock = lambda: terminal.now
    looped(screen, terminal, monkeypatch)
    times = [t for t, _ in terminal.written]
    assert 2.1 in times
    assert 9.2 in times
    paused = [text for t, text in terminal.written if 2.2 < t < 9.0]
    assert 5 <= len(paused) <= 8  # once a second
    assert max(map(len, paused)) < 60


def test_keys_are_read_however_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe that ends the wait is opened behind the connections: its number may be above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened: list[int] = []

    def pipe() -> tuple[int, int]:
        ends = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1100) for end in ends]
        for end in ends:
            os.close(end)
        opened.extend(high)
        return high[0], high[1]

    try:
        terminal_in, keyboard = pipe()
        woken, wake = pipe()
        os.set_blocking(woken, False)
        monkeypatch.setattr(sys, "stdin", os.fdopen(terminal_in, closefd=False))
        monkeypatch.setattr(sys, "stdout", os.fdopen(wake, "w", closefd=False))
        terminal = Terminal()
        terminal.keys, terminal._wake = True, (woken, wake)
        os.write(keyboard, b"q")
        assert terminal.wait(5.0) == ["q"]
        os.write(wake, b"\0")
        assert terminal.wait(5.0) == []
        assert terminal.wait(0.01) == []
    finally:
        monkeypatch.undo()
        for end in opened:
            os.close(end)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
