"""A job's life through ssh and pct in an unprivileged container: deploy, status, logs -f, stop, rollback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import Lab
from lab.wire_job import PYTHON, Job, into_container, job_in, stepping

pytestmark = pytest.mark.slow


@pytest.fixture
def job(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Job]:
    with job_in(lab, tmp_path, capfd) as made:
        yield made


def test_deploy_status_logs_change_crash_rollback_stop(job: Job) -> None:
    planned = job.ops("deploy", "--plan")
    assert planned.code == 0, planned.err
    before = job.calls
    first = job.ops("deploy", "--json")
    assert first.code == 0, first.err
    # what the plan says, counted on the Proxmox host: no exec beyond
    assert job.calls - before == first.json["execs"] == 4
    assert "in all 4 commands on ct200" in planned.err

    before = job.calls
    assert job.ops("status").code == 0
    assert job.calls - before == 1
    status = job.until(stepping)
    assert (status["release"], status["session"]["alive"]) == (first.json["release"], True)

    logs = job.spawn("logs", "-f", "-n", "5")
    assert logs.stdout is not None
    lines = [logs.stdout.readline() for _ in range(60)]
    logs.send_signal(signal.SIGINT)
    assert logs.wait(20) == 130
    steps = [int(m[1]) for line in lines if (m := re.match(r"it (\d+)/", line))]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert len(steps) >= 55

    # one changed file of four travels; the job is stopped, saves and goes on
    job.release(extra="1" * 5000, other="2" * 5000)
    (job.source / "empty").touch()
    second = job.ops("deploy", "--replace", "--resume", "--json")
    assert second.code == 0, second.err
    assert (second.json["files"], second.json["kept"]) == (3, 1)
    assert list(job.there.glob("checkpoints/step-*"))

    # a release that crashes in its watch window: what ran before runs again
    job.release(bad=True, extra="1" * 5000, other="2" * 5000)
    third = job.ops("deploy", "--replace", "--resume", "--json")
    assert third.code == 1
    assert "ROLLED BACK" in third.err
    assert third.json["rolled_back"]["release"] == second.json["release"]
    assert job.until(stepping)["release"] == second.json["release"]

    back = job.ops("rollback", first.json["release"][:8])
    assert back.code == 0, back.err
    assert job.until(stepping)["release"] == first.json["release"]
    stopped = job.ops("stop", "--json")
    assert stopped.code == 0
    assert stopped.json["exit"]["rc"] == 3
    assert job.status["state"] == "stopped"


NASTY = "ü 'q' \"d\" $HOME `id` \\ % # *"


def test_every_string_that_a_user_can_give(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Non-ASCII, quotes, what a shell would expand; newlines where a value may hold one."""
    value = f"first\nsecond {NASTY}\n\ttab"
    with (
        lab.faults.locale_noise("pve1", always=True),
        job_in(lab, tmp_path, capfd, name=NASTY, root=f"/srv/{NASTY}", session="größe") as job,
    ):
        job.write(env={"SAVE": "{checkpoints}", "VALUE": value}, checkpoints=f"my {NASTY}")
        text = 'import os, sys\nprint("VALUE", ascii(os.environ["VALUE"]), ascii(sys.argv[1:]), flush=True)\n'
        (job.source / f"a {NASTY}\nb.py").write_text("nasty name")
        (job.source / "train.py").write_text(text + (job.source / "train.py").read_text())
        job.write(command=[PYTHON, "{release}/train.py", value, NASTY])
        deployed = job.ops("deploy", NASTY, "--reason", f"because\n{NASTY}", "--json")
        assert deployed.code == 0, deployed.err
        assert job.until(stepping)["job"] == NASTY
        said = job.ops("logs", NASTY, "-n", "100000").out
        assert f"VALUE {value!a} {[value, NASTY]!a}" in said
        release = job.there / "releases" / deployed.json["release"]
        assert (release / f"a {NASTY}\nb.py").read_text() == "nasty name"
        assert job.ops("releases", NASTY).code == 0
        # a tree with such names again: only what changed
        (job.source / f"{NASTY} 2").symlink_to(f"a {NASTY}\nb.py")
        again = job.ops("deploy", NASTY, "--replace", "--resume", "--reason", value, "--json")
        assert again.code == 0, again.err
        assert again.json["files"] == 0
        assert job.ops("rollback", NASTY).code == 0
        assert job.ops("stop", NASTY, "--reason", value).code == 0
        reasons = [json.loads(line)["data"].get("reason") for line in (job.there / "run/journal.jsonl").open()]
        assert {f"because\n{NASTY}", value} <= set(reasons)
        assert list(job.there.glob("my */step-*"))


