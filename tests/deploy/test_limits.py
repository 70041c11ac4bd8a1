"""Limits of processes and GPUs, told before anything is started."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from dflash_ops.contracts import JobSpec
from dflash_ops.deploy.decide import clock
from dflash_ops.resident import limits, machine
from dflash_ops.resident.preflight import Needs, Request

GIB = 1 << 30


def request(devices: tuple[str, ...] = (), **changes: object) -> Request:
    spec = JobSpec("j", "/r", "s", ("true",), "checkpoints", env=changes.pop("env", {}))  # type: ignore[arg-type]
    return Request(spec, "python3", bundled=True, devices=devices, targets=1, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("files", "processes", "status", "word"),
    [
        (1 << 20, resource.RLIM_INFINITY, "ok", "unlimited"),
        (512, 1 << 20, "warn", "ulimit -n"),
        (100, 1 << 20, "failed", "ulimit -n"),
        (1 << 20, 500, "warn", "ulimit -u"),
        (1 << 20, 10, "failed", "ulimit -u"),
    ],
)
def test_ulimits(monkeypatch: pytest.MonkeyPatch, files: int, processes: int, status: str, word: str) -> None:
    values = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (values[which], resource.RLIM_INFINITY))
    monkeypatch.setattr(limits, "pids_max", lambda: None)
    (check,) = limits.ulimits(request())
    assert check.status == status
    assert word in check.what
    assert bool(check.next) == (status != "ok")


def test_the_containers_limit_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/lxc/7/app\n")
    assert limits.pids_max(tmp_path, tmp_path / "cg") is None
    (tmp_path / "cg/lxc/7/app").mkdir(parents=True)
    (tmp_path / "cg/lxc/7/app/pids.max").write_text("max\n")
    (tmp_path / "cg/lxc/pids.max").write_text("300\n")
    assert limits.pids_max(tmp_path, tmp_path / "cg") == 300
    (tmp_path / "self/cgroup").write_text("7:pids:/x\n")
    (tmp_path / "cg/pids/x").mkdir(parents=True)
    (tmp_path / "cg/pids/x/pids.max").write_text("20\n")
    assert limits.pids_max(tmp_path, tmp_path / "cg") == 20
    monkeypatch.setattr(limits, "pids_max", lambda: 20)
    assert "failed" in [c.status for c in limits.ulimits(request())]


@pytest.mark.parametrize(
    ("cuda", "found", "status"),
    [
        ("12.8", "570.86.15", "ok"),
        ("12.8", "470.199.02", "failed"),
        ("13.0", "570.86.15", "failed"),
        ("13.0", "580.65.06", "ok"),
        ("99.0", "570.86.15", "ok"),
        (None, "570.86.15", "failed"),
        ("12.8", None, "skipped"),
    ],
)
def test_driver(monkeypatch: pytest.MonkeyPatch, cuda: str | None, found: str | None, status: str) -> None:
    monkeypatch.setattr(machine, "driver", lambda: (found, "" if found else "nvidia-smi is not there"))
    (check,) = limits.driver(request(("cuda:0", "cuda:1")), cuda)
    assert check.status == status
    assert limits.driver(request(("cpu", "cpu")), cuda) == []


def test_the_drivers_version_is_read_without_a_program_that_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 570.86.15\necho 570.86.15\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if not Path("/proc/driver/nvidia/version").exists():
        assert machine.driver() == ("570.86.15", "")
        smi.write_text("#!/bin/sh\necho failed\nexit 3\n")
        assert machine.driver()[0] is None


def test_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [machine.Gpu(0, 80 * GIB, 40 * GIB), machine.Gpu(1, 80 * GIB, 0)]
    monkeypatch.setattr(machine, "gpus", lambda: (two, ""))
    needs = Needs(target_bytes_per_worker=54 * GIB, drafter_bytes_per_worker=20 * GIB)
    devices = ("cuda:0", "cuda:1")
    (full,) = limits.gpu_memory(request(devices), needs)
    assert full.status == "failed"
    assert "GPU 0 has 40.0 GiB free, the target needs 55.0 GiB" in full.what
    # what the attempt to be replaced holds comes back
    assert [c.status for c in limits.gpu_memory(request(devices, pid=7), needs)] == ["ok"]
    assert limits.gpu_memory(request(devices, env={"CUDA_VISIBLE_DEVICES": "1,0"}), needs) == []
    assert limits.gpu_memory(request(("cpu", "cpu")), needs) == []
    assert limits.gpu_memory(request(devices), Needs()) == []


@pytest.mark.parametrize(
    ("there", "status", "word"),
    [
        (1000.5, "ok", ""),
        (998.0, "ok", ""),
        (1006.0, "ok", ""),
        (400.0, "warn", "600 s behind"),
        (1603.0, "warn", "601 s ahead"),
    ],
)
def test_clock(there: float, status: str, word: str) -> None:
    """Read between 1000 and 1002 of ours: what the answer took is no difference."""
    check = clock(there, 1000.0, 1002.0)
    assert check.status == status
    assert word in check.what
