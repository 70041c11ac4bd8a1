"""A stream that lasts: it says how old what it shows is, that a link is lost, and comes back by itself."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dflash_ops.adopted import AdoptedClient
from dflash_ops.client import JobClient
from dflash_ops.contracts import Snapshot, State, dumps
from dflash_ops.errors import (
    CommandFailed,
    ConnectionLost,
    DeadlineExceeded,
    HostKeyChanged,
    HostUnreachable,
    StateError,
)
from dflash_ops.fleet.follow import PAUSES_S, Look, Stream, Watch
from dflash_ops.hosts.base import Completed
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.inventory import Job

JOB = Job(name="main", host="gpu", root="/srv/main", session="dflash", checkpoints="/srv/main/checkpoints")
Said = bytes | BaseException | None


def line(t: float, now: float | None = None, state: State = State.STEPPING, **more: Any) -> bytes:
    text = dumps(Snapshot("main", t, state, 0.0, attempt=1, **more))
    return (text[:-1] + (f',"now":{now}' if now is not None else "") + "}").encode()


class Told(FakeHost):
    """A host whose first look and stream say what the test puts in: an error is raised, None ends the stream."""

    def __init__(self) -> None:
        super().__init__("gpu")
        self.looks: queue.Queue[Said] = queue.Queue()
        self.lines: queue.Queue[Said] = queue.Queue()
        self.asked: queue.Queue[str] = queue.Queue()

    def run(self, argv: Sequence[str], **_: Any) -> Completed:  # type: ignore[override]
        self.asked.put("look")
        said = self.looks.get()
        if isinstance(said, BaseException):
            raise said
        return Completed(tuple(argv), 0, said or b"", b"")

    def stream(self, argv: Sequence[str], *, idle: float, stdin: bytes | None = None) -> Iterator[bytes]:
        self.asked.put(" ".join(argv[4:]))
        while (said := self.lines.get()) is not None:
            if isinstance(said, BaseException):
                raise said
            yield said


def first(t: float = 1000.0, state: State = State.STEPPING) -> bytes:
    return b"%d file\n%s\n" % (t, line(t, state=state))


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A stream in its thread, with a clock that the test moves."""

    def __init__(self, host: Told, **options: Any) -> None:
        self.clock = Clock()
        self.rung = threading.Semaphore(0)
        options = {"pauses": (0.0,), "wall": lambda: 7000.0, **options}
        self.stream = Stream(JobClient(host, JOB), clock=self.clock, on_news=self.rung.release, **options)
        self.thread = threading.Thread(target=self.stream.run, daemon=True)
        self.thread.start()

    def until(self, true: Callable[[Look], bool]) -> Look:
        end = time.monotonic() + 10
        while not true(self.stream.look()):
            assert time.monotonic() < end, self.stream.look()
            self.rung.acquire(timeout=0.1)
        return self.stream.look()


@pytest.fixture
def host() -> Iterator[Told]:
    told = Told()
    yield told
    for box in (told.looks, told.lines):  # whatever waits ends
        box.put(SystemExit())


def heard(t: float) -> Callable[[Look], bool]:
    return lambda look: look.seen is not None and look.seen.snapshot.t == t


def test_what_is_shown_grows_old_by_the_clock_of_the_other_machine(host: Told) -> None:
    run = Run(host)
    assert run.stream.look() == Look()
    host.looks.put(first())
    run.until(heard(1000.0))
    host.lines.put(line(1000.5, now=1001.0))  # half a second old when it was sent
    look = run.until(heard(1000.5))
    assert (look.link, look.age_s) == ("live", pytest.approx(0.5))
    run.clock.now += 4
    assert run.stream.look().age_s == pytest.approx(4.5)


def test_lines_that_were_held_up_on_the_way_are_as_old_as_they_are(host: Told) -> None:
    run = Run(host)
    host.looks.put(first())
    host.lines.put(line(1000, now=1000))
    run.until(heard(1000))
    run.clock.now += 10
    host.lines.put(line(1003, now=1003))  # sent after 3 s, here after 10
    assert run.until(heard(1003)).age_s == pytest.approx(7)
    host.lines.put(line(1010, now=1010))
    assert run.until(heard(1010)).age_s == pytest.approx(0)