def test_the_bundled_trainer_in_the_container(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real steps in the container; another topology passes the gate beside the running job before it takes over."""
    from trainer.smoke import MASK, write_samples, write_target

    material = tmp_path / "material"
    write_target(material / "target")
    write_samples(material / "data.jsonl", 64)
    into_container(lab, 200, material, "/srv/material")
    with job_in(lab, tmp_path, capfd, name="real") as job:
        trainer = {
            "target_devices": ["cpu"],
            "drafter_devices": ["cpu"],
            "target": {"path": "/srv/material/target"},
            "drafter": {"mask_token_id": MASK, "layers": 1, "taps": 2, "block_size": 4},
            "data": {"path": "/srv/material/data.jsonl", "max_length": 64, "batch_size": 2},
            "train": {"steps": 100000, "anchors": 4, "average_every": 5, "log_every": 1},
            "ring": {"slots": 2},
        }
        job.write(source=None, command=None, progress=None, interpreter=PYTHON, watch_s=120, grace_s=60)
        job.write(trainer=trainer, env={"OMP_NUM_THREADS": "1"})
        first = job.ops("deploy", "--json")
        assert first.code == 0, first.err
        assert first.json["state"] == "stepping"
        assert first.json["gate"] is None
        job.write(trainer={**trainer, "target_devices": ["cpu"], "drafter_devices": ["cpu", "cpu"]})
        second = job.ops("deploy", "--replace", "--resume", "--json")
        assert second.code == 0, second.err
        gate = second.json["gate"]
        assert gate["ok"]
        assert "flex attention and its compilation" in gate["not_exercised"]
        assert "1 targets and 2 drafters on the CPU" in gate["what"]
        assert second.json["state"] == "stepping"
        assert not list(job.there.glob("run/gate/*"))
        assert job.ops("stop").code == 0
        assert job.status["exit"]["rc"] == 3


def test_adopting_what_runs_in_the_container(job: Job, lab: Lab) -> None:
    container = lab.containers[200]
    (container.rootfs / "srv/train.py").write_text(
        "import time\nfor i in range(1, 99999):\n "
        'print(f"step: {i}  loss: 1.0  tps: 1,000", flush=True), time.sleep(.1)\n'
    )
    container.exec(["tmux", "-L", "theirs", "new-session", "-d", "-s", "dflash", f"{PYTHON} /srv/train.py"])
    adopted = job.ops("adopt", "ct200", "--session", "dflash", "--socket", "theirs", "--name", "theirs", "--json")
    assert adopted.code == 0, adopted.err
    assert adopted.json["dialect"] == "torchtitan"
    try:
        end = time.monotonic() + 20
        while True:
            status: dict[str, Any] = job.ops("status", "theirs", "--json").json["jobs"][0]
            if stepping(status):
                break
            assert time.monotonic() < end, status
        assert status["progress"]["rate"] == 1000.0
        assert "step: " in job.ops("logs", "theirs").out
        assert job.ops("stop", "theirs").code == 2
        logs = job.spawn("logs", "theirs", "-f")
        assert logs.stdout is not None
        assert any("step: " in logs.stdout.readline() for _ in range(5))
        os.killpg(logs.pid, signal.SIGINT)
        assert logs.wait(20) == 130
        container.exec(["pkill", "-9", "-f", "/srv/train.py"])
        end = time.monotonic() + 20
        while (state := job.ops("status", "theirs", "--json").json["jobs"][0]["state"]) == "stepping":
            assert time.monotonic() < end
        assert state == "unknown"  # nobody wrote down how it ended
    finally:
        container.exec(["sh", "-c", "rm -rf /root/.dflash-ops /srv/train.py"], ok=None)


def test_several_containers_and_one_that_is_stopped(job: Job, lab: Lab, tmp_path: Path) -> None:
    job.more = {
        "second": {**job.keys, "host": "ct201", "root": "/srv/second"},
        "third": {**job.keys, "host": "ct300", "root": "/srv/third"},
    }
    job.write()
    lab.faults.stop_container(201)
    try:
        deployed = job.ops("deploy", "--all", "--json")
        assert deployed.code == 5, deployed.err
        assert [(j["job"], j["exit"]) for j in deployed.json["jobs"]] == [("wire", 0), ("second", 5), ("third", 0)]
        assert "pct start 201" in deployed.err
        status = job.ops("status", "--all", "--json")
        assert status.code == 5
        assert [j["state"] for j in status.json["jobs"]] == ["stepping", "unreachable", "stepping"]
        assert job.ops("stop", "wire", "third").code == 0
    finally:
        lab.faults.start_container(201)
        for number in (201, 300):
            lab.containers[number].exec(["sh", "-c", "tmux -L wire kill-server; pkill -9 -f [r]esident/; rm -rf /srv/second /srv/third"], ok=None)  # fmt: skip  # noqa: E501


def test_an_environment_from_a_lock_file(job: Job, lab: Lab, tmp_path: Path) -> None:
    """Made in the container, once; the job runs in it. A lock that pip refuses leaves nothing."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    build_wheel(wheels, "lockedthing", "1.5")
    into_container(lab, 200, wheels, "/srv/wheels")
    lock = tmp_path / "requirements.lock"
    lock.write_text("--no-index\n--find-links /srv/wheels\nlockedthing==1.5  # the only one\n")
    (job.source / "train.py").write_text(
        "import lockedthing\nprint(lockedthing.__file__)\n" + (job.source / "train.py").read_text()
    )
    job.write(venv={"lock": str(lock), "python": "/usr/bin/python3"}, command=["python", "{release}/train.py"])
    if subprocess.run(["/usr/bin/python3", "-c", "import ensurepip"], capture_output=True).returncode:
        refused = job.ops("deploy")
        assert refused.code == 3
        assert "python3-venv" in refused.err
        assert not list(job.there.glob("venvs/[0-9a-f]*"))
        return
    first = job.ops("deploy", "--json")
    assert first.code == 0, first.err
    (venv,) = job.there.glob("venvs/[0-9a-f]*")
    assert first.json["venv"] == venv.name
    assert f"/venvs/{venv.name}/lib" in job.ops("logs", "-n", "100000").out
    assert f"#!{job.root}/venvs/{venv.name}/bin/python" in (venv / "bin/lockedthing").read_text()
    second = job.ops("deploy", "--replace", "--resume", "--json")
    assert second.code == 0, second.err
    assert "venv:" not in second.err
    lock.write_text("--no-index\n--find-links /srv/wheels\nlockedthing==9.9\n")
    refused = job.ops("deploy", "--replace", "--resume")
    assert refused.code == 1
    assert "lockedthing==9.9" in refused.err
    assert [p.name for p in job.there.glob("venvs/[!.]*")] == [venv.name]
    assert job.until(stepping)["attempt"] == 2
    lock.write_text("lockedthing>=1\n")
    unpinned = job.ops("deploy", "--replace", "--resume")
    assert unpinned.code == 2
    assert "not pinned" in unpinned.err


def build_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel with one module and one program, made by hand."""
    import zipfile

    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "def main(): print('it runs')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
        archive.writestr(f"{info}/RECORD", record)
