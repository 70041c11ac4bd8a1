"""A rebalance in a container whose link fails at the worst moment: the change is whole, and can be ended."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Lab
from lab.wire_job import PYTHON, Job, job_in, meanwhile

sys.path.append(str(Path(__file__).resolve().parents[1] / "deploy"))
from split_trainer import write_source

pytestmark = pytest.mark.slow

SPLIT = ("--targets", "2", "--drafters", "1", "--devices", "cpu,cpu,cpu", "--json")


@pytest.fixture
def job(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Job]:
    with job_in(lab, tmp_path, capfd) as made:
        tables = {
            "target": {"path": "target"},
            "drafter": {"mask_token_id": 3},
            "data": {"path": "data.jsonl"},
            "train": {"epochs": 4, "average_every": 4, "log_every": 1},
        }
        made.write(
            source=str(write_source(tmp_path / "split-src")), command=None, progress=None, interpreter=PYTHON,
            env={"HERE": "{root}"}, trainer={"target_devices": ["cpu"], "drafter_devices": ["cpu"], **tables},
        )  # fmt: skip
        yield made


def phase(job: Job) -> str:
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((job.there / "run/switch.json").read_text())["phase"])
    return ""


def test_a_link_that_goes_while_the_job_is_stopped_leaves_the_new_split(job: Job, lab: Lab) -> None:
    assert job.ops("deploy").code == 0
    job.until(lambda s: (s["progress"] or {}).get("step", 0) >= 16)
    (job.there / "slow_stop").write_text("3")

    def cut() -> None:
        end = time.monotonic() + 90
        while phase(job) != "stopping":
            assert time.monotonic() < end
            time.sleep(0.05)
        with lab.faults.link_down("pve1"):
            while phase(job) != "done":  # it goes on without us
                assert time.monotonic() < end
                time.sleep(0.1)
            time.sleep(12.0)

    with meanwhile(cut):
        lost = job.ops("rebalance", *SPLIT)
    assert lost.code == 5, lost.err
    assert "dflash-ops rebalance wire --targets 2 --drafters 1" in lost.err
    status = job.until(lambda s: s["attempt"] == 2 and s["state"] == "stepping")
    assert sorted(status["workers"]) == ["drafter0", "target0", "target1"]

    kept = job.ops("rebalance", *SPLIT)
    assert kept.code == 0, kept.err
    assert (kept.json["outcome"], kept.json["attempt"]) == ("kept", 2)
    assert 'target_devices = ["cpu", "cpu"]' in job.inventory.read_text()
