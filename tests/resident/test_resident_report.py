"""status, exporter and report of a real job of a foreign trainer, alive and after a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from resident_lab import Lab
from schemas import valid  # type: ignore[import-not-found]

from dflash_ops.cli.main import run
from dflash_ops.deploy.toml import dump_toml


def samples(text: str) -> dict[str, float]:
    """Of the one job, by name; of its states the one that it is in."""
    found = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            if s.name != "dflash_state" or s.value:
                found[f"{s.name} {s.labels['state']}" if s.name == "dflash_state" else s.name] = s.value
    return found


def test_a_real_job_alive_and_after_a_crash(
    one: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one.root / "resident").mkdir()
    (one.root / "resident/current.pyz").write_bytes(one.pyz.read_bytes())
    job = {"host": "here", "root": str(one.root), "session": "trainer", "socket": one.socket, "command": ["true"]}
    inventory = tmp_path / "inventory.toml"
    hosts = {"here": {"kind": "local", "python": os.path.realpath(sys.executable)}}
    inventory.write_text(dump_toml({"schema": 1, "hosts": hosts, "jobs": {"tiny": job}}))
    monkeypatch.setenv("DFLASH_INVENTORY", str(inventory))
    monkeypatch.chdir(tmp_path)
    assert run(["report"]) == 2
    assert "nothing was ever started" in (said := capsys.readouterr().err)
    assert "dflash-ops deploy" in said

    one.start()
    one.until(lambda s: s.progress and (s.progress.step or 0) > 3, "a few steps")
    assert run(["status", "--state", "stepping"]) == 0
    assert "1 job: 1 stepping" in capsys.readouterr().out
    assert run(["exporter", "--once"]) == 0
    told = samples(capsys.readouterr().out)
    assert (told["dflash_up"], told["dflash_state stepping"], told["dflash_attempt"]) == (1, 1, 1)
    assert told["dflash_step"] > 3
    assert told["dflash_restarts_total"] == 0
    assert told["dflash_disk_free_bytes"] > 0

    one.ask("crash")
    one.until(lambda s: s.state.value == "crashed", "the crash")
    (one.control / "crash").unlink()
    one.start()
    one.stepping()
    assert run(["report", "--json", "--all-attempts"]) == 0
    said = json.loads(capsys.readouterr().out)
    valid("report", said)
    assert [(a["attempt"], a["state"], a["course"]["source"]) for a in said["attempts"]] == [
        (1, "crashed", "log"), (2, "alive", "log"),
    ]  # fmt: skip
    assert said["attempts"][0]["points"][0]["loss"][0] == 5.0
    assert said["state"]["state"] == "stepping"
    assert [i["attempts"] for i in said["incidents"]] == [[1]]
    assert run(["report", "--attempt", "1"]) == 0
    assert "tiny-report.html (" in capsys.readouterr().err
    assert "exit code 1" in (tmp_path / "tiny-report.html").read_text()
    assert run(["report", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")
    os.mkfifo(tmp_path / "pipe")
    for bad, word in (
        (["--attempt", "9"], "use one of 1, 2"),
        (["-o", str(tmp_path / "pipe")], "no ordinary file"),
        (["-o", "a" * 300], "File name too long"),
        (["--attempt", "1", "--all-attempts"], "exclude each other"),
        (["-o", str(tmp_path)], "is a folder"),
        (["-o", "no/where.html"], "there is no folder"),
        (["--json", "-o", "x.html"], "leave one of them out"),
        (["--node", "3"], "one machine only"),
    ):
        assert run(["report", *bad]) == 2
        err = capsys.readouterr()
        assert word in err.err + err.out, bad
    # an older resident that does not know the question yet
    (one.root / "resident/current.pyz").write_text(
        "import json\nprint(json.dumps({'schema': 1, 'error': {'type': 'UsageError', 'what': \"no command 'history'\","
        "'where': '', 'next': ''}}))\nraise SystemExit(2)\n"
    )
    assert run(["report"]) == 1
    assert "sends a newer one" in capsys.readouterr().err


def test_the_exporter_ends_by_term(tmp_path: Path) -> None:
    inventory = tmp_path / "inventory.toml"
    jobs = {"a": {"host": "h", "root": str(tmp_path / "a"), "session": "a", "command": ["true"]}}
    inventory.write_text(dump_toml({"schema": 1, "hosts": {"h": {"kind": "local"}}, "jobs": jobs}))
    argv = [sys.executable, "-m", "dflash_ops.cli.main", "exporter", "--listen", "127.0.0.1:0", "-i", str(inventory)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("exporter: 1 job, every 15 s: http://127.0.0.1:")
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
