"""`supervise` over the wire: a cut link is only told; a stopped container is started, and the job in it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import Lab
from lab.wire_job import job_in


def test_a_cut_link_is_told_and_a_stopped_container_started(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    policy = {
        "mode": "act",
        "allow": ["ct_down:start_container", "host_rebooted:restart"],
        "budgets": {"backoff_s": 0.5},
    }
    with job_in(lab, tmp_path, capfd, name="outside", root="/srv/outside", policy=policy) as job:
        job.write(watch_s=1)
        assert job.ops("deploy").code == 0
        job.until(lambda s: s["state"] == "stepping")
        seen = job.ops("supervise", "--once")
        assert (seen.code, seen.out) == (0, "")

        with lab.faults.reset("pve1"):
            cut = job.ops("supervise", "--once")
        assert cut.code == 5
        assert "outside: unreachable since " in cut.out
        assert len(cut.out.splitlines()) == 1
        back = job.ops("supervise", "--once")
        assert back.code == 0
        assert "no longer unreachable" in back.out

        lab.faults.stop_container(200)
        with lab.faults.locked(200):
            held = job.ops("supervise", "--once")
            assert held.code == 1
            assert "and is locked by: backup" in held.out
            assert "it waits until the other task lets the container go" in held.out
            assert job.ops("supervise", "--once").out == ""
        (memory,) = (tmp_path / "state").rglob("seen.json")
        seen = json.loads(memory.read_text())
        memory.write_text(json.dumps({**seen, "lock_next": 0.0}))  # as if its time had come
        down = job.ops("supervise", "--once")
        assert down.code == 1
        assert "the other task has let the container go" in down.out
        assert "the container was started: pct start 200" in down.out
        job.until(lambda s: s["attempt"] == 2 and s["state"] == "stepping")
        assert "no longer container stopped" in job.ops("supervise", "--once").out
