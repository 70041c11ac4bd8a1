"""A command that is spoken with, on this machine: lines in turn, its end, its deadlines; and the fake's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dflash_ops.errors import DeadlineExceeded
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.hosts.local import LocalHost

#: Far above anything that is waited for here.
LONG = 60.0

ECHO = ["sh", "-c", 'while read -r x; do echo "got $x"; done; echo rest; echo err >&2; exit 3']


def test_what_is_said_next_may_depend_on_the_answer() -> None:
    with LocalHost().converse(ECHO, deadline=LONG) as talk:
        assert talk.ask([b"o", b"ne\n"], deadline=LONG) == b"got one"
        assert talk.ask([b"two\nthree\n"], deadline=LONG) == b"got two"
        assert talk.ask([], deadline=LONG) == b"got three"
        done = talk.end()
    assert (done.rc, done.stdout, done.stderr) == (3, b"rest\n", b"err\n")


def test_empty_lines_are_no_answers_and_not_the_end() -> None:
    script = "printf '\\n\\nhello\\n\\nworld\\n'; read -r x; printf '\\n'; echo \"got $x\"; printf '\\n\\n'"
    with LocalHost().converse(["sh", "-c", script], deadline=LONG) as talk:
        assert talk.ask([], deadline=LONG) == b"hello"
        assert talk.ask([], deadline=LONG) == b"world"
        assert talk.ask([b"one\n"], deadline=LONG) == b"got one"
        assert talk.ask([], deadline=LONG) == b""
        assert talk.end().rc == 0
    with (
        pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"),
        LocalHost().converse(["yes", ""], deadline=LONG) as talk,
    ):
        talk.ask([], deadline=0.3)


def test_more_than_a_pipe_holds_both_ways() -> None:
    with LocalHost().converse(["cat"], deadline=LONG) as talk:
        line = os.urandom(1000).hex().encode()
        assert talk.ask([line * 1000, b"\n", line, b"\n"], deadline=LONG) == line * 1000
        assert talk.end().stdout == line + b"\n"


def test_a_command_that_ends_early_gives_no_line_and_tells_why() -> None:
    with LocalHost().converse(["sh", "-c", "echo no >&2; exit 7"], deadline=LONG) as talk:
        assert talk.ask([b"x" * 1_000_000], deadline=LONG) == b""
        done = talk.end()
    assert (done.rc, done.stderr) == (7, b"no\n")
    with LocalHost().converse(["/no/such/command"], deadline=LONG) as talk:
        assert talk.ask([b"x"], deadline=LONG) == b""
        assert talk.end().rc == 127


def test_one_answer_has_a_deadline_and_all_of_it_too() -> None:
    script = "echo $$; exec sleep 1000"
    with (
        pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"),
        LocalHost().converse(["sh", "-c", script], deadline=LONG) as talk,
    ):
        pid = talk.ask([], deadline=LONG).decode()
        talk.ask([], deadline=0.3)
    with (
        pytest.raises(DeadlineExceeded, match=r"within 0\.4 s"),
        LocalHost().converse(["sleep", "1000"], deadline=0.4) as talk,
    ):
        talk.ask([], deadline=LONG)
    with (
        pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"),
        LocalHost().converse(["sleep", "1000"], deadline=0.2) as talk,
    ):
        talk.end()
    assert not Path(f"/proc/{pid}").exists()


def test_leaving_the_block_ends_it(tmp_path: Path) -> None:
    with LocalHost().converse(["sh", "-c", "echo $$; exec sleep 1000"], deadline=LONG) as talk:
        pid = talk.ask([], deadline=LONG).decode()
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_fake_answers_a_line_for_each_question() -> None:
    host = FakeHost().answer("talk", ..., stdout="one\n\ntwo\nthree\n", rc=4)
    with host.converse(["talk", "now"], deadline=5) as talk:
        assert talk.ask([b"a", b"b"], deadline=1) == b"one"
        assert talk.ask([b"c"], deadline=1) == b"two"
        done = talk.end()
    assert (done.rc, done.stdout) == (4, b"three\n")
    assert (host.calls[0].argv, host.calls[0].stdin) == (("talk", "now"), b"abc")
