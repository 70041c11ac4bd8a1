"""The local host with real processes: results, deadlines that end the whole family, input and output in pieces."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_ops.errors import CommandFailed, DeadlineExceeded, UsageError
from dflash_ops.hosts.local import LocalHost

#: Far above anything that is waited for here, far below the test's own limit.
LONG = 60.0


@pytest.fixture
def host() -> LocalHost:
    return LocalHost("here")


def wait_for(what: object, seconds: float = 20.0) -> bool:
    assert callable(what)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_result_of_a_command(host: LocalHost) -> None:
    done = host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], deadline=LONG)
    assert (done.rc, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_arguments_are_no_shell_string(host: LocalHost) -> None:
    words = ["a b", "$HOME", "'", '"', "ü\n;", "", "*"]
    done = host.run([sys.executable, "-c", "import sys; print(sys.argv[1:])", *words], deadline=LONG)
    assert done.text.strip() == repr(words)


@pytest.mark.parametrize(
    ("argv", "rc"),
    [
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-program-here"], 127),
        (["/no/such/program"], 127),
        (["/etc/passwd"], 126),
        (["/etc"], 126),
    ],
)
def test_exit_codes_are_those_of_a_shell(host: LocalHost, argv: list[str], rc: int) -> None:
    done = host.run(argv, deadline=LONG)
    assert done.rc == rc
    assert rc > 127 or argv[0] in done.error_text


def test_a_script_without_its_interpreter(host: LocalHost, tmp_path: Path) -> None:
    script = tmp_path / "x"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert host.run([str(script)], deadline=LONG).rc == 127


def test_a_folder_that_cannot_be_entered(host: LocalHost, tmp_path: Path) -> None:
    done = host.run(["true"], deadline=LONG, cwd=str(tmp_path / "none"))
    assert done.rc == 126
    assert str(tmp_path / "none") in done.error_text


def test_environment_is_added_and_folder_entered(host: LocalHost, tmp_path: Path) -> None:
    done = host.run(["sh", "-c", 'echo "$A"; pwd; echo "$PATH"'], deadline=LONG, env={"A": "ü 'x'"}, cwd=str(tmp_path))
    assert done.text.splitlines() == ["ü 'x'", str(tmp_path), os.environ["PATH"]]


def test_a_nul_character_is_refused(host: LocalHost) -> None:
    with pytest.raises(UsageError):
        host.run(["echo", "a\0b"], deadline=LONG)


# -- input


def test_input_in_pieces_and_output_at_the_same_time(host: LocalHost) -> None:
    """More than any pipe holds goes in while as much comes out on both sides: nobody waits for the other."""
    pieces = [bytes([n % 251]) * 70_001 for n in range(200)]
    done = host.run(["sh", "-c", "tee /dev/stderr"], deadline=LONG, stdin=iter(pieces))
    assert done.stdout == b"".join(pieces)
    assert done.stderr == done.stdout


def test_empty_pieces_end_nothing(host: LocalHost) -> None:
    assert host.run(["cat"], deadline=LONG, stdin=[b"a", b"", b"b"]).stdout == b"ab"


def test_a_command_that_does_not_read_its_input(host: LocalHost) -> None:
    closed: list[bool] = []

    def endless() -> Iterator[bytes]:
        try:
            while True:
                yield b"x" * 65_536
        finally:
            closed.append(True)

    source = endless()  # held here, so that only closing it can end it
    done = host.run(["head", "-c", "3"], deadline=LONG, stdin=source)
    assert (done.rc, done.stdout) == (0, b"xxx")
    assert closed == [True]


def test_no_input_is_the_end_of_input(host: LocalHost) -> None:
    assert host.run(["cat"], deadline=LONG).stdout == b""


def test_a_source_that_fails_ends_the_command(host: LocalHost, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def source() -> Iterator[bytes]:
        yield b"x"
        assert wait_for(lambda: pid.exists() and pid.read_text().strip())
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        host.run(["sh", "-c", f"echo $$ > {pid}; sleep 100"], deadline=LONG, stdin=source())
    assert wait_for(lambda: not alive(int(pid.read_text())))


# -- deadlines


def test_a_deadline_ends_the_whole_family(host: LocalHost, tmp_path: Path) -> None:
    """Also where parent and child ignore TERM."""
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sleep 100 & echo $$ $! > {pids}; wait; sleep 100"
    with pytest.raises(DeadlineExceeded) as caught:
        host.run(["sh", "-c", script], deadline=1.0)
    assert "1 s" in caught.value.what
    assert "sleep 100" in caught.value.what
    assert caught.value.where == "host here"
    assert caught.value.exit_code == 5
    assert wait_for(lambda: not any(alive(int(p)) for p in pids.read_text().split()))


def test_term_comes_before_kill(host: LocalHost, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = f"trap 'echo saved > {said}; exit' TERM; echo; while :; do sleep 0.05; done"
    with pytest.raises(DeadlineExceeded):
        host.run(["sh", "-c", script], deadline=1.0)
    assert said.read_text() == "saved\n"


def test_output_without_end_meets_the_deadline(host: LocalHost) -> None:
    with pytest.raises(DeadlineExceeded):
        host.run(["sh", "-c", "while :; do echo x; sleep 0.01; done"], deadline=0.5)


def test_a_daemon_that_keeps_the_pipes_is_not_waited_for(host: LocalHost, tmp_path: Path) -> None:
    """So starts the resident: the command returns, what it left behind lives on."""
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid}; exec sleep 100' & echo started"
    before = time.monotonic()
    done = host.run(["sh", "-c", script], deadline=LONG)
    assert (done.rc, done.stdout) == (0, b"started\n")
    assert time.monotonic() - before < LONG / 2
    assert wait_for(lambda: pid.exists() and pid.read_text().strip())
    number = int(pid.read_text())
    try:
        assert alive(number)
    finally:
        os.kill(number, signal.SIGKILL)


# -- stream


def test_lines_come_one_by_one(host: LocalHost, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo one; until [ -e {gate} ]; do sleep 0.02; done; printf 'two\\n\\nthree'"
    lines = host.stream(["sh", "-c", script], idle=LONG)
    assert next(lines) == b"one"  # while the command still runs
    gate.touch()
    assert list(lines) == [b"two", b"", b"three"]


def test_a_silent_stream_is_given_up(host: LocalHost, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    lines = host.stream(["sh", "-c", f"echo $$ > {pid}; echo a; sleep 100"], idle=1.0)
    assert next(lines) == b"a"
    with pytest.raises(DeadlineExceeded, match="no line within 1 s"):
        next(lines)
    assert wait_for(lambda: not alive(int(pid.read_text())))


def test_each_line_starts_the_idle_time_anew(host: LocalHost) -> None:
    lines = list(host.stream(["sh", "-c", "for n in 1 2 3 4 5; do echo $n; sleep 0.4; done"], idle=1.6))
    assert lines == [b"1", b"2", b"3", b"4", b"5"]


def test_closing_a_stream_ends_the_command(host: LocalHost, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    lines = host.stream(["sh", "-c", f"echo $$ > {pid}; echo a; sleep 100"], idle=LONG)
    next(lines)
    lines.close()  # type: ignore[attr-defined]
    assert wait_for(lambda: not alive(int(pid.read_text())))


def test_a_stream_that_fails_says_why_after_its_lines(host: LocalHost) -> None:
    lines = host.stream(["sh", "-c", "echo a; echo the reason >&2; exit 7"], idle=LONG)
    assert next(lines) == b"a"
    with pytest.raises(CommandFailed) as caught:
        next(lines)
    assert caught.value.rc == 7
    assert "the reason" in caught.value.stderr
    assert "the reason" in caught.value.what


def test_a_stream_of_what_is_not_there(host: LocalHost) -> None:
    with pytest.raises(CommandFailed) as caught:
        list(host.stream(["no-such-program-here"], idle=LONG))
    assert caught.value.rc == 127


def test_a_stream_takes_input(host: LocalHost) -> None:
    assert list(host.stream(["cat"], idle=LONG, stdin=b"a\nb\n")) == [b"a", b"b"]


# -- fetch, terminal


def test_fetch_gives_the_end_of_a_file(host: LocalHost, tmp_path: Path) -> None:
    file = tmp_path / "-n ü'"
    file.write_bytes(bytes(range(256)) * 10)
    assert host.fetch(str(file), deadline=LONG, limit=1_000_000) == file.read_bytes()
    assert host.fetch(str(file), deadline=LONG, limit=10) == file.read_bytes()[-10:]
    assert host.fetch(str(file), deadline=LONG, limit=0) == b""


def test_fetch_of_what_is_not_there(host: LocalHost, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CommandFailed) as caught:
            host.fetch(str(path), deadline=LONG, limit=10)
        assert str(path) in caught.value.what
        assert caught.value.where == "host here"


def test_fetch_of_a_pipe_that_nobody_writes_meets_the_deadline(host: LocalHost, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DeadlineExceeded):
        host.fetch(str(tmp_path / "pipe"), deadline=0.5, limit=10)


def test_terminal_hands_over_this_terminal() -> None:
    code = (
        "from dflash_ops.hosts.local import LocalHost; import sys;"
        "sys.exit(LocalHost().terminal(['sh', '-c', 'test -t 0 && test -t 1 && exit 5']))"
    )
    outer, inner = pty.openpty()
    try:
        done = subprocess.run([sys.executable, "-c", code], stdin=inner, stdout=inner, stderr=inner, timeout=60)
    finally:
        os.close(outer)
        os.close(inner)
    assert done.returncode == 5


def test_terminal_leaves_ctrl_c_to_the_program(host: LocalHost) -> None:
    """The program ends by its own choice; we outlive the signal and handle the next one as before."""
    before = signal.getsignal(signal.SIGINT)
    script = "trap 'exit 9' INT; kill -INT $PPID; kill -INT $$; sleep 100"
    assert host.terminal(["sh", "-c", script]) == 9
    assert signal.getsignal(signal.SIGINT) is before
    assert host.terminal(["no-such-program-here"]) == 127


def test_the_passphrase_for_ssh_keys_is_no_commands_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SSH_PASSPHRASE", "planted-7f3a")
    monkeypatch.setenv("OTHER", "1")
    for env in (None, {"A": "1"}):
        said = LocalHost().run(["env"], deadline=10, env=env).text
        assert "OTHER=1" in said
        assert "planted" not in said
