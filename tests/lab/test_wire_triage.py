"""`triage --job` through ssh and pct: one exec in the container, one on the Proxmox host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Lab
from lab.wire_job import Job, job_in

pytestmark = pytest.mark.slow


@pytest.fixture
def job(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Job]:
    with job_in(lab, tmp_path, capfd) as made:
        yield made


def test_a_crash_in_the_container_is_named_from_outside(job: Job) -> None:
    (job.source / "train.py").write_text(
        "import time\n"
        "for step in range(1, 20):\n"
        '    time.sleep(0.05); print(f"it {step}/99 loss {4.0 / step:.3f}", flush=True)\n'
        'raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)")\n'
    )
    assert job.ops("deploy", "--no-rollback").code in (0, 1)
    job.until(lambda s: s["state"] == "crashed")
    before = job.calls
    found = job.ops("triage", "--job", job.name, "--json")
    assert found.code == 0, found.err
    row = json.loads(found.out)
    assert (row["class"], row["attempt"]) == ("shape_mismatch", 1)
    assert row["root_exception"].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert row["user_frame"].endswith("train.py:4")
    assert job.calls - before == 1  # the kernel's log is the Proxmox host's own business: no pct
    assert f"dflash-ops triage --job {job.name}" in job.ops("status", job.name).out
