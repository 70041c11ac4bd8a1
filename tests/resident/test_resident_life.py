"""A foreign trainer from start to end, as its operator sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from resident_lab import Lab, lab, wait_for

from dflash_ops.contracts import Process, Snapshot, State, dumps, from_dict
from dflash_ops.resident import attempts, daemon, proc


def test_never_started(one: Lab) -> None:
    snapshot = one.snapshot()
    assert (snapshot.state, snapshot.detail, snapshot.attempt) == (State.UNKNOWN, "never started", None)
    assert one.ok("stop")["detail"] == "never started"
    assert one.run("logs").error["type"] == "UsageError"


def test_a_run_is_watched_and_ends_well(one: Lab) -> None:
    started = one.start(release=None, reason="first", overrides={"lr": "1"}, actor="somebody")
    assert started["attempt"] == 1
    assert started["session"]["name"] == "trainer"
    first = one.stepping()
    assert first.progress is not None
    assert (first.attempt, first.progress.total, first.job) == (1, 100_000, "tiny")
    assert first.progress.loss == pytest.approx(5 / (first.progress.step or 0), abs=1e-3)
    assert first.session is not None and first.session.alive
    assert first.resident is not None and first.resident.alive
    assert first.warnings == ()
    step = first.progress.step or 0
    one.until(lambda s: s.progress and (s.progress.step or 0) > step, "more steps")
    one.ask("exit0")
    ended = one.until(lambda s: s.state is State.FINISHED, "the end")
    assert ended.exit is not None
    assert (ended.exit.rc, ended.exit.signal, ended.exit.requested) == (0, None, None)
    log = (one.layout.attempt(1).log).read_bytes()
    assert log.startswith(b"==== dflash-ops attempt 1 release - 20")
    assert b"\nit 1 of 100,000 loss=5.0000\n" in log
    assert ended.exit.log_bytes == len(log)
    events = wait_for(lambda: one.events("state")[-1].data["state"] == "finished" and one.events(), "the journal")
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    begun = one.events("attempt_started")[0]
    assert (begun.actor, begun.attempt, begun.data["reason"], begun.data["overrides"]) == (
        "somebody", 1, "first", {"lr": "1"},
    )  # fmt: skip
    assert [e.data["state"] for e in one.events("attempt_exited")] == ["finished"]
    assert one.events("attempt_exited")[0].data["rc"] == 0
    assert one.has_session()  # the pane stays, to be looked at
    assert "step" not in one.tmux("show-environment", "-g")


def test_a_crash_is_told_with_its_code_and_a_restart_is_another_attempt(one: Lab) -> None:
    one.start()
    one.stepping()
    one.ask("crash")
    crashed = one.until(lambda s: s.state is State.CRASHED, "the crash")
    assert crashed.detail == "exit code 1"
    assert b"RuntimeError: crash on request" in one.run("logs", "--lines", "3").out
    (one.control / "crash").unlink()
    assert one.start()["attempt"] == 2
    again = one.stepping()
    assert again.attempt == 2 and again.exit is None
    assert b"attempt 2" in one.layout.attempt(2).log.read_bytes().splitlines()[0]
    listed = one.ok("attempts")["attempts"]
    assert [(a["attempt"], a["state"], a["alive"]) for a in listed] == [(1, "crashed", False), (2, None, True)]


def test_a_stop_is_a_stop(one: Lab) -> None:
    one.start("save-on-term")
    one.stepping()
    said = one.ok("stop", "--reason", "enough", "--actor", "me")
    assert (said["state"], said["already"], said["escalated"]) == ("stopped", False, False)
    assert (said["exit"]["rc"], said["exit"]["requested"]) == (3, "stop")
    assert not one.has_session()
    assert one.snapshot().state is State.STOPPED
    again = one.ok("stop")
    assert (again["state"], again["already"]) == ("stopped", True)
    requested = one.events("stop_requested")
    assert [(e.actor, e.data["reason"]) for e in requested] == [("me", "enough")]
    assert len(one.events("attempt_exited")) == 1


def test_who_does_not_stop_is_killed_with_all_below_it(one: Lab) -> None:
    one.start("ignore-term", "workers")
    one.stepping()
    family = proc.family(one.launcher())
    assert len(family) == 2
    said = one.ok("stop", "--grace", "0.3")
    assert (said["state"], said["escalated"]) == ("stopped", True)
    assert said["exit"]["signal"] == "SIGKILL"
    assert not any(map(proc.alive, family))
    assert len(one.events("stop_escalated")) == 1


def test_workers_that_outlive_their_launcher_are_ended_too(one: Lab) -> None:
    one.start("workers")
    one.stepping()
    family = proc.family(one.launcher())
    said = one.ok("stop")
    assert said["state"] == "stopped"
    assert said["exit"]["signal"] == "SIGTERM"  # written down although the workers kept the pipe open
    assert not any(map(proc.alive, family))


def test_what_a_crash_left_behind_blocks_a_start_until_stop(one: Lab) -> None:
    one.start("workers")
    one.stepping()
    mine = {p for p in proc.family(one.launcher()) if _session(p) == one.launcher().pid}
    strangers = proc.family(one.launcher()) - mine
    proc.send(one.launcher(), signal.SIGKILL)
    one.until(lambda s: s.state is State.CRASHED and any("still live" in w for w in s.warnings), "the warning")
    busy = one.run("start", stdin=dumps(one.job()))
    assert (busy.rc, busy.error["type"]) == (4, "JobBusy")
    assert str(next(iter(mine)).pid) in busy.error["what"]
    assert one.ok("stop")["already"] is True
    assert not any(map(proc.alive, mine))
    for process in strangers:  # left its session and lost its parent: nobody can know that it was ours
        proc.send(process, signal.SIGKILL)
    assert one.start()["attempt"] == 2


def _session(process: Process) -> int:
    found = proc.stat(process.pid)
    return found.session if found else 0


def test_ctrl_c_in_the_pane_is_a_stop(one: Lab) -> None:
    one.start()
    one.stepping()
    one.tmux("send-keys", "-t", "=trainer:", "C-c")
    ended = one.until(lambda s: s.exit is not None, "the end")
    assert ended.state is State.STOPPED
    assert ended.exit is not None
    assert (ended.exit.requested, ended.exit.signal) == ("INT", "SIGINT")


def test_other_keys_in_the_pane_change_nothing(one: Lab) -> None:
    """Ctrl-Z would stop and Ctrl-\\ end whoever empties the trainer's pipe; Ctrl-S stops the terminal."""
    one.start()
    one.stepping()
    one.tmux("send-keys", "-t", "=trainer:", "C-z", "C-\\", "C-s", "x")
    one.ask("flood")
    wait_for(lambda: one.layout.attempt(1).log.stat().st_size > 3_000_000, "output beyond all buffers")
    step = one.stepping().progress
    assert step is not None and step.step is not None
    one.until(lambda s: (s.progress.step or 0) > step.step + 3, "more steps")  # type: ignore[union-attr, operator]
    assert proc.alive(one.wrapper()) and one.snapshot().warnings == ()