def test_a_clock_that_is_set_back_there_makes_nothing_old(host: Told) -> None:
    run = Run(host)
    host.looks.put(first())
    host.lines.put(line(1000, now=1000))
    run.until(heard(1000))
    run.clock.now += 1
    host.lines.put(line(401, now=401))
    assert run.until(heard(401)).age_s == pytest.approx(0)


def test_a_lost_link_is_said_with_what_was_known_and_comes_back(host: Told) -> None:
    run = Run(host)
    host.looks.put(first())
    host.lines.put(line(1001))
    run.until(heard(1001))
    run.clock.now += 12
    host.lines.put(DeadlineExceeded("no line within 12 s", "gpu"))
    look = run.until(lambda look: look.link == "retrying")
    assert (look.error, look.lost_since, look.tries) == ("no line within 12 s", 7000.0, 1)
    assert look.seen is not None
    assert look.age_s == pytest.approx(12)
    shown = look.state("main", now=7012.0)
    assert (shown.snapshot.state, shown.snapshot.since, shown.snapshot.detail) == (
        State.UNREACHABLE,
        7000.0,
        look.error,
    )
    host.looks.put(HostUnreachable("no route\nto it", "gpu"))
    assert run.until(lambda look: look.tries == 2).error == "no route"
    host.looks.put(first(1020))
    back = run.until(heard(1020))
    assert (back.link, back.error, back.tries, back.lost_since) == ("live", "", 0, None)
    assert back.state("main") is back.seen


def test_a_machine_that_was_never_heard_of_is_unreachable_and_asked_again(host: Told) -> None:
    run = Run(host)
    assert run.stream.look().state("main", 5.0).snapshot.state is State.UNKNOWN
    host.looks.put(HostUnreachable("no route", "gpu"))
    look = run.until(lambda look: look.link == "retrying")
    assert (look.seen, look.age_s) == (None, None)
    assert look.state("main").snapshot.state is State.UNREACHABLE


@pytest.mark.parametrize("said", [None, StateError("damaged", "f"), ConnectionLost("cut")])
def test_whatever_ends_a_stream_it_is_opened_again(host: Told, said: Said) -> None:
    run = Run(host)
    for t in (1000, 1001):
        host.looks.put(first(t))
        run.until(heard(t))
        host.lines.put(said)
    assert [host.asked.get(timeout=5) for _ in range(4)] == ["look", "follow --root /srv/main --forever"] * 2


def test_a_machine_that_answers_and_then_says_nothing_is_left_more_time_each_time(host: Told) -> None:
    run = Run(host, pauses=(0.0, 3600.0))
    for _ in range(2):
        host.looks.put(first())
        run.until(heard(1000.0))
        host.lines.put(line(1001))
        run.until(heard(1001))
        host.lines.put(DeadlineExceeded("no line within 12 s", "gpu"))  # it had spoken: back at once
        run.until(lambda look: look.link == "retrying")
    host.looks.put(first(1002))
    host.lines.put(DeadlineExceeded("no line within 12 s", "gpu"))
    run.until(lambda look: look.link == "lost")
    time.sleep(0.05)
    assert run.stream.look().link == "lost"
    run.stream.stop()


def test_a_machine_that_refuses_us_is_not_asked_again_at_once(host: Told) -> None:
    run = Run(host)
    host.looks.put(HostKeyChanged("another key", "gpu"))
    look = run.until(lambda look: look.link == "lost")
    time.sleep(0.05)
    assert run.stream.look() == look
    run.stream.stop()
    run.thread.join(1)
    assert not run.thread.is_alive()


