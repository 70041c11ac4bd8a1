"""Notifications beside a real trainer, through a stand-in for apprise on PATH."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from resident_lab import Lab, wait_for  # type: ignore[import-not-found]

from dflash_ops.contracts import Budgets, Policy
from dflash_ops.resident import attempts
from dflash_ops.resident.notify import deliver
from dflash_ops.resident.tell import tell_person

#: Writes what it gets, one JSON object a line; then does what `then` says.
STAND_IN = """#!{python}
import json, os, sys, time
got = {{"argv": sys.argv[1:], "text": sys.stdin.read(), "pid": os.getpid()}}
with open({out!r}, "a") as f:
    f.write(json.dumps(got) + "\\n")
{then}
"""


def stand_in(folder: Path, then: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    made, out = folder / "apprise", folder / "got"
    made.write_text(STAND_IN.format(python=sys.executable, out=str(out), then=then))
    made.chmod(0o755)
    return out


def got(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_what_needs_a_person_goes_out_once_and_no_secret_with_it(
    one: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stand_in(tmp_path / "bin", "sys.exit(3)")  # and the sink is down
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    config = tmp_path / "apprise.conf"
    config.write_text("mailto://ada:hunter2@192.0.2.9\n")
    (one.control / "at5-raise:boom").touch()
    policy = Policy(mode="act", budgets=Budgets(backoff_s=0.2, backoff_cap_s=1.0), notify=str(config))
    env = {"CONTROL": str(one.control), "SAVE": str(one.root / "checkpoints")}
    one.start(argv=(sys.executable, "-u", str(Path(__file__).parent / "saving.py")), env=env, policy=policy)
    wait_for(lambda: got(out), "a notification", 60)
    (said,) = got(out)
    assert said["argv"] == ["--title=tiny: An error that no playbook names", f"--config={config}"]
    assert "unrecognised_error struck at step 5" in str(said["text"])
    log = one.layout.resident_log
    wait_for(lambda: "nobody was notified: apprise ended with 3" in log.read_text(), "a word of the sink")
    # The same thing again within the cooldown goes nowhere; of another failure it does.
    spec = attempts.read(one.layout, 1).spec
    title, print_ = "tiny: An error that no playbook names", one.events("diagnosed")[0].data["fingerprint"]
    tell_person(one.layout, spec, title, "again", lambda _: None, print_)
    tell_person(one.layout, spec, title, "another", lambda _: None, "ffff")
    wait_for(lambda: len(got(out)) == 2, "the other one")
    assert got(out)[1]["text"] == "another"
    for path in one.root.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path


def test_a_sink_that_hangs_holds_nothing_up(one: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = stand_in(tmp_path / "bin", "time.sleep(300)")
    program = str(tmp_path / "bin/apprise")
    begun = time.monotonic()
    assert deliver("", "t", "x", program=program, deadline=10.0) == "apprise did not end within 10 s"
    assert time.monotonic() - begun < 60
    assert got(out)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    config = tmp_path / "apprise.conf"
    config.touch()
    one.layout.run.mkdir(parents=True, exist_ok=True)
    spec = one.job(policy=Policy(notify=str(config)))
    begun = time.monotonic()
    tell_person(one.layout, spec, "t", "x", lambda _: None)
    assert time.monotonic() - begun < 20  # well below the deadline that apprise has
    wait_for(lambda: len(got(out)) == 2, "it was called")
    os.kill(int(str(got(out)[1]["pid"])), signal.SIGKILL)
    wait_for(lambda: "apprise ended with -9" in one.layout.resident_log.read_text(), "a word of its end")


def test_what_keeps_it_from_going_out_is_said(tmp_path: Path) -> None:
    assert "cannot be read" in str(deliver(str(tmp_path / "none"), "t", "x"))
    assert "pip install apprise" in str(deliver("", "t", "x", program=str(tmp_path / "no-such-program")))
    not_run = tmp_path / "apprise"
    not_run.write_text("")
    assert "cannot be run" in str(deliver("", "t", "x", program=str(not_run)))
