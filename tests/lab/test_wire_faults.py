"""Deploys under faults: nothing half-switched, nothing hangs, and the next command understands what it finds."""

from __future__ import annotations

import fcntl
import os
import random
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_ops.hosts.lxc import LxcHost
from lab import Lab
from lab.operator import PASSPHRASE
from lab.wire_job import Job, job_in, meanwhile, stepping

pytestmark = pytest.mark.slow

#: Bytes of a release that take some seconds at `RATE`.
BIG, RATE = 700_000, "2mbit"


@pytest.fixture
def job(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Job]:
    with job_in(lab, tmp_path, capfd) as made:
        yield made


def until(what: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def uploading(job: Job) -> bool:
    """A part of the release has arrived."""
    return any(p.is_file() and p.stat().st_size for p in job.there.glob("releases/.incoming-*/**/*"))


def held(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def heals(job: Job) -> None:
    """The next deploy works, and nothing is left of the one before."""
    again = job.ops("deploy", "--replace", "--resume", "--json")
    assert again.code == 0, again.err
    assert job.until(stepping)["release"] == again.json["release"]
    rests = job.releases() - {again.json["release"]}
    # where sshd has not noticed yet that nobody listens, the receiver of the cut upload lives on, and holds its folder
    assert all(name.startswith(".incoming-") and held(job.there / "releases" / name) for name in rests), rests
    assert not list((job.there / "resident").glob(".*"))


def test_a_link_that_is_cut_for_five_seconds_holds_nothing_up_but_time(job: Job, lab: Lab) -> None:
    job.release(big=os.urandom(BIG))

    def cut() -> None:
        until(lambda: uploading(job))
        with lab.faults.link_down("pve1"):
            time.sleep(5.0)

    with lab.faults.rate("pve1", RATE), meanwhile(cut):
        deployed = job.ops("deploy", "--json")
    assert deployed.code == 0, deployed.err
    assert job.until(stepping)["release"] == deployed.json["release"]


def test_a_link_that_is_cut_for_ever(job: Job, lab: Lab) -> None:
    """An error within 15 s, nothing switched, and the next deploy heals."""
    job.release(big=os.urandom(BIG))
    cut_at: list[float] = []
    up = threading.Event()

    def cut() -> None:
        until(lambda: uploading(job))
        with lab.faults.link_down("pve1"):
            cut_at.append(time.monotonic())
            assert up.wait(60)

    with lab.faults.rate("pve1", RATE), meanwhile(cut):
        deployed = job.ops("deploy")
        took = time.monotonic() - cut_at[0]
        seen = job.ops("status")  # cut as well: a state of its own, not a crash
        up.set()
    assert deployed.code == 5
    assert took < 15.0
    assert "next:" in deployed.err
    assert seen.code == 5
    assert "unreachable" in seen.out
    job.nothing_switched()
    heals(job)


@pytest.mark.parametrize("fault", ["sshd", "container"])
def test_what_goes_away_in_the_middle_of_an_upload(job: Job, lab: Lab, fault: str) -> None:
    job.release(big=os.urandom(BIG))

    def go_away() -> None:
        until(lambda: uploading(job))
        if fault == "sshd":
            with lab.faults.sshd_killed("pve1"):
                pass
        else:
            lab.faults.stop_container(200)

    with lab.faults.rate("pve1", RATE), meanwhile(go_away):
        deployed = job.ops("deploy")
    assert deployed.code == 5, deployed.err
    if fault == "container":
        assert "pct start 200" in deployed.err
        lab.faults.start_container(200)
    job.nothing_switched()
    heals(job)


def test_a_link_that_is_cut_while_the_job_is_replaced(job: Job, lab: Lab) -> None:
    """Either the old attempt or the new one is there afterwards, whole; status says which, and a deploy goes on."""
    first = job.ops("deploy", "--json").json["release"]
    job.until(stepping)
    job.release(extra="2")
    up = threading.Event()

    def cut() -> None:
        until(lambda: (job.there / "run/attempts/1/stop.json").exists())
        with lab.faults.link_down("pve1"):
            assert up.wait(60)

    with meanwhile(cut):
        deployed = job.ops("deploy", "--replace", "--resume")
        up.set()
    assert deployed.code == 5, deployed.err
    status = job.until(lambda s: s["state"] not in ("unreachable", "loading"))
    assert status["state"] in ("stopped", "stepping")
    assert ((job.there / "current").readlink().name == first) == (status["attempt"] == 1)
    again = job.ops("deploy", "--replace", "--resume", "--json")
    assert again.code == 0, again.err
    assert job.until(stepping)["attempt"] == again.json["attempt"]


def test_a_slow_pct_a_locked_container_and_few_sessions(job: Job, lab: Lab) -> None:
    with lab.faults.pct_delay("pve1", 0.3), lab.faults.locked(200), lab.faults.max_sessions("pve1", 1):
        before = job.calls
        deployed = job.ops("deploy", "--json")
        assert deployed.code == 0, deployed.err
        assert job.calls - before == deployed.json["execs"]
        assert job.status["state"] == "stepping"
    assert job.ops("stop").code == 0


def test_a_full_disk(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str], ct: LxcHost) -> None:
    container = lab.containers[200]
    container.exec(["mkdir", "-p", "/srv/room"])
    container.exec(["mount", "-t", "tmpfs", "-o", "size=80m", "room", "/srv/room"])
    try:
        with job_in(lab, tmp_path, capfd, root="/srv/room/job") as job:
            job.release(big=os.urandom(BIG))
            listing = "cd /srv/room/job; ls -A releases; ls current run/attempts 2>/dev/null"
            with lab.faults.disk_full(200, "/srv/room", leave=400_000):
                refused = job.ops("deploy")
                assert refused.code == 3, refused.err
                assert "disk: " in refused.err
                assert "free some space" in refused.err
                assert ct.run(["sh", "-c", listing], deadline=20).stdout == b""
            deployed = job.ops("deploy", "--json")
            assert deployed.code == 0, deployed.err
            job.until(stepping)
            # full under a running job: the next release is refused, the job goes on
            job.release(big=os.urandom(BIG))
            with lab.faults.disk_full(200, "/srv/room"):
                refused = job.ops("deploy", "--replace", "--resume")
                assert refused.code == 3, refused.err
                assert (job.status["attempt"], job.status["state"]) == (1, "stepping")
            assert job.ops("stop").code == 0
    finally:
        container.exec(["umount", "-l", "/srv/room"])


def test_a_root_that_is_read_only(job: Job, lab: Lab) -> None:
    with lab.faults.read_only_root(200):
        refused = job.ops("deploy")
    assert refused.code == 3, refused.err
    assert "read-only" in refused.err
    job.nothing_switched()
    assert job.ops("deploy").code == 0
    job.until(stepping)


def test_a_clock_that_is_ten_minutes_off(job: Job, lab: Lab) -> None:
    with lab.faults.clock_off(200, -600):
        deployed = job.ops("deploy", "--json")
        assert deployed.code == 0, deployed.err
        (clock,) = [c for c in deployed.json["checks"] if c["name"] == "clock"]
        assert clock["status"] == "warn"
        behind = re.search(r"(\d+) s behind", clock["what"])
        assert behind is not None, clock
        assert 590 <= int(behind[1]) <= 600  # less the time that the question was on its way
        status = job.until(stepping)
        assert status["age_s"] < 10
        assert abs(status["now"] - (time.time() - 600)) < 10
        assert "since 10 min" not in job.ops("status").out
        assert job.ops("deploy", "--replace", "--resume").code == 0
        assert job.ops("stop").code == 0


def test_ten_thousand_files(job: Job) -> None:
    for folder in range(100):
        (job.source / str(folder)).mkdir()
        for number in range(100):
            (job.source / str(folder) / f"{number}.txt").write_text(f"{folder} {number % 7}")
    first = job.ops("deploy", "--json")
    assert first.code == 0, first.err
    assert first.json["files"] == 10_001
    (job.source / "5/5.txt").write_text("changed")
    second = job.ops("deploy", "--replace", "--resume", "--json")
    assert second.code == 0, second.err
    assert (second.json["files"], second.json["kept"]) == (1, 10_000)


def test_no_secret_is_seen_anywhere(job: Job, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in the environment, one in a file, a passphrase: planted, and looked for in everything."""
    mark = secrets.token_hex(6)  # a second run on this machine is not this one's leak
    planted = {"TOKEN": f"planted-token-{mark}", "FILED": f"planted-filed-{mark}", "phrase": PASSPHRASE}
    monkeypatch.setenv("TOKEN", planted["TOKEN"])
    (job.folder / "filed").write_text(planted["FILED"] + "\n")
    train = job.source / "train.py"
    train.write_text(
        "import os\nopen('/srv/seen', 'w').write(os.environ['TOKEN'] + os.environ['FILED'])\n" + train.read_text()
    )
    job.write(secret_env=["TOKEN", f"FILED=file:{job.folder / 'filed'}"])
    seen: set[bytes] = set()
    over = threading.Event()

    def ps() -> None:
        while not over.wait(0.02):
            for pid in (p for p in Path("/proc").iterdir() if p.name.isdigit()):
                try:
                    seen.add((pid / "cmdline").read_bytes())
                except OSError:
                    continue

    said = []
    with meanwhile(ps):
        try:
            commands = (["deploy"], ["status"], ["deploy", "--replace", "--resume"], ["logs"], ["releases"])
            said += [job.ops(*command) for command in commands]
            train.write_text("import os\nraise SystemExit(os.environ['TOKEN'] + ' is my token')\n")
            said.append(job.ops("deploy", "--replace", "--resume", "--no-rollback"))
            train.write_text("raise OSError\n")
            monkeypatch.delenv("TOKEN")
            said.append(job.ops("rollback"))
        finally:
            over.set()
    assert [o.code for o in said] == [0, 0, 0, 0, 0, 1, 2], [o.err for o in said]
    assert (lab.containers[200].rootfs / "srv/seen").read_text() == planted["TOKEN"] + planted["FILED"]
    (lab.containers[200].rootfs / "srv/seen").unlink()
    texts = [o.out + o.err for o in said] + [str(lab.calls("pve1")), lab.machines["pve1"].log]
    for name, secret in planted.items():
        assert not [t for t in texts if secret in t], name
        assert not [line for line in seen if secret.encode() in line], f"{name} in ps"
        # what the trainer itself prints is its own affair: its log is the one place
        found = subprocess.run(["grep", "-rlaF", secret, str(job.there)], capture_output=True, text=True).stdout
        assert {Path(p).name for p in found.split()} <= {"log"}, found


def test_ctrl_c_at_any_moment(job: Job) -> None:
    """Whatever was interrupted: 130, no traceback, and the next deploy works."""
    rng = random.Random(7)
    assert job.ops("deploy").code == 0
    for number in range(4):
        job.release(extra=str(number))
        process = job.spawn("deploy", "--replace", "--resume")
        time.sleep(0.3 + rng.random() * 2.5)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (0, 130), err
        assert "Traceback" not in err
        assert job.status["state"] in ("stepping", "stopped", "loading", "unknown", "crashed")
    again = job.ops("deploy", "--replace", "--resume", "--json")
    assert again.code == 0, again.err
    assert job.until(stepping)["release"] == again.json["release"]
    assert not [name for name in job.releases() if name.startswith(".incoming")]