def test_a_root_with_an_awkward_name(pyz: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wörk #{pid} $HOME 'x';"
    folder.mkdir()
    with lab(pyz, folder) as one:
        one.root = one.root.rename(folder / "root;")
        one.start(session="größe 2 (x) 'a' 日本")
        assert one.stepping().session is not None
        assert "größe 2 (x) 'a' 日本" in one.tmux("-u", "list-sessions", "-F", "#{session_name}").splitlines()
        one.ask("exit0")
        one.until(lambda s: s.state is State.FINISHED, "the end")
        assert (
            one.start(argv=("/bin/true",), session="größe 2 (x) 'a' 日本")["attempt"] == 2
        )  # it knows its own ended session again


def test_term_to_the_wrapper_is_passed_on(one: Lab) -> None:
    one.start("save-on-term")
    one.stepping()
    proc.send(one.wrapper(), signal.SIGTERM)
    ended = one.until(lambda s: s.exit is not None, "the end")
    assert (ended.state, ended.exit and ended.exit.rc, ended.exit and ended.exit.requested) == (
        State.STOPPED,
        3,
        "TERM",
    )


def test_a_living_job_is_busy(one: Lab) -> None:
    one.start()
    busy = one.run("start", stdin=dumps(one.job()))
    assert (busy.rc, busy.error["type"]) == (4, "JobBusy")
    assert f"pid {one.launcher().pid}" in busy.error["what"]
    assert attempts.numbers(one.layout) == [1]
    aside = one.run("aside", "--reason", "x")
    assert aside.error["type"] == "JobBusy"


def test_a_session_of_somebody_else_is_left_alone(one: Lab) -> None:
    one.tmux("-f", "/dev/null", "new-session", "-d", "-s", "trainer", "sleep", "300")
    busy = one.run("start", stdin=dumps(one.job()))
    assert (busy.rc, busy.error["type"]) == (4, "JobBusy")
    assert "taken" in busy.error["what"] and one.socket in busy.error["where"]
    assert one.has_session()
    assert attempts.numbers(one.layout) == []
    assert one.ok("stop")["already"] is True
    assert one.has_session()


def test_panes_that_somebody_opened_in_our_session_survive(one: Lab) -> None:
    one.start()
    one.stepping()
    one.tmux("split-window", "-t", "=trainer:", "sleep", "300")
    one.ok("stop")
    kept = one.tmux("list-panes", "-a", "-F", "#{session_name} #{pane_start_command}").splitlines()
    assert len(kept) == 1
    assert kept[0].startswith("trainer-kept-") and "sleep" in kept[0]
    assert one.start()["attempt"] == 2


def test_the_pane_has_its_history_and_shows_the_run(one: Lab) -> None:
    one.start(history_limit=4321)
    one.stepping()
    assert one.tmux("display-message", "-p", "-t", "=trainer:", "#{history_limit} #{pane_width}").split() == [
        "4321",
        "250",
    ]
    wait_for(lambda: "it 2 of" in one.tmux("capture-pane", "-p", "-S", "-", "-t", "=trainer:"), "the pane")


def test_follow_tells_each_change_and_ends_with_the_job(one: Lab) -> None:
    one.start()
    one.stepping()
    process = subprocess.Popen(one.argv("follow"), stdout=subprocess.PIPE)
    assert process.stdout is not None
    lines = [from_dict(Snapshot, json.loads(process.stdout.readline())) for _ in range(3)]
    assert [s.state for s in lines] == [State.STEPPING] * 3
    assert lines[0].t < lines[1].t < lines[2].t
    begun = time.monotonic()
    one.ask("exit0")
    rest = [from_dict(Snapshot, json.loads(line)) for line in process.stdout]
    assert process.wait(30) == 0
    assert rest[-1].state is State.FINISHED
    assert time.monotonic() - begun < 20
    # a reader that goes away ends it
    forever = subprocess.Popen(one.argv("follow", "--forever"), stdout=subprocess.PIPE)
    assert forever.stdout is not None
    forever.stdout.readline()
    forever.stdout.close()
    assert forever.wait(30) != 0


def test_logs_are_the_bytes(one: Lab) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'\xff\x00 one\r10%\r20%\n\x1b[31mtwo\x1b[0m\nthree'); sys.exit(0)"
    one.start(argv=(sys.executable, "-c", code), progress="")
    one.until(lambda s: s.exit is not None, "the end")
    raw = one.run("logs", "--lines", "-1").out
    assert raw == one.layout.attempt(1).log.read_bytes()
    assert raw.endswith(b"\xff\x00 one\r10%\r20%\n\x1b[31mtwo\x1b[0m\nthree")
    assert one.run("logs", "--lines", "2").out == b"\x1b[31mtwo\x1b[0m\nthree"
    marked = one.run("logs", "--lines", "1", "--marker").out
    assert marked.startswith(b"==== dflash-ops attempt 1 ") and marked.endswith(b" ====\nthree")
    assert one.run("logs", "--attempt", "7").error["what"] == "there is no attempt 7"
    one.layout.attempt(1).logs.mkdir()
    (one.layout.attempt(1).logs / "target0.log").write_bytes(b"hello\n")
    assert one.run("logs", "--worker", "target0").out == b"hello\n"
    assert "target0" in one.run("logs", "--worker", "target9").error["next"]


