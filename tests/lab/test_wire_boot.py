"""A machine that boots starts the resident again, by its cron, once `enable` has said so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest

from dflash_ops.cli.main import run
from lab import Lab
from lab.container import SHIFT
from lab.wire_job import job_in

SCHEMA = Path(__file__).resolve().parents[2] / "docs/schemas/enable.schema.json"


def test_after_a_reboot_the_resident_is_there_again(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    container = lab.containers[200]
    spool = container.rootfs / "var/spool/cron/crontabs"
    spool.mkdir(parents=True, exist_ok=True)
    (spool / "root").write_text("5 4 * * * echo theirs\n")
    for path in (spool.parents[1], spool.parent, spool, spool / "root"):
        os.lchown(path, SHIFT, SHIFT)
    with job_in(lab, tmp_path, capfd, name="boots", root="/srv/it's 100%") as job:
        never = job.ops("enable")
        assert never.code == 1
        assert "was never deployed" in never.err
        assert job.ops("deploy").code == 0
        for _ in range(2):  # twice is once
            said = job.ops("enable", "--json")
            assert said.code == 0, said
        jsonschema.validate(said.json, json.loads(SCHEMA.read_text()))
        assert said.json["way"] == "cron"
        assert said.json["warnings"] == [
            "no cron runs on this machine: the entry is there, but nothing would call it at boot"
        ]
        lines = container.exec(["crontab", "-l"]).splitlines()
        assert lines[-2] == "5 4 * * * echo theirs"
        assert lines[-1].startswith("@reboot ")
        assert sum("dflash-ops" in line for line in lines) == 1

        lab.faults.stop_container(200)
        container.start()
        assert not container.exec(["pgrep", "-f", "current.pyz"], ok=None)
        container.exec(["cron"])  # what the machine's init would start
        after = job.until(lambda s: bool(s["resident"] and s["resident"]["alive"] and s["state"] != "unknown"))
        assert (after["state"], after["detail"]) == ("crashed", "the host rebooted while it ran; exit unknown")
        events = (job.there / "run/journal.jsonl").read_text()
        assert events.count('"event":"enabled"') == 2

        assert job.ops("enable", "--off").code == 0
        assert container.exec(["crontab", "-l"]).splitlines()[-1] == "5 4 * * * echo theirs"
        again = job.ops("enable", "--off")
        assert "there was no entry" in again.err
        container.exec(["pkill", "cron"])
    assert run(["enable", "-i", str(job.inventory), "--way", "nobody"]) == 2
