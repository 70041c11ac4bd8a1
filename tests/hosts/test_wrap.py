"""The wrapper of a remote command, run by a real sh and a real timeout(1) on this machine."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.errors import CommandFailed, DeadlineExceeded, UsageError
from dflash_ops.hosts.local import LocalHost
from dflash_ops.hosts.wrap import ARGV_BYTES, BOOT, Held, Marks, Wrapped, feed, for_terminal, is_plain, wrap

#: Whatever a user may write, and what shells, perl and printf make of it.
NASTY = [
    "",
    " ",
    "ä ö 漢字 🦆",
    "two\nlines\n",
    'it\'s "quoted" `x` $(touch /tmp/pwned) ${HOME} $1 \\n \\0101 \\',
    "%s%d%b",
    "-n",
    "--",
    "*?[a-z]~",
    "tab\tcr\rbell\x07esc\x1b[31m",
    "\x81\x82\x88",  # dash marks its own words with such bytes
    "!event",
    "a;b&c|d>e<f",
    "x" * 3000,
    os.fsdecode(b"not \xff\xfe utf-8"),
]
WORDS = st.one_of(
    st.sampled_from(NASTY), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
)


def run(wrapped: Wrapped, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
    sent = feed(wrapped.lead, stdin)
    assert isinstance(sent, bytes)
    done = subprocess.run(wrapped.argv, input=sent, capture_output=True, timeout=30, check=False)
    return done.returncode, done.stdout, done.stderr


@settings(max_examples=60, deadline=None)
@given(words=st.lists(WORDS, max_size=4), value=WORDS, stdin=st.binary(max_size=50))
def test_every_word_arrives_as_it_is(words: list[str], value: str, stdin: bytes) -> None:
    argv = ["sh", "-c", 'printf "%s\\0" "$V" "$PWD" "$@"; cat', "sh", *words]
    wrapped = wrap(argv, limit=30, env={"V": value}, cwd="/usr")
    assert all(w.isascii() and w.isprintable() for w in wrapped.argv), "others on the way see plain words only"
    rc, out, err = run(wrapped, stdin)
    assert rc == 0
    assert out == b"".join(os.fsencode(w) + b"\0" for w in (value, "/usr", *words)) + stdin
    assert wrapped.marks.read(err) == (True, 0, b"")


def test_no_value_of_a_variable_is_an_argument() -> None:
    wrapped = wrap(["true"], limit=5, env={"TOKEN": "planted-7f3a"}, cwd="/tmp")
    assert "planted" not in " ".join(wrapped.argv)
    assert b"planted-7f3a" in wrapped.lead


def test_plain_words_go_as_they_are_and_leave_standard_input_alone() -> None:
    wrapped = wrap(["wc", "-c"], limit=5)
    assert wrapped.lead == b""
    assert wrapped.argv[-2:] == ("wc", "-c")
    assert run(wrapped, b"12345")[1].strip() == b"5"
    assert not is_plain(["x" * (ARGV_BYTES + 1)]), "too long for an argument"
    assert run(wrap(["sh", "-c", 'printf %s "$1" | wc -c', "sh", "x" * 90_000], limit=5))[1].strip() == b"90000"


def test_a_program_that_is_called_like_a_builtin_is_the_program(tmp_path: Path) -> None:
    for name in ("e", "exit", "cd", "eval"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\necho "program $0"\n')
        program.chmod(0o755)
        rc, out, _ = run(wrap([name], limit=5, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}))
        assert (rc, out) == (0, f"program {tmp_path}/{name}\n".encode())


@pytest.mark.parametrize(
    ("argv", "rc"),
    [
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "exit 124"], 124),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_the_exit_code_is_the_commands_own(argv: list[str], rc: int) -> None:
    wrapped = wrap(argv, limit=5)
    got, _, err = run(wrapped)
    assert got == rc
    assert wrapped.marks.read(err)[:2] == (True, rc)


def test_a_folder_that_is_not_there_is_126_and_the_command_does_not_run() -> None:
    wrapped = wrap(["echo", "ran"], limit=5, cwd="/no such/folder")
    rc, out, err = run(wrapped)
    assert (rc, out) == (126, b"")
    begun, told, said = wrapped.marks.read(err)
    assert (begun, told) == (True, 126)
    assert b"cannot enter /no such/folder" in said


def test_marks_are_found_whatever_stands_around_them() -> None:
    marks = Marks("dflash-0123")
    noise, own = b"perl: warning: locale\n", b"\xff no newline at the end"
    whole = noise + b"dflash-0123 begin\n" + own + b"dflash-0123 end 3\n" + b"more noise\n"
    assert marks.read(whole) == (True, 3, own)
    assert marks.read(noise) == (False, None, noise)
    assert marks.read(noise + b"dflash-0123 begin\n" + own) == (True, None, own)
    assert marks.read_end(b"ut off\n" + b"dflash-0123 end 4") == (True, 4, b"ut off\n")
    assert marks.read(b"dflash-9999 begin\ndflash-9999 end 0\n")[0] is False, "another call's marks"


def test_the_limit_ends_the_command_and_one_that_ignores_term(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    argv = ["sh", "-c", f"trap '' TERM; echo $$ > {pids}; sleep 600 & wait; sleep 600; sleep 600"]
    began = time.monotonic()
    rc, _, err = run(wrap(argv, limit=0.5))
    assert time.monotonic() - began < 20
    assert rc in (124, 137, -9)
    assert not _alive(int(pids.read_text()))
    assert b"end 0" not in err


def _alive(pid: int) -> bool:
    """A zombie that nobody has reaped yet is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_lifeline_ends_the_command_when_nobody_listens() -> None:
    wrapped = wrap(["sh", "-c", "echo up; sleep 600"], limit=0, lifeline=True)
    process = subprocess.Popen(wrapped.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    time.sleep(0.2)
    assert process.poll() is None, "it lives while the line is open"
    process.stdin.close()
    assert process.wait(10) != 0


def test_a_command_on_a_lifeline_has_empty_input_and_its_own_end() -> None:
    host = LocalHost()
    wrapped = wrap(["sh", "-c", "wc -c; exit 4"], limit=5, lifeline=True)
    done = host.run(wrapped.argv, deadline=10, stdin=Held(wrapped.lead))
    assert (done.rc, done.stdout.strip()) == (4, b"0")
    held = host.run(["head", "-c", "3"], deadline=10, stdin=Held(b"abc"))
    assert held.stdout == b"abc"
    with pytest.raises(DeadlineExceeded):
        host.run(["cat"], deadline=0.5, stdin=Held(b"abc"))


def test_a_terminals_words_are_ascii_too(tmp_path: Path) -> None:
    words = for_terminal(["printf", "%s|", *NASTY])
    assert all(w.isascii() and w.isprintable() for w in words)
    out = subprocess.run(words, capture_output=True, timeout=10, check=True).stdout
    assert out == b"".join(os.fsencode(w) + b"|" for w in NASTY)
    assert for_terminal(["tmux", "attach"]) == ("tmux", "attach")


@pytest.mark.parametrize(("argv", "env"), [([], {}), (["a\0b"], {}), (["a"], {"A B": "x"}), (["a"], {"A": "\0"})])
def test_what_no_system_can_pass_on_is_refused(argv: list[str], env: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        wrap(argv, limit=1, env=env)


def test_the_wrapper_is_one_line_of_ascii() -> None:
    assert BOOT.isascii()
    assert BOOT.isprintable()


def test_a_failed_command_keeps_its_class() -> None:
    with pytest.raises(CommandFailed):
        list(LocalHost().stream(["false"], idle=5, stdin=Held(b"")))