def test_logs_follow_to_the_end(one: Lab) -> None:
    one.start()
    process = subprocess.Popen(one.argv("logs", "--follow", "--lines", "-1"), stdout=subprocess.PIPE)
    one.stepping()
    one.ask("exit0")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == one.layout.attempt(1).log.read_bytes()


def test_the_environment_is_ours_and_the_jobs_not_the_callers(one: Lab) -> None:
    code = "import os, json; print('ENV', json.dumps(dict(os.environ)))"
    env = {**os.environ, "LEAKED": "yes", "PYTHONPATH": "/nowhere", "TMUX_TMPDIR": "/nowhere"}
    job = one.job(argv=(sys.executable, "-c", code), env={"OWN": "{root}|{attempt}|{checkpoints}|{x}"}, progress="")
    assert one.run("start", stdin=dumps(job), env=env).rc == 0
    one.until(lambda s: s.exit is not None, "the end")
    line = next(x for x in one.layout.attempt(1).log.read_text().splitlines() if x.startswith("ENV "))
    seen = json.loads(line.removeprefix("ENV "))
    assert "LEAKED" not in seen and "PYTHONPATH" not in seen and "TMUX" not in seen
    root = str(one.root)
    assert seen["OWN"] == f"{root}|{root}/run/attempts/1|{root}/checkpoints|{{x}}"
    ones = ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    assert [seen[k] for k in ones] == ["1"] * 3
    assert (seen["TORCH_FR_BUFFER_SIZE"], seen["DFLASH_ATTEMPT"]) == ("2000", "1")
    assert seen["TORCHINDUCTOR_CACHE_DIR"] == f"{root}/run/attempts/1/inductor"


