"""The lab itself: it comes up, is what it says it is, and goes away whatever happens to its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lab import Lab, owner


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