def test_it_ends_with_the_job_only_where_that_is_asked_for(host: Told) -> None:
    run = Run(host, ends=True)
    host.looks.put(first())
    host.lines.put(line(1001, state=State.UNKNOWN))  # nothing was ever started there
    assert run.until(heard(1001)).link == "live"
    host.lines.put(line(1002, state=State.FINISHED))
    run.thread.join(5)
    assert run.stream.look().link == "over"

    other = Told()
    lasting = Run(other)
    other.looks.put(first(state=State.CRASHED))
    other.lines.put(line(1001, state=State.CRASHED))
    other.lines.put(line(1002, state=State.LOADING))  # somebody started it again
    assert lasting.until(heard(1002)).link == "live"
    other.lines.put(SystemExit())


def test_never_deployed_is_no_lost_link(host: Told) -> None:
    run = Run(host)
    host.looks.put(b"1000 never\n")
    look = run.until(lambda look: look.seen is not None)
    assert (look.link, look.seen.deployed if look.seen else None) == ("live", False)


def test_curves_last_until_they_change_or_the_attempt_does(host: Told) -> None:
    run = Run(host)
    host.looks.put(first())
    host.lines.put(line(1001, curves={"loss": (3.0, 2.0)}))
    host.lines.put(line(1002))
    seen = run.until(heard(1002)).seen
    assert seen is not None
    assert seen.snapshot.curves == {"loss": (3.0, 2.0)}
    host.lines.put(ConnectionLost("cut"))
    host.looks.put(first(1002.5))
    seen = run.until(heard(1002.5)).seen
    assert seen is not None
    assert seen.snapshot.curves == {"loss": (3.0, 2.0)}, "a stream that came back has them until its first line"
    host.lines.put(line(1003).replace(b'"attempt":1', b'"attempt":2'))
    seen = run.until(heard(1003)).seen
    assert seen is not None
    assert seen.snapshot.curves == {}


def test_several_streams_are_told_apart_and_a_dead_one_holds_nobody(host: Told) -> None:
    dead = Told()
    host.looks.put(first())
    host.lines.put(line(1001))
    begun = time.monotonic()
    with Watch({"a": JobClient(host, JOB), "b": JobClient(dead, JOB)}) as watch:
        end = time.monotonic() + 5
        while (watch.looks()["a"].seen is None) and time.monotonic() < end:
            watch.wait(1)
        looks = watch.looks()
        assert (looks["a"].link, looks["b"].link) == ("live", "connecting")
        while watch.wait(0):
            pass
        assert not watch.wait(0.01)
        assert not watch.over
        begun = time.monotonic()
    assert time.monotonic() - begun < 10
    for box in (dead.looks, dead.lines):
        box.put(SystemExit())


def test_a_fault_of_ours_is_raised_where_it_is_looked_at(host: Told) -> None:
    host.looks.put(ZeroDivisionError("ours"))
    with Watch({1: JobClient(host, JOB)}) as watch, pytest.raises(ZeroDivisionError):
        for _ in range(50):
            watch.wait(0.1)
            watch.looks()


def test_tries_come_slower_and_never_rarer_than_every_fifteen_seconds() -> None:
    assert PAUSES_S[0] == 1
    assert list(PAUSES_S) == sorted(PAUSES_S)
    assert PAUSES_S[-1] * 1.2 <= 15


def test_an_adopted_session_with_a_resident_of_before() -> None:
    """It knows no `--forever`: it is followed until its end."""
    root = ("--root", "/srv/main")
    fake = FakeHost("gpu").answer(..., stdout=line(1001, state=State.FINISHED) + b"\n")
    refusal = "usage: adopted-follow ...\nadopted-follow: error: unrecognized arguments: --forever"
    fake.answer("python3", "-I", "-S", ..., rc=2, stderr=refusal, times=1)
    seen = list(AdoptedClient(fake, JOB).follow(forever=True))
    assert [s.snapshot.t for s in seen] == [1001]
    assert [call.argv[4:] for call in fake.calls] == [
        ("adopted-follow", *root, "--forever"),
        ("adopted-follow", *root),
    ]
    fake.answer("python3", "-I", "-S", ..., rc=2, stderr="something else", times=1)
    with pytest.raises(CommandFailed):
        list(AdoptedClient(fake, JOB).follow(forever=True))
