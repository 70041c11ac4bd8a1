"""The client: an answer, a state, or an error that names what to do; never a traceback, never a guess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.client import LOOK, JobClient, answer
from dflash_ops.contracts import ErrorInfo, Snapshot, State, dumps, to_dict
from dflash_ops.errors import (
    CommandFailed,
    ConnectionLost,
    ContractError,
    DeadlineExceeded,
    DflashError,
    HostUnreachable,
    JobBusy,
    StateError,
    UsageError,
)
from dflash_ops.hosts.base import Completed
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.inventory import Job

JOB = Job(name="main", host="gpu", root="/srv/my job", session="dflash", checkpoints="/srv/my job/checkpoints")
SNAP = Snapshot("", 1000.5, State.STEPPING, 900.0, attempt=3, error=ErrorInfo("t0", "boom", 999.0))


def client(host: FakeHost) -> JobClient:
    return JobClient(host, JOB, "/usr/bin/python3")


def looks(out: str, rc: int = 0, stderr: str = "") -> FakeHost:
    return FakeHost("gpu").answer(
        "sh", "-c", LOOK, "sh", JOB.root, "/usr/bin/python3", rc=rc, stdout=out, stderr=stderr
    )


def test_one_exec_for_a_status_with_paths_as_arguments_only() -> None:
    host = looks(f"1001 file\n{dumps(SNAP)}\n")
    seen = client(host).snapshot()
    assert len(host.calls) == 1
    assert (seen.snapshot.state, seen.snapshot.job, seen.now, seen.deployed) == (State.STEPPING, "main", 1001.0, True)
    # A snapshot that carries the trainer's error is no error of ours.
    assert seen.snapshot.error == ErrorInfo("t0", "boom", 999.0)
    assert "\n" not in LOOK
    assert LOOK.isascii()


def test_a_snapshot_that_is_cut_is_named_and_no_other_version_is_blamed() -> None:
    for text in ('{"schema": 1, "st', "[]", "null", ""):
        with pytest.raises(ContractError, match=r"run/snapshot.json is no JSON object") as caught:
            client(looks(f"1001 file\n{text}\n")).snapshot()
        assert (caught.value.exit_code, "ask again" in caught.value.next) == (6, True)


def test_an_answer_of_the_resident_after_the_clock_line() -> None:
    seen = client(looks(f"1000 asked\n{dumps(SNAP)}\n")).snapshot()
    assert seen.now == 1000.5  # `date` has whole seconds only: the data is not from the future
    assert seen.snapshot.attempt == 3


def test_never_deployed_is_a_state_with_the_command_to_type() -> None:
    seen = client(looks("1001 never\n")).snapshot()
    assert (seen.snapshot.state, seen.deployed) == (State.UNKNOWN, False)
    assert "dflash-ops deploy main" in seen.snapshot.detail


@pytest.mark.parametrize(
    "error", [HostUnreachable("no route", "gpu"), ConnectionLost("gone", "gpu"), DeadlineExceeded("20 s", "gpu")]
)
def test_a_machine_that_cannot_be_asked_is_unreachable_since_the_first_time(error: DflashError) -> None:
    host = looks(f"1001 file\n{dumps(SNAP)}\n").answer("sh", ..., error=error, times=2)
    one = client(host)
    first = one.snapshot()
    assert (first.snapshot.state, first.reachable) == (State.UNREACHABLE, False)
    assert error.what in first.snapshot.detail
    assert one.snapshot().snapshot.since == first.snapshot.since
    assert one.snapshot().snapshot.state is State.STEPPING
    host.answer("sh", ..., error=error, times=1)
    assert one.snapshot().snapshot.since > first.snapshot.since


@pytest.mark.parametrize(
    ("out", "rc", "stderr", "error"),
    [
        ("", 127, "sh: not found", CommandFailed),
        ("1001 what\n", 0, "", CommandFailed),
        ("1001 file\n{", 0, "", ContractError),
        ('1001 file\n{"job":"x"}', 0, "", ContractError),
        ("1001 asked\n", 127, "python3: not found", CommandFailed),
        ("1001 asked\n", 1, "Traceback ...", CommandFailed),
        ('1001 asked\n{"error":{"type":"StateError","what":"damaged","where":"f","next":"n"}}', 6, "", StateError),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_an_error_that_says_so(
    out: str, rc: int, stderr: str, error: type[DflashError]
) -> None:
    with pytest.raises(error) as caught:
        client(looks(out, rc, stderr)).snapshot()
    assert caught.value.where
    assert caught.value.next


def done(out: str, rc: int = 0) -> Completed:
    return Completed(("x",), rc, out.encode(), b"")


def test_errors_come_back_as_the_class_that_was_named() -> None:
    said = '{"schema":1,"error":{"type":"JobBusy","what":"it runs","where":"/r","next":"wait"}}'
    with pytest.raises(JobBusy) as caught:
        answer(done(f"a library says hello\n{said}\n", 4), "gpu", "python3", "ask")
    assert (caught.value.what, caught.value.where, caught.value.next) == ("it runs", "gpu: /r", "wait")
    with pytest.raises(CommandFailed, match="new kind"):
        answer(done('{"schema":1,"error":{"type":"Newer","what":"new kind"}}', 9), "gpu", "python3", "ask")
    with pytest.raises(ContractError):
        answer(done("not json"), "gpu", "python3", "ask")
    assert answer(done('{"schema":1,"attempt":4}'), "gpu", "python3", "ask") == {"schema": 1, "attempt": 4}


def test_commands_of_the_resident_and_their_input() -> None:
    pyz = ("/usr/bin/python3", "-I", "-S", "/srv/my job/resident/current.pyz")
    host = FakeHost("gpu").answer(*pyz, ..., stdout='{"schema":1}')
    one = client(host)
    one.stop(grace=2.5, reason="why; $(x)", actor="me")
    one.record("deployed", {"a": 1})
    one.activate("abc")
    one.aside(reason="r")
    calls = [c.argv[4:] for c in host.calls]
    root = ("--root", "/srv/my job")
    assert calls[0] == ("stop", *root, "--grace", "2.5", "--reason", "why; $(x)", "--actor", "me")
    assert host.calls[0].deadline > 2.5
    assert host.calls[1].stdin == b'{"a": 1}\n'
    assert calls[2] == ("activate", *root, "--release", "abc", "--actor", "operator")
    assert calls[3][-2:] == ("--checkpoints", "/srv/my job/checkpoints")


def test_a_resident_that_is_not_there_is_never_deployed() -> None:
    text = "python3: can't open file '/srv/my job/resident/current.pyz': [Errno 2] No such file or directory"
    host = FakeHost("gpu").answer("/usr/bin/python3", ..., rc=2, stderr=text)
    for call in (
        lambda: client(host).stop(grace=1),
        lambda: list(client(host).logs()),
        lambda: list(client(host).follow()),
    ):
        with pytest.raises(CommandFailed, match="never deployed") as caught:
            call()
        assert "dflash-ops deploy main" in caught.value.next


def test_follow_gives_snapshots_with_the_jobs_name() -> None:
    host = FakeHost("gpu").answer("/usr/bin/python3", ..., stdout=f"{dumps(SNAP)}\n{dumps(SNAP)}\n")
    seen = list(client(host).follow())
    assert [(s.snapshot.job, s.now) for s in seen] == [("main", 1000.5)] * 2
    host.answer("/usr/bin/python3", ..., stdout="what?\n")
    with pytest.raises(ContractError):
        list(client(host).follow())


def test_an_error_at_the_end_of_a_stream_is_raised_and_a_trainers_line_like_it_is_shown() -> None:
    line = '{"schema":1,"error":{"type":"UsageError","what":"no worker","where":"","next":"use one of a, b"}}'
    host = FakeHost("gpu").answer("/usr/bin/python3", ..., rc=2, stdout=f"step 1\n{line}\n")
    lines = client(host).logs(worker="x")
    assert next(lines) == b"step 1"
    with pytest.raises(UsageError, match="no worker") as caught:
        next(lines)
    assert "use one of" in caught.value.next
    host.answer("/usr/bin/python3", ..., stdout=f"step 1\n{line}\n")
    shown = list(client(host).logs())
    assert len(shown) == 2
    assert json.loads(shown[1])["error"]["what"] == "no worker"


# -- the shell line itself, run by a real sh


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job's root whose resident is a stand-in that says `{"asked": true}`, and whose snapshot can be trusted."""
    root = tmp_path / 'it\'s a "root" $(touch pwned) ü'
    (root / "resident").mkdir(parents=True)
    (root / "run/attempts/9").mkdir(parents=True)
    (root / "run/attempts/10").mkdir()
    (root / "resident/current.pyz").write_text("import sys; print('{\"asked\": ' + repr(sys.argv[1:])[0:0] + 'true}')")
    (root / "run/resident.json").write_text(json.dumps({"pid": os.getpid(), "start": 1, "version": "x", "schema": 1}))
    time.sleep(0.02)
    (root / "run/snapshot.json").write_text('{"asked": false}\n')
    return root


