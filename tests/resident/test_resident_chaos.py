"""kill -9 at any moment: whoever asks next hears the truth, and nothing is lost or used twice."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from resident_lab import Lab, wait_for

from dflash_ops.contracts import LIVE_STATES, State, dumps
from dflash_ops.resident import attempts, daemon, proc
from dflash_ops.resident.snapshot import take
from dflash_ops.resident.watch import Watcher

#: Fixed, so that a failure can be seen again; DFLASH_SEED tries another.
SEED = int(os.environ.get("DFLASH_SEED", "1"))


def _kill_server(one: Lab) -> None:
    pid = int(one.tmux("display-message", "-p", "-t", "=trainer:", "#{pid}"))
    server = proc.of(pid)
    proc.send(server, signal.SIGKILL)
    wait_for(lambda: not proc.alive(server), "the server's end")


def test_the_launcher_is_killed(one: Lab) -> None:
    one.start()
    one.stepping()
    proc.send(one.launcher(), signal.SIGKILL)
    wait_for(lambda: one.layout.attempt(1).exit.exists(), "exit.json")
    said = one.snapshot()  # the very next question
    assert (said.state, said.detail) == (State.CRASHED, "ended by SIGKILL")
    assert said.exit is not None and (said.exit.rc, said.exit.signal, said.exit.requested) == (None, "SIGKILL", None)
    # and the loop by itself, for those who only read the file
    wait_for(lambda: (s := daemon.last_snapshot(one.layout)) and s.state is State.CRASHED, "the loop's word")
    exited = wait_for(lambda: one.events("attempt_exited"), "the journal")
    assert [(e.data["state"], e.data["signal"]) for e in exited] == [("crashed", "SIGKILL")]


def test_the_tmux_server_is_killed(one: Lab) -> None:
    one.start()
    step = one.stepping().progress
    _kill_server(one)
    told = one.until(lambda s: any("tmux session is gone" in w for w in s.warnings), "the warning")
    assert told.state is State.STEPPING and told.session is not None and not told.session.alive
    assert step is not None and step.step is not None
    one.until(lambda s: (s.progress.step or 0) > step.step + 5, "more steps")  # type: ignore[union-attr, operator]
    assert one.run("start", stdin=dumps(one.job())).error["type"] == "JobBusy"
    assert one.ok("stop")["state"] == "stopped"
    assert one.start()["attempt"] == 2


def test_the_wrapper_is_killed_under_a_trainer_that_prints(one: Lab) -> None:
    one.start()
    one.stepping()
    proc.send(one.wrapper(), signal.SIGKILL)
    said = one.until(lambda s: s.state not in LIVE_STATES, "the end (it prints into a closed pipe)")
    assert said.state is State.CRASHED
    assert "exit unknown" in said.detail
    wait_for(lambda: one.events("attempt_exited"), "the journal")
    assert one.events("attempt_exited")[0].data["rc"] is None


def test_the_wrapper_is_killed_under_a_silent_trainer(one: Lab) -> None:
    script = f"""
import json, time
for step in range(1, 9999):
    with open({str(one.layout.attempt(1).metrics)!r}, "a") as file:
        file.write(json.dumps({{"t": time.time(), "step": step, "loss": float("nan")}}).replace("NaN", "null") + "\\n")
    time.sleep(0.1)
