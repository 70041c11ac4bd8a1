"""The lab itself: it comes up, is what it says it is, and goes away whatever happens to its owner."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from dflash_ops.inventory import load
from lab import Lab, owner
from lab.build import sweep


def _ssh(lab: Lab, command: str, host: str = "192.0.2.11") -> subprocess.CompletedProcess[str]:
    config = lab.operator_home.ssh / "config"
    argv = ["ssh", "-F", str(config), "-o", "ConnectTimeout=5", host, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_containers_are_unprivileged_and_reached_by_pct(lab: Lab) -> None:
    said = _ssh(lab, "hostname; pct exec 200 -- cat /proc/self/uid_map")
    assert said.stdout.split() == ["pve1", "0", "100000", "65536"]
    assert _ssh(lab, "pct exec 999 -- true").returncode == 2
    assert _ssh(lab, "hostname", "192.0.2.13").returncode == 255, "inner is not reached directly"


def test_the_machine_itself_does_not_see_the_lab(the_lab: Lab) -> None:
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "to-pve1" not in links
    assert str(the_lab.folder) not in Path("/proc/self/mountinfo").read_text()


def test_a_lab_whose_owner_was_killed_is_swept_by_the_next(the_lab: Lab) -> None:
    code = "import sys, time; from lab import Lab; lab = Lab.up(); print(lab.token.id, flush=True); time.sleep(600)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert child.stdout is not None
        lab_id = child.stdout.readline().strip()
        left = owner.base() / lab_id
        assert (left / owner.TOKEN).exists()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    assert left.exists(), "kill -9 leaves it"
    subprocess.run([sys.executable, "-c", "from lab.build import sweep; sweep()"], env=env, timeout=60, check=True)
    assert not left.exists()
    assert not list(Path("/run/netns").glob(f"*{lab_id}*"))
    assert the_lab.folder.exists(), "a lab whose owner lives is left alone"
    time.sleep(0.1)
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if lab_id.encode() in _read(p)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_lab_for_a_person_is_printed_and_taken_away() -> None:
    def lab(*words: str) -> str:
        argv = [sys.executable, "-m", "lab", *words]
        folder = Path(__file__).resolve().parent.parent
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, cwd=folder).stdout

    said = lab("up")
    lab_id = said.split()[1]
    try:
        path = Path(said.partition("inventory: ")[2].splitlines()[0])
        inventory = load(path)
        assert set(inventory.hosts) >= {"pve1", "pve2", "inner", "ct200", "ct201", "ct300"}
        assert inventory.jobs
        shell = next(line.strip() for line in said.splitlines() if "nsenter" in line).split()
        status = [*shell[:-1], sys.executable, "-m", "dflash_ops.cli.main", "status", "demo"]
        done = subprocess.run(status, capture_output=True, text=True, timeout=60, check=False)
        assert "never deployed" in done.stdout, done.stderr
        assert "kept until lab-down" in lab("list")
    finally:
        lab("down", lab_id)
    assert not path.exists()
    assert lab_id not in lab("list")


def test_a_wrong_clock_is_wrong_for_programs_and_files_and_right_for_durations(lab: Lab) -> None:
    code = "import time; t = time.monotonic(); time.sleep(0.3); print(time.time(), time.monotonic() - t)"
    with lab.faults.clock_off(200, 600):
        said = lab.containers[200].exec(["sh", "-c", f"date +%s; touch /tmp/t; stat -c %Y /tmp/t; python3 -c '{code}'"])
        date, stamp, now, took = map(float, said.split())
        for clock in (date, stamp, now):
            assert 590 < clock - time.time() < 610
        assert 0.2 < took < 5
    assert abs(float(lab.containers[200].exec(["date", "+%s"])) - time.time()) < 10


def test_the_leavings_of_a_damaged_lab_are_not_touched(the_lab: Lab) -> None:
    """Only what a token file names is taken down."""
    foreign = owner.base() / "foreign"
    foreign.mkdir()
    try:
        (foreign / "file").write_text("mine")
        (foreign / owner.TOKEN).write_text('{"schema": 1, "id": "another"}')
        sweep()
        assert (foreign / "file").exists()
        assert the_lab.folder.exists()
    finally:
        shutil.rmtree(foreign)