def look(root: Path) -> tuple[str, Any]:
    done = subprocess.run(["sh", "-c", LOOK, "sh", str(root), sys.executable], capture_output=True, text=True, cwd=root)
    head, _, rest = done.stdout.partition("\n")
    assert done.stderr == ""
    clock, how = head.split()
    assert abs(int(clock) - time.time()) < 5
    return how, json.loads(rest) if rest.strip() else None


def test_the_file_is_believed_while_it_is_fresh(root: Path) -> None:
    assert look(root) == ("file", {"asked": False})
    assert not (root / "pwned").exists()


def old(root: Path) -> None:
    os.utime(root / "run/snapshot.json", (time.time() - 4, time.time() - 4))


def dead(root: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    (root / "run/resident.json").write_text(json.dumps({"pid": process.pid, "start": 1}))


def begun(root: Path) -> None:
    time.sleep(0.02)
    (root / "run/attempts/11").mkdir()


def ended(root: Path) -> None:
    time.sleep(0.02)
    (root / "run/attempts/10/exit.json").write_text("{}")


def future(root: Path) -> None:
    os.utime(root / "run/snapshot.json", (time.time() + 60, time.time() + 60))


def no_loop(root: Path) -> None:
    (root / "run/resident.json").unlink()


def torn(root: Path) -> None:
    (root / "run/resident.json").write_text('{"pi')


@pytest.mark.parametrize("harm", [old, dead, begun, ended, future, no_loop, torn])
def test_the_resident_is_asked_where_the_file_may_be_wrong(root: Path, harm: Any) -> None:
    harm(root)
    assert look(root) == ("asked", {"asked": True})


def test_a_loop_that_was_killed_and_not_reaped_is_no_witness(root: Path) -> None:
    """A zombie: what a killed loop stays where the init of a container looks late or never."""
    pid = os.posix_spawnp("true", ["true"], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    (root / "run/resident.json").write_text(json.dumps({"pid": pid, "start": 1}))
    try:
        assert look(root)[0] == "asked"
    finally:
        os.waitpid(pid, 0)


def test_an_earlier_attempts_end_is_no_reason_to_ask(root: Path) -> None:
    (root / "run/attempts/9/exit.json").write_text("{}")
    os.utime(root / "run/attempts/9/exit.json", (time.time() + 60, time.time() + 60))
    assert look(root)[0] == "file"


def test_nothing_there(tmp_path: Path) -> None:
    assert look(tmp_path) == ("never", None)


def test_a_snapshot_survives_the_way_through_json() -> None:
    assert to_dict(SNAP)["state"] == "stepping"
