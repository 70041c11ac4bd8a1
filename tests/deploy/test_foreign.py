"""A foreign trainer on this machine, real tmux and real processes: deployed, watched, stopped, replaced, killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas import valid

if TYPE_CHECKING:
    from conftest import Toy


def stepping(status: dict[str, Any]) -> bool:
    return bool(status["state"] == "stepping" and status["progress"]["step"])


def test_deploy_watch_refuse_replace_stop(toy: Toy) -> None:
    """The whole life of a job, as its operator sees it."""
    first = toy.ops("deploy", "--json", "--reason", "first light")
    assert first.code == 0, first.err
    assert [line.split(":")[0] for line in first.err.splitlines() if "..." not in line] == [
        "plan", "connect", "send", "preflight", "start", "watch", "watch it",
    ]  # fmt: skip
    valid("deploy", first.json)
    assert (first.json["attempt"], first.json["files"]) == (1, 1)
    assert (toy.root / "current").readlink() == Path("releases") / first.json["release"]

    seen = toy.ops("status", "--json")
    valid("status", seen.json)
    status = toy.until(stepping)
    assert status["progress"]["total"] == 1000
    assert status["session"]["alive"]
    text = toy.ops("status").out
    assert "stepping" in text
    assert "/1000" in text

    # A running job is not touched without --replace: same launcher, still stepping.
    launcher = toy.record(1, "start")["launcher"]
    again = toy.ops("deploy")
    assert again.code == 4
    assert "--replace" in again.err
    assert toy.record(1, "start")["launcher"] == launcher
    assert toy.status["attempt"] == 1

    # The trainer saved at its stop: what to do with that checkpoint must be said, before the job is touched.
    second = toy.ops("deploy", "--replace", "--resume", "--set", "env.EXTRA=1", "--json")
    assert second.code == 0, second.err
    valid("deploy", second.json)
    assert (second.json["attempt"], second.json["files"]) == (2, 0)
    assert toy.record(1, "exit")["rc"] == 3
    assert toy.record(1, "exit")["requested"] == "stop"
    deployed = [e for e in toy.journal if e["event"] == "deployed"]
    assert deployed[0]["data"]["reason"] == "first light"
    assert deployed[0]["actor"].startswith("operator ")
    assert "env.EXTRA" in deployed[1]["data"]["overrides"]
    assert toy.record(2, "start")["overrides"].keys() == {"env.EXTRA"}

    toy.until(lambda s: stepping(s) and s["attempt"] == 2)
    assert "it " in toy.ops("logs", "-n", "3").out
    assert "attempt 1 release" in toy.ops("logs", "--attempt", "1", "-n", "1000").out
    assert toy.ops("attach", "--print").out == f"tmux -L {toy.socket} attach -t =toy\n"

    stopped = toy.ops("stop", "--json", "--reason", "enough")
    assert stopped.code == 0, stopped.err
    valid("stop", stopped.json)
    assert "stopped: exit code 3" in stopped.err
    assert toy.status["state"] == "stopped"
    assert not toy.session_there
    assert "had ended before" in toy.ops("stop").err


def test_checkpoints_are_neither_resumed_nor_left_behind_by_accident(toy: Toy) -> None:
    saved = toy.root / "checkpoints/step-00000007"
    saved.mkdir(parents=True)
    (saved / "weights").write_text("precious")
    refused = toy.ops("deploy")
    assert refused.code == 3
    for part in ("step-00000007", "--resume", "--fresh"):
        assert part in refused.err
    toy.nothing_started()

    fresh = toy.ops("deploy", "--fresh", "--json")
    assert fresh.code == 0, fresh.err
    assert not list((toy.root / "checkpoints").iterdir())
    kept = list(toy.root.glob("checkpoints.aside/*/checkpoints/step-00000007/weights"))
    assert [k.read_text() for k in kept] == ["precious"]
    assert str(kept[0]).startswith(fresh.json["aside"]["to"])

    assert toy.ops("deploy", "--resume", "--fresh").code == 2


def test_a_crash_at_once_is_a_failed_deploy_that_shows_the_last_words(toy: Toy) -> None:
    toy.root.mkdir()
    (toy.root / "crash").touch()
    outcome = toy.ops("deploy")
    assert outcome.code == 1
    assert "RuntimeError: asked to crash" in outcome.err
    assert "attempt 1 ended at once: exit code 1" in outcome.err
    assert toy.status["state"] == "crashed"
    # and it is no busy job: after the repair the next deploy works
    (toy.root / "crash").unlink()
    assert toy.ops("deploy").code == 0


def test_kill_9_of_the_launcher_and_of_the_tmux_server_are_told_truly_within_two_seconds(toy: Toy) -> None:
    assert toy.ops("deploy").code == 0
    toy.until(stepping)
    server = int(toy.tmux("display", "-p", "#{pid}").stdout)
    os.kill(server, signal.SIGKILL)
    toy.until(lambda s: not s["session"]["alive"], 15)
    before = toy.status
    assert before["state"] == "stepping"  # the trainer outlives its terminal
    toy.until(lambda s: s["progress"]["step"] > before["progress"]["step"])

    launcher = toy.record(1, "start")["launcher"]["pid"]
    os.kill(launcher, signal.SIGKILL)
    killed = time.monotonic()
    status = toy.until(lambda s: s["state"] == "crashed")
    assert time.monotonic() - killed < 2.0
    assert status["exit"]["signal"] == "SIGKILL"
    assert "ended by SIGKILL" in toy.ops("status").out


def test_a_trainer_that_ignores_term_is_ended_after_the_grace_time_and_that_is_said(toy: Toy) -> None:
    toy.write(env={"HERE": "{root}", "DEAF": "1"})
    assert toy.ops("deploy").code == 0
    outcome = toy.ops("stop", "--grace", "0.5", "--json")
    assert outcome.code == 0
    assert outcome.json["escalated"]
    assert "KILL" in outcome.err
    assert toy.status["state"] == "stopped"


def test_watch_on_a_pipe_prints_a_line_a_change_and_ends_with_the_job(toy: Toy) -> None:
    assert toy.ops("deploy").code == 0
    watching = toy.spawn("status", "--watch")
    assert watching.stdout is not None
    first = watching.stdout.readline()
    assert "stepping" in first
    screen = shlex.join([sys.executable, "-m", "dflash_ops.cli.main", "status", "-i", str(toy.inventory), "--watch"])
    toy.tmux("new-session", "-d", "-x", "80", "-y", "24", "-s", "watch", f"TERM=screen {screen}; sleep 600")
    toy.shows("watch", "● stepping", "/1000")
    (toy.root / "finish").touch()
    toy.shows("watch", "finished", "exit code 0", "q quit")
    toy.tmux("send-keys", "-t", "=watch:", "q")
    toy.shows("watch", "toy  finished", "step ")  # what was known last stays on the person's own screen
    out, err = watching.communicate(timeout=60)
    assert watching.returncode == 0, err
    lines = [first, *out.splitlines()]
    assert len(lines) == len(set(lines))
    assert lines[-1].startswith("toy  finished")

    (toy.root / "finish").unlink()
    assert toy.ops("deploy").code == 0
    watching = toy.spawn("status", "--watch", "--json")
    following = toy.spawn("logs", "--follow", "-n", "0")
    assert following.stdout is not None
    assert following.stdout.readline().startswith("it ")  # a line that came after the command
    (toy.root / "crash").touch()
    out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 1
    last = json.loads(out.splitlines()[-1])
    valid("status", last)
    assert last["jobs"][0]["state"] == "crashed"
    tail, _ = following.communicate(timeout=60)
    assert following.returncode == 0
    assert "asked to crash" in tail


def test_status_and_the_others_before_any_deploy_are_sentences(toy: Toy) -> None:
    status = toy.ops("status", "--json")
    assert status.code == 0
    valid("status", status.json)
    one = status.json["jobs"][0]
    assert (one["state"], one["deployed"]) == ("unknown", False)
    assert "dflash-ops deploy toy" in one["detail"]
    for command in (["stop"], ["logs"]):
        outcome = toy.ops(*command)
        assert outcome.code == 1
        assert "never deployed" in outcome.err
        assert "Traceback" not in outcome.err
    assert not toy.root.exists()


def test_ctrl_c_says_whether_the_job_was_touched(toy: Toy) -> None:
    toy.write(env={"HERE": "{root}", "DEAF": "1"}, grace_s=60)
    assert toy.ops("deploy").code == 0
    for line, says in (
        ("connect: ", "not touched"),
        ("stop: ...", "being stopped; what is true now: dflash-ops status"),
    ):
        deploying = toy.spawn("deploy", "--replace")
        assert deploying.stderr is not None
        seen = ""
        while line not in seen:
            one = deploying.stderr.readline()
            assert one, seen
            seen += one
        deploying.send_signal(signal.SIGINT)
        _, err = deploying.communicate(timeout=60)
        assert deploying.returncode == 130
        assert says in err and "Traceback" not in err, err
    assert toy.status["state"] == "stepping"  # it is deaf, and who would have sent KILL is gone