def test_a_compile_cache_is_shared_only_after_a_good_end(one: Lab) -> None:
    for number, code in ((1, 0), (2, 1), (3, 0)):
        one.start(argv=(sys.executable, "-c", f"raise SystemExit({code})"), progress="")
        one.until(lambda s, n=number: s.attempt == n and s.exit is not None, "the end")  # type: ignore[misc]
    caches = [Path(s.cache_dir).parent.name for n in (1, 2, 3) if (s := attempts.read(one.layout, n).start)]
    assert caches == ["1", "1", "3"]


def test_files_of_the_attempt_and_its_placeholders(one: Lab) -> None:
    argv = ("/bin/cat", "{attempt}/run.toml")
    one.start(argv=argv, files={"run.toml": 'schema = 1\nname = "{keep}"\n'}, cwd="{attempt}", progress="")
    one.until(lambda s: s.state is State.FINISHED, "the end")
    assert b'schema = 1\nname = "{keep}"\n' in one.run("logs").out


def test_bundled_lines_make_stages_checkpoints_and_workers(one: Lab) -> None:
    metrics = {
        "schema": 1,
        "t": time.time(),
        "step": 20,
        "total": 50,
        "workers": {"target0": {"wait": 0.25, "life": 1}},
    }
    script = f"""
import json, os, time
folder = {str(one.layout.attempt(1).path)!r}
print("dflash stage=loading k=1 n=3 what=target0", flush=True)
time.sleep(2.5)
print("dflash step=20/50 loss=2.5 tau=2.9 block_tok_s=100 ring=3/8 life=1")
print("dflash event=checkpoint step=20 path=checkpoints/step-00000020", flush=True)
open(folder + "/metrics.jsonl", "w").write(json.dumps({metrics!r}) + "\\n")
os.makedirs(folder + "/errors/target0")
message = {{"message": {{"message": "ValueError: late", "extraInfo": {{"timestamp": "200"}}}}}}
open(folder + "/errors/target0/error.json", "w").write(json.dumps(message))
os.makedirs(folder + "/errors/drafter0")
message["message"]["extraInfo"]["timestamp"] = "100"
message["message"]["message"] = "RuntimeError: first"
open(folder + "/errors/drafter0/error.json", "w").write(json.dumps(message))
time.sleep(300)
"""
    one.start(argv=(sys.executable, "-c", script), progress="")
    loading = one.until(lambda s: s.state is State.LOADING and s.stage, "the stage")
    assert loading.stage is not None
    assert (loading.stage.k, loading.stage.n, loading.stage.what) == (1, 3, "target0")
    both = one.until(lambda s: s.workers and s.checkpoint and s.error, "workers and checkpoint")
    assert both.state is State.STEPPING
    assert both.workers["target0"].wait == 0.25
    assert both.checkpoint is not None and (both.checkpoint.step, both.life) == (20, 1)
    assert both.progress is not None and (both.progress.ring_ready, both.progress.tau) == (3, 2.9)
    assert both.error is not None and (both.error.worker, both.error.message) == ("drafter0", "RuntimeError: first")
    wait_for(lambda: one.events("checkpoint"), "the journal")
    assert one.events("checkpoint")[0].data == {"step": 20, "path": "checkpoints/step-00000020"}
    # What is set aside is no checkpoint of this job any more, neither now nor for the attempt after it.
    one.ok("stop", "--grace", "10")
    (one.root / "checkpoints/step-00000020").mkdir(parents=True)
    assert one.ok("aside", "--reason", "fresh")["moved"] is True
    one.until(lambda s: s.checkpoint is None, "no checkpoint")
    one.start()
    assert one.stepping().checkpoint is None


def test_hung_and_slow_follow_the_jobs_limits(one: Lab) -> None:
    from dflash_ops.contracts import Limits

    one.start(limits=Limits(step_s=2.0))
    one.stepping()
    one.ask("quiet")
    hung = one.until(lambda s: s.state is State.HUNG, "hung")
    assert "limit" in hung.detail
    (one.control / "quiet").unlink()
    one.stepping()
    states = wait_for(lambda: (s := [e.data["state"] for e in one.events("state")])[-1] == "stepping" and s, "journal")
    assert states[-2:] == ["hung", "stepping"]


def test_the_loop_is_one_and_goes_when_told(one: Lab) -> None:
    one.start()
    record = wait_for(lambda: daemon.running(one.layout), "the loop")
    assert one.run("loop").rc == 0
    assert daemon.running(one.layout) == record
    proc.send(record.process, signal.SIGTERM)
    wait_for(lambda: not proc.alive(record.process), "the loop's end")
    assert one.events("resident_stopped")
    last = daemon.last_snapshot(one.layout)
    assert last is not None and last.resident is not None and not last.resident.alive
    assert proc.alive(one.launcher())
