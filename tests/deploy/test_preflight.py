"""Preflight: all that is wrong at once, each with its next step; numbers read from the machine as they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from smi import Smi, card

from dflash_ops.contracts import JobSpec
from dflash_ops.deploy import spec
from dflash_ops.resident import checks, machine
from dflash_ops.resident.preflight import Needs, Request, run_checks

if TYPE_CHECKING:
    from conftest import Toy

GIB = 1 << 30

#: A trainer that answers `check` as the real one does, from a file beside it.
STUB = """\
import json, os, sys
if sys.argv[1] == "check":
    said = json.load(open(os.environ["ANSWER"]))
    said = json.loads(json.dumps(said).replace("CONFIG", sys.argv[3]))
    said.setdefault("notes", []).append(" ".join(sys.argv[1:]))
    print("a library says hello")
    print(json.dumps(said))
"""


def request(root: Path, **changes: Any) -> Request:
    job = JobSpec(job="j", root=str(root), session="s", argv=("python3",), checkpoints=str(root / "checkpoints"),
                  socket="dflash-test-none")  # fmt: skip
    return Request(**{"spec": job, "interpreter": sys.executable, **changes})


def by_name(found: list[checks.Check]) -> dict[str, checks.Check]:
    return {c.name: c for c in found}


@pytest.fixture
def stub(tmp_path: Path) -> Request:
    """A bundled-trainer job whose release is there and whose trainer says what answer.json says."""
    root = tmp_path / "root"
    release = root / "releases/abc"
    (release / "trainer").mkdir(parents=True)
    (release / "trainer/__init__.py").write_text("")
    (release / "trainer/__main__.py").write_text(STUB)
    job = JobSpec(
        job="j", root=str(root), session="s", argv=(sys.executable,), checkpoints=str(root / "checkpoints"),
        socket="dflash-test-none", release="abc",
        env={"PYTHONPATH": "{release}", "ANSWER": str(tmp_path / "answer.json")},
    )  # fmt: skip
    return Request(
        spec=job, interpreter=sys.executable, bundled=True, config_toml="[train]\n", config_json="{}",
        devices=("cpu", "cpu"), targets=1, requires={"json": ">=2.0"},
    )  # fmt: skip


def answer(tmp_path: Path, **said: Any) -> None:
    (tmp_path / "answer.json").write_text(json.dumps(said))


def test_a_trainer_that_fits_passes_and_is_asked_with_this_jobs_folders(tmp_path: Path, stub: Request) -> None:
    answer(tmp_path, ok=True, errors=[], needs={"ring_bytes": 1000, "average_bytes": 1000, "checkpoint_bytes": 10})
    found = run_checks(stub)
    assert [c for c in found.checks if c.status == "failed"] == []
    note = next(c.what for c in found.checks if c.status == "warn")
    assert note.endswith(f"--checkpoints {tmp_path}/root/checkpoints")
    assert "/run.toml" in note


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path, stub: Request) -> None:
    huge = 1 << 60
    faults = [
        {"what": "there are 0 drafters", "where": "CONFIG: workers.drafter_devices", "next": "name it"},
        {"what": "line 7 is no JSON", "where": "data.jsonl:7", "next": "mend it"},
    ]
    needs = {"ring_bytes": huge, "average_bytes": huge, "checkpoint_bytes": huge}
    answer(tmp_path, ok=False, errors=faults, needs=needs)
    (tmp_path / "root/checkpoints/step-00000010").mkdir(parents=True)
    failed = [c for c in run_checks(stub).checks if c.status == "failed"]
    assert [c.name for c in failed] == ["config", "config", "disk", "shm", "memory", "checkpoints"]
    assert "workers.drafter_devices: there are 0 drafters" in failed[0].what
    assert "data.jsonl:7" in failed[1].what
    assert "jobs.j.trainer.workers" in failed[0].what
    assert all(c.next for c in failed)


def test_what_start_would_refuse_is_told_before_anything_is_stopped(tmp_path: Path) -> None:
    asked = request(tmp_path / "root")
    bad = Request(**{**vars(asked), "spec": replace(asked.spec, session="a.b")})
    check = by_name(run_checks(bad).checks)["job"]
    assert (check.status, check.next) == ("failed", "use letters, digits, - and _")
    assert "session" in check.what and "job" not in by_name(run_checks(asked).checks)


def test_a_damaged_checkpoint_is_to_be_set_aside_and_fresh_does_not_look_at_it(tmp_path: Path, stub: Request) -> None:
    damaged = tmp_path / "root/checkpoints/step-00000010"
    damaged.mkdir(parents=True)
    fault: dict[str, Any] = {
        "what": "it has another hash",
        "where": f"{damaged}/weights.safetensors",
        "next": "--resume PATH",
    }
    fault["exit_code"] = 5
    answer(tmp_path, ok=False, errors=[fault], needs=None)
    check = by_name(run_checks(Request(**{**vars(stub), "begin": "resume"})).checks)["checkpoint"]
    assert check.status == "failed"
    assert f"mv {damaged} {tmp_path}/root/checkpoints.aside/" in check.next
    answer(tmp_path, ok=True, errors=[], needs={})
    found, _ = checks.trainer(Request(**{**vars(stub), "begin": "fresh"}), "run.toml")
    assert "--checkpoints" not in found[1].what
    # A whole checkpoint of another drafter: the older ones are of the same, so setting this one aside helps nobody.
    other = {"what": "it holds another drafter", "where": str(damaged), "next": "correct [drafter]", "exit_code": 2}
    answer(tmp_path, ok=False, errors=[other], needs=None)
    check = by_name(run_checks(Request(**{**vars(stub), "begin": "resume"})).checks)["config"]
    assert (check.status, check.next) == ("failed", "correct [drafter]")


def test_the_trainer_is_asked_for_json_where_python_reads_no_toml(
    stub: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "interpreter", lambda r: ([], (3, 10, 12)))
    asked = []
    monkeypatch.setattr(checks, "trainer", lambda r, name: (asked.append(name), ([], Needs()))[1])
    assert run_checks(stub).config_name == "run.json"
    assert asked == ["run.json"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("/no/such/python", "is not there"),
        ("/etc/passwd", "is not executable"),
        ("/bin/true", "does not run as a Python"),
    ],
)
def test_an_interpreter_that_is_none(stub: Request, program: str, says: str) -> None:
    found = run_checks(Request(**{**vars(stub), "interpreter": program})).checks
    check = by_name(found)["interpreter"]
    assert check.status == "failed"
    assert says in check.what
    assert by_name(found)["config"].status == "skipped"


def test_modules_that_are_missing_or_of_another_version_are_named_with_the_command(stub: Request) -> None:
    wanted = {"json": ">=2.0", "no_such_module": ">=1", "xml": ">=1", "csv": ">=999"}
    failed = [c for c in checks.interpreter(Request(**{**vars(stub), "requires": wanted}))[0] if c.status == "failed"]
    assert [c.what.split(" ")[0] for c in failed] == ["no_such_module", "xml", "csv"]
    assert "cannot be imported" in failed[0].what
    assert all("-m pip install" in c.next for c in failed)


def test_a_check_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stub: Request) -> None:
    release = tmp_path / "root/releases/abc/trainer/__main__.py"
    release.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(checks, "TRAINER_S", 1.0)
    begin = time.monotonic()
    found, _ = checks.trainer(stub, "run.toml")
    assert time.monotonic() - begin < 60
    assert "no answer within" in found[0].what


def test_existing_checkpoints(tmp_path: Path) -> None:
    assert checks.checkpoints(request(tmp_path))[0].status == "ok"
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints/.incoming").mkdir()
    refused = checks.checkpoints(request(tmp_path))[0]
    assert refused.status == "failed"
    assert "step-00000002" in refused.what
    assert "--resume" in refused.next
    assert "--fresh" in refused.next
    assert checks.checkpoints(request(tmp_path, begin="resume"))[0].status == "ok"
    assert checks.checkpoints(request(tmp_path, begin="fresh"))[0].status == "ok"
    assert checks.checkpoints(request(tmp_path / "other", begin="resume"))[0].status == "warn"


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = [machine.Gpu(0, 80 * GIB, 0), machine.Gpu(1, 80 * GIB, 40 * GIB)]
    monkeypatch.setattr(machine, "gpus", lambda: (two, ""))
    assert by_name(checks.devices(request(tmp_path, devices=("cuda:0",))))["devices"].status == "ok"
    missing = checks.devices(request(tmp_path, devices=("cuda:0", "cuda:5")))[0]
    assert (missing.status, "5" in missing.what, "--target-gpus" in missing.next) == ("failed", True, True)
    busy = checks.devices(request(tmp_path, devices=("cuda:1",)))
    assert [c.status for c in busy] == ["ok", "warn"]
    assert "GPU 1 has 40.0 GiB of 80.0 GiB in use" in busy[1].what
    # what the job to be replaced holds is no surprise
    assert [c.status for c in checks.devices(request(tmp_path, devices=("cuda:1",), pid=1))] == ["ok"]
    monkeypatch.setattr(machine, "gpus", lambda: (None, "nvidia-smi did not answer within 20 s"))
    silent = checks.devices(request(tmp_path, devices=("cuda:0",)))[0]
    assert silent.status == "failed"
    assert "did not answer" in silent.what


def test_nvidia_smi_that_hangs_does_not_hold_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nsleep 600 & sleep 600\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found, why = machine.gpus(seconds=0.5)
    assert found is None
    assert "did not answer" in why
    Smi(tmp_path, [card(0, **{"memory.used": "12"}), card(1, **{"memory.used": "[N/A]", "memory.total": "ERR!"})])
    assert machine.gpus() == ([machine.Gpu(0, 143771 << 20, 12 << 20), machine.Gpu(1, 0, 0)], "")
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    assert machine.gpus() == (
        None,
        "nvidia-smi failed with 18: Failed to initialize NVML: Driver/library version mismatch",
    )


def proc_with(tmp_path: Path, cgroup: str) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   2048 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    return proc, groups


def test_memory_is_bounded_by_the_smallest_of_kernel_and_cgroups_of_both_versions(tmp_path: Path) -> None:
    proc, groups = proc_with(tmp_path, "0::/lxc/7/app\n")
    assert machine.available_memory(proc, groups) == (2048 * 1024, "MemAvailable")
    app = groups / "lxc/7/app"
    app.mkdir(parents=True)
    (app / "memory.max").write_text("max\n")
    (app / "memory.current").write_text("5\n")
    (groups / "lxc/7/memory.max").write_text("1000000\n")
    (groups / "lxc/7/memory.current").write_text("600000\n")
    (groups / "lxc/7/memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert machine.available_memory(proc, groups) == (500_000, "the cgroup's memory limit")

    proc, groups = proc_with(tmp_path / "v1", "5:cpu:/x\n4:memory:/lxc/7\n")
    old = groups / "memory/lxc/7"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (old / "memory.usage_in_bytes").write_text("7\n")
    assert machine.available_memory(proc, groups)[1] == "MemAvailable"
    (old / "memory.limit_in_bytes").write_text("1000\n")
    assert machine.available_memory(proc, groups) == (993, "the cgroup's memory limit")


def test_what_the_replaced_job_holds_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: (10 * GIB, "MemAvailable"))
    monkeypatch.setattr(machine, "tree_memory", lambda pid: 15 * GIB)
    needs = Needs(average_bytes=20 * GIB, ring_bytes=1)
    assert checks.memory(request(tmp_path), needs)[0].status == "failed"
    assert checks.memory(request(tmp_path, pid=4), needs)[0].status == "ok"


def test_a_process_trees_memory_counts_its_children_and_shared_pages_once(tmp_path: Path) -> None:
    code = "import mmap, os, time; s = mmap.mmap(-1, 60_000_000); s[:] = b'x' * 60_000_000; os.fork(); "
    code += "s[::4096]; m = bytearray(os.urandom(50_000_000)); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        end = time.monotonic() + 30
        while (held := machine.tree_memory(process.pid)) < 160_000_000 and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.5)
        assert 160_000_000 <= machine.tree_memory(process.pid) < 210_000_000, held
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_cpu_workers_need_host_memory_and_gpu_workers_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: (10 * GIB, "MemAvailable"))
    needs = Needs(average_bytes=GIB, ring_bytes=0, target_bytes_per_worker=6 * GIB, drafter_bytes_per_worker=4 * GIB)
    on_cpu = checks.memory(request(tmp_path, devices=("cpu", "cpu"), targets=1), needs)[0]
    assert on_cpu.status == "failed"
    assert "11.0 GiB needed" in on_cpu.what
    assert checks.memory(request(tmp_path, devices=("cuda:0", "cuda:1"), targets=1), needs)[0].status == "ok"


@pytest.mark.parametrize(
    ("have", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.15", True), ("2.11", ">=2.11,<2.15", True), ("2.10.9", ">=2.11", False),
        ("2.15.0", ">=2.11,<2.15", False), ("2.14.1rc1", "<2.15", True), ("4.57", ">=4.57.0", True),
        ("10.0", ">=9.1", True), ("", ">=1", False),
    ],
)  # fmt: skip
def test_versions(have: str, wanted: str, fits: bool) -> None:
    assert machine.in_range(have, wanted) is fits


def test_the_versions_asked_for_are_those_of_the_project_file() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    said = {}
    for line in project["project"]["optional-dependencies"]["trainer"]:
        name = line.split(">")[0]
        said[name] = line[len(name) :]
    assert dict(spec.REQUIRES) == said


def test_a_tmux_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = checks.session(request(tmp_path))[0]
    assert found.status == "failed"
    assert "apt-get install tmux" in found.next


def test_a_stub_trainer_from_the_command_line(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: a trainer's refusal reaches the operator before a running job is touched."""
    source = toy.folder / "src"
    (source / "trainer").mkdir()
    (source / "trainer/__init__.py").write_text("")
    running = "else:\n    import runpy\n    sys.argv[1:] = ['1000', '0.1']\n"
    running += "    runpy.run_path(os.environ['HERE'] + '/current/train.py')\n"
    (source / "trainer/__main__.py").write_text(STUB + running)
    monkeypatch.setattr(spec, "REQUIRES", {"json": ">=2.0"})
    needs = {"ring_bytes": 1000, "average_bytes": 1000}
    answer(toy.folder, ok=True, errors=[], needs=needs)
    trainer = {"target_devices": ["cpu", "cpu"], "drafter_devices": ["cpu"], "train": {"lr": 1e-3}}
    toy.write(command=None, progress=None, interpreter=sys.executable, trainer=trainer,
              env={"HERE": "{root}", "ANSWER": str(toy.folder / "answer.json")})  # fmt: skip
    deployed = toy.ops("deploy", "--json", "--set", "train.lr=0.5", "--target-gpus", "cpu")
    assert deployed.code == 0, deployed.err
    assert deployed.json["devices"] == {"target": ["cpu"], "drafter": ["cpu"]}
    import tomllib

    written = tomllib.loads((toy.root / "run/attempts/1/run.toml").read_text())
    assert written["train"]["lr"] == 0.5
    assert written["workers"] == {"target_devices": ["cpu"], "drafter_devices": ["cpu"]}
    launcher = toy.record(1, "start")["launcher"]

    answer(toy.folder, ok=False, needs=needs, errors=[{"what": "line 3 is no JSON", "where": "d.jsonl:3", "next": "m"}])
    refused = toy.ops("deploy", "--replace", "--set", "train.lr=1.0")
    assert refused.code == 3
    assert "d.jsonl:3: line 3 is no JSON" in refused.err
    assert toy.record(1, "start")["launcher"] == launcher
    assert toy.status["attempt"] == 1
    assert Path(f"/proc/{launcher['pid']}").is_dir()