"""
    one.start(argv=(sys.executable, "-c", script), progress="")
    before = one.until(lambda s: s.state is State.STEPPING, "steps").progress
    proc.send(one.wrapper(), signal.SIGKILL)
    said = one.until(lambda s: any("wrapper is gone" in w for w in s.warnings), "the warning")
    assert said.state is State.STEPPING
    assert before is not None and before.step is not None
    one.until(lambda s: (s.progress.step or 0) > before.step + 3, "more steps")  # type: ignore[union-attr, operator]
    stopped = one.ok("stop")
    assert (stopped["state"], stopped["exit"]) == ("stopped", None)
    assert "not recorded" in stopped["detail"]


def test_wrapper_and_launcher_are_killed_together(one: Lab) -> None:
    one.start()
    one.stepping()
    loop = daemon.running(one.layout)
    assert loop is not None
    proc.send(loop.process, signal.SIGSTOP)  # nobody freshens the file: it still says stepping
    proc.send(one.wrapper(), signal.SIGKILL)
    proc.send(one.launcher(), signal.SIGKILL)
    wait_for(lambda: not proc.alive(one.launcher()), "its end")
    said = one.snapshot()
    assert (said.state, said.exit) == (State.CRASHED, None)
    proc.send(loop.process, signal.SIGCONT)
    assert one.start()["attempt"] == 2


def test_the_loop_is_killed_again_and_again(one: Lab) -> None:
    rng = random.Random(SEED)
    one.start()
    one.stepping()
    for _ in range(3):
        record = wait_for(lambda: daemon.running(one.layout), "a loop")
        time.sleep(rng.random())
        proc.send(record.process, signal.SIGKILL)
        wait_for(lambda r=record: not proc.alive(r.process), "its end")  # type: ignore[misc]
        said = one.snapshot()
        assert said.state is State.STEPPING
        wait_for(lambda r=record: (n := daemon.running(one.layout)) and n.process != r.process, "another loop")  # type: ignore[misc]
    one.ask("exit0")
    one.until(lambda s: s.state is State.FINISHED, "the end")
    wait_for(lambda: one.events("state")[-1].data["state"] == "finished", "the journal")
    states = [e.data["state"] for e in one.events("state")]
    assert len([s for s in states if s == "finished"]) == 1
    assert all(a != b for a, b in itertools.pairwise(states))
    assert len(one.events("attempt_exited")) == 1
    seqs = [e.seq for e in one.events()]
    assert seqs == list(range(1, len(seqs) + 1))
    assert not list(one.layout.run.glob("attempts/*/.*tmp"))


def test_start_is_killed_at_any_moment(one: Lab) -> None:
    """What runs is recorded, what is recorded runs, and no number comes twice."""
    rng = random.Random(SEED)
    seen: list[int] = []
    for _ in range(6):
        process = subprocess.Popen(one.argv("start"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(dumps(one.job()).encode())
        process.stdin.close()
        time.sleep(rng.random() * 0.5)
        process.kill()
        process.wait()
        # The wrapper may be on its way still; it either writes start.json or leaves.
        wait_for(lambda: not _wrappers(one) or _settled(one), "the wrapper's decision")
        ours = _trainers(one)
        newest = attempts.last(one.layout)
        if ours:
            assert newest is not None and newest.start is not None
            assert ours == [newest.start.launcher.pid]
            assert one.snapshot().state in LIVE_STATES
        one.ok("stop")
        assert not _trainers(one)
        assert one.snapshot().state in (State.UNKNOWN, State.CRASHED, State.STOPPED)
        seen = sorted({*seen, *attempts.numbers(one.layout)})
    journaled = [e.attempt for e in one.events("attempt_started")]
    assert len(journaled) == len(set(journaled))
    last = one.start()["attempt"]
    assert last > max(seen, default=0)
    assert one.stepping().attempt == last


def _settled(one: Lab) -> bool:
    newest = attempts.last(one.layout)
    return newest is not None and newest.launcher_alive


def _wrappers(one: Lab) -> list[int]:
    return [s.pid for s in proc.every() if _cmdline(s.pid)[4:8] == ["wrap", "--root", str(one.root), "--attempt"]]


def _trainers(one: Lab) -> list[int]:
    def ours(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return f"CONTROL={one.control}".encode() in file.read().split(b"\0")
        except OSError:
            return False

    return [s.pid for s in proc.every() if "foreign.py" in " ".join(_cmdline(s.pid)) and ours(s.pid)]


def _cmdline(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def test_a_tmux_server_that_does_not_answer_holds_nobody_up(one: Lab) -> None:
    """Its terminal takes no bytes either: the trainer must not feel it."""
    one.start()
    before = one.stepping().progress
    server = proc.of(int(one.tmux("display-message", "-p", "-t", "=trainer:", "#{pid}")))
    proc.send(server, signal.SIGSTOP)
    try:
        one.ask("flood")
        wait_for(lambda: one.layout.attempt(1).log.stat().st_size > 3_000_000, "output beyond all buffers")
        assert before is not None and before.step is not None
        one.until(lambda s: (s.progress.step or 0) > before.step + 3, "more steps")  # type: ignore[union-attr, operator]
        record = daemon.running(one.layout)
        assert record is not None
        proc.send(record.process, signal.SIGKILL)  # the next look has to ask tmux itself
        wait_for(lambda: not proc.alive(record.process), "its end")
        said = one.until(lambda s: "tmux does not answer" in s.warnings, "the warning")
        assert said.state is State.STEPPING
    finally:
        proc.send(server, signal.SIGCONT)
    wait_for(
        lambda: "bytes are in the log only" in one.tmux("capture-pane", "-p", "-S", "-", "-t", "=trainer:"), "pane"
    )


def test_a_reused_pid_is_not_signalled(one: Lab) -> None:
    one.start()
    one.stepping()
    one.ok("stop")
    # a session of its own, like our launcher's, with a child in it
    bystander = subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True)
    child = wait_for(lambda: [s for s in proc.every() if s.ppid == bystander.pid], "its child")[0].process
    try:
        at = one.layout.attempt(1)
        record = at.start.read_text()
        old = one.launcher()
        at.exit.unlink()
        at.start.write_text(record.replace(f'"launcher":{{"pid":{old.pid},', f'"launcher":{{"pid":{bystander.pid},'))
        assert one.launcher().pid == bystander.pid
        assert one.snapshot().state is State.STOPPED
        assert one.ok("stop", "--grace", "0")["already"] is True
        assert bystander.poll() is None and proc.alive(child)
    finally:
        proc.send(child, signal.SIGKILL)
        bystander.kill()
        bystander.wait()


def test_a_damaged_snapshot_is_healed(one: Lab) -> None:
    one.layout.run.mkdir()
    for garbage in (b"", b"{", b"null", b"[1]", b'{"schema":1}', b'{"schema":99}', b"\xff\xfe\x00"):
        one.layout.snapshot.write_bytes(garbage)
        one.layout.resident_pid.write_bytes(garbage)
        assert daemon.last_snapshot(one.layout) is None
        assert daemon.running(one.layout) is None
    assert one.snapshot().detail == "never started"
    assert one.run("loop").rc == 0
    wait_for(lambda: daemon.fresh_snapshot(one.layout), "the loop's snapshot")


def test_a_snapshot_cut_anywhere_is_never_half_believed(one: Lab) -> None:
    one.start()
    one.stepping()
    record = daemon.running(one.layout)
    assert record is not None
    proc.send(record.process, signal.SIGKILL)
    wait_for(lambda: not proc.alive(record.process), "its end")
    whole = one.layout.snapshot.read_bytes()
    for cut in range(0, len(whole) - 1, 5):
        one.layout.snapshot.write_bytes(whole[:cut])
        assert daemon.last_snapshot(one.layout) is None
    assert one.snapshot().state is State.STEPPING
    wait_for(lambda: daemon.fresh_snapshot(one.layout), "a new one")


def test_a_damaged_start_record_is_unknown_and_signals_nobody(one: Lab) -> None:
    one.start()
    one.stepping()
    launcher = one.launcher()
    at = one.layout.attempt(1)
    whole = at.start.read_bytes()
    at.start.write_bytes(whole[: len(whole) // 2])
    said = one.until(lambda s: s.state is State.UNKNOWN, "unknown")
    assert "start.json" in said.detail
    stop = one.run("stop")
    assert (stop.rc, stop.error["type"]) == (6, "StateError")
    assert one.run("start", stdin=dumps(one.job())).error["type"] == "JobBusy"
    assert proc.alive(launcher)
    at.start.write_bytes(whole)
    assert one.ok("stop")["state"] == "stopped"


def test_the_last_step_of_one_that_ends_while_it_is_looked_at(one: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far it came decides whether a repair helped: not one step of it may be missed."""
    one.start()
    one.stepping()
    read, ended = Watcher._read_new, []

    def then_it_ends(self: Watcher, seen: Any) -> None:
        read(self, seen)
        if not ended:
            ended.append(True)
            time.sleep(0.5)
            proc.send(one.launcher(), signal.SIGKILL)
            wait_for(one.layout.attempt(1).exit.exists, "the end")

    monkeypatch.setattr(Watcher, "_read_new", then_it_ends)
    said = Watcher(one.layout, daemon.last_snapshot(one.layout)).look(None)
    lines = one.layout.attempt(1).log.read_text().splitlines()
    last = [line for line in lines if line.startswith("it ")][-1].split()[1].replace(",", "")
    assert said.state is State.CRASHED
    assert said.progress is not None
    assert said.progress.step == int(last)


def test_that_the_loop_was_down_is_said_by_who_finds_it(one: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guard may be faster; where there is none, whoever asks starts it and says so."""
    one.start()
    one.stepping()
    monkeypatch.setattr(daemon, "fresh_snapshot", lambda layout: None)
    monkeypatch.setattr(daemon, "running", lambda layout: None)
    monkeypatch.setattr(daemon, "ensure", lambda layout: True)
    assert any("loop was down and was started again" in w for w in take(one.layout).warnings)
