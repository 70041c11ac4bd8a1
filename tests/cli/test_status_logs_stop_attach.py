"""status, logs, stop and attach on canned answers: what is printed, and the exit code."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.cli.main import run
from dflash_ops.client import LOOK
from dflash_ops.contracts import ExitRecord, Progress, Snapshot, State, dumps
from dflash_ops.errors import ConnectionLost, HostUnreachable
from dflash_ops.hosts.fake import FakeHost

SNAP = Snapshot("a", 1000.0, State.STEPPING, 400.0, attempt=2, progress=Progress(t=1000.0, step=5, total=9, loss=1.5))
PYZ = ("python3", "-I", "-S")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """Two jobs `a` and `b` on one fake host."""
    jobs = "".join(
        f'[jobs.{n}]\nhost = "here"\nroot = "/srv/{n}"\nsession = "s{n}"\ncommand = ["true"]\n' for n in ("a", "b")
    )
    (tmp_path / "inventory.toml").write_text(f'[hosts.here]\nkind = "local"\n{jobs}')
    monkeypatch.setenv("DFLASH_INVENTORY", str(tmp_path / "inventory.toml"))
    monkeypatch.setenv("COLUMNS", "100")
    fake = FakeHost("here")
    monkeypatch.setattr("dflash_ops.hosts.factory.Hosts._make", lambda hosts, name: fake)
    return fake


def sees(host: FakeHost, job: str, snapshot: Snapshot, **more: Any) -> None:
    host.answer("sh", "-c", LOOK, "sh", f"/srv/{job}", "python3", stdout=f"1000 file\n{dumps(snapshot)}\n", **more)


def test_without_a_name_several_jobs_are_a_table(host: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    sees(host, "a", SNAP)
    host.answer("sh", "-c", LOOK, "sh", "/srv/b", "python3", error=HostUnreachable("no route", "here"))
    assert run(["status"]) == 5  # one of them could not be asked
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "unreachable" in lines[1]  # trouble first
    assert "stepping" in lines[2]
    assert "5/9" in lines[2]
    assert lines[3] == "2 jobs: 1 stepping, 1 unreachable"
    assert run(["status", "--json"]) == 5
    said = json.loads(capsys.readouterr().out)
    assert [(j["job"], j["state"]) for j in said["jobs"]] == [("a", "stepping"), ("b", "unreachable")]
    assert "no route" in said["jobs"][1]["detail"]


def test_with_a_name_one_job_is_a_screen(host: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    sees(host, "a", SNAP)
    assert run(["status", "a"]) == 0
    out = capsys.readouterr().out
    assert "since 10 min" in out
    assert "5/9" in out
    assert host.closed == 1
    assert run(["status", "nobody"]) == 2


def test_watch_in_a_pipe_lives_through_a_lost_connection_and_ends_with_the_jobs(
    host: FakeHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_ops.fleet.follow.PAUSES_S", (0.1,))
    done = replace(SNAP, state=State.FINISHED, exit=ExitRecord(2, 0, None, 1000.0, 9.0))
    sees(host, "a", done)
    host.answer("sh", "-c", LOOK, "sh", "/srv/a", ..., error=ConnectionLost("the line is dead", "here"), times=3)
    sees(host, "a", SNAP, times=1)
    host.answer(*PYZ, "/srv/a/resident/current.pyz", "follow", ..., error=ConnectionLost("cut", "here"))
    sees(host, "b", replace(SNAP, job="b", state=State.CRASHED, exit=ExitRecord(2, 7, None, 1000.0, 9.0)))
    assert run(["status", "--watch", "--all"]) == 1  # one of them crashed
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in lines if words[0] == "b"] == ["crashed"]
    states = [words[1] for words in lines if words[0] == "a"]
    assert states[-2:] == ["unreachable", "finished"]  # said once, however often it was tried
    assert states.count("unreachable") == 1
    assert not any("\x1b" in word for words in lines for word in words)


@pytest.mark.parametrize(
    ("exit", "answer", "words"),
    [
        ({"rc": 3, "signal": None, "requested": "stop"}, {}, ["attempt 2 stopped: exit code 3", "saved at step 4"]),
        ({"rc": None, "signal": "SIGKILL", "requested": "stop"}, {"escalated": True}, ["ended by SIGKILL", "KILL"]),
        ({"rc": 0, "signal": None, "requested": None}, {"already": True}, ["had ended before: exit code 0", "9 s"]),
    ],
)  # fmt: skip
def test_stop_says_what_came_of_it(
    host: FakeHost, capsys: pytest.CaptureFixture[str], exit: dict[str, Any], answer: dict[str, Any], words: list[str]
) -> None:
    record = {"attempt": 2, "t": 1000.0, "duration_s": 9.0, "schema": 1, **exit}
    said = {"schema": 1, "attempt": 2, "state": "stopped", "already": False, "escalated": False, "detail": "",
            "exit": record, "checkpoint": {"step": 4, "path": "p", "t": 999.0}, "warnings": [], **answer}  # fmt: skip
    host.answer(*PYZ, "/srv/a/resident/current.pyz", "stop", ..., stdout=json.dumps(said) + "\n")
    assert run(["stop", "a", "--grace", "7", "--reason", "lunch"]) == 0
    err = capsys.readouterr().err
    for word in words:
        assert word in err
    # Begun after that checkpoint: it saved nothing itself.
    said["exit"]["duration_s"] = 0.5
    host.answer(*PYZ, "/srv/a/resident/current.pyz", "stop", ..., stdout=json.dumps(said) + "\n")
    assert run(["stop", "a"]) == 0
    err = capsys.readouterr().err
    assert "the newest checkpoint is of step 4" in err and "saved at" not in err
    argv = host.calls[0].argv
    assert argv[argv.index("--grace") + 1] == "7"
    assert argv[argv.index("--reason") + 1] == "lunch"
    assert argv[argv.index("--actor") + 1].startswith("operator ")


def test_logs_are_bytes_as_they_are(host: FakeHost, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    raw = b"\xff\xfe not UTF-8 \x1b[31mred\x1b[0m\nlast"
    host.answer(*PYZ, "/srv/a/resident/current.pyz", "logs", ..., stdout=raw)
    assert run(["logs", "a", "-n", "7", "--worker", "drafter0", "--attempt", "3"]) == 0
    assert capfdbinary.readouterr().out == raw + b"\n"
    argv = host.calls[0].argv
    assert argv[5:] == ("--root", "/srv/a", "--lines", "7", "--worker", "drafter0", "--attempt", "3")


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeHost, FakeHost]:
    """The hosts of a job of two nodes."""
    (tmp_path / "inventory.toml").write_text(
        '[hosts.a]\nkind = "local"\n[hosts.b]\nkind = "local"\n[jobs.big]\ncommand = ["true"]\n'
        'nodes = [{ host = "a", root = "/srv/0" }, { host = "b", root = "/srv/1" }]\n'
    )
    monkeypatch.setenv("DFLASH_INVENTORY", str(tmp_path / "inventory.toml"))
    fakes = {name: FakeHost(name) for name in "ab"}
    monkeypatch.setattr("dflash_ops.hosts.factory.Hosts._make", lambda hosts, name: fakes[name])
    return fakes["a"], fakes["b"]


@pytest.mark.parametrize("follow", [("--follow",), ()])
def test_a_fault_of_ours_on_one_node_hides_no_line_of_the_other_and_ends(
    two: tuple[FakeHost, FakeHost], capfdbinary: pytest.CaptureFixture[bytes], follow: tuple[str, ...]
) -> None:
    lines = [b"line %d" % number for number in range(3000)]
    two[1].answer(*PYZ, "/srv/1/resident/current.pyz", "logs", ..., stdout=b"\n".join(lines))
    assert run(["logs", *follow]) == 1  # the other has no answer: an AssertionError
    seen = capfdbinary.readouterr()
    assert seen.out.splitlines() == [b"node 1 | " + line for line in lines]
    assert b"node 0 (a): unexpected AssertionError" in seen.err


def test_a_fault_of_ours_on_one_node_ends_the_watch(
    two: tuple[FakeHost, FakeHost], capsys: pytest.CaptureFixture[str]
) -> None:
    done = replace(SNAP, state=State.FINISHED, exit=ExitRecord(2, 0, None, 1000.0, 9.0))
    two[0].answer("sh", "-c", LOOK, "sh", "/srv/0", "python3", stdout=f"1000 file\n{dumps(done)}\n")
    assert run(["status", "--watch"]) == 1
    assert "unexpected AssertionError" in capsys.readouterr().err
    two[1].answer("sh", "-c", LOOK, "sh", "/srv/1", "python3", stdout=f"1000 file\n{dumps(done)}\n")
    assert run(["status", "--watch"]) == 0
    assert "finished" in capsys.readouterr().out


def test_attach_prints_the_command_where_there_is_no_terminal(
    host: FakeHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["attach", "a"]) == 0
    assert capsys.readouterr().out == "tmux -L dflash-ops attach -t =sa\n"
    assert host.calls == []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    host.answer("tmux", "-L", "dflash-ops", "has-session", "-t", "=sa", rc=1)
    assert run(["attach", "a"]) == 1
    assert "dflash-ops logs -f a" in capsys.readouterr().err
    host.answer("tmux", "-L", "dflash-ops", "has-session", "-t", "=sa")
    host.answer("env", "-u", "TMUX", "tmux", "-L", "dflash-ops", "attach", "-t", "=sa", rc=0)
    assert run(["attach", "a"]) == 0
