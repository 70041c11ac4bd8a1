"""`dflash-ops doctor`: on this machine for real, and on machines in every kind of trouble by canned facts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomllib

from dflash_ops.cli.main import run
from dflash_ops.doctor import examine, probe
from dflash_ops.doctor.report import Check, Report
from dflash_ops.errors import DeadlineExceeded, HostUnreachable
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.hosts.local import LocalHost
from dflash_ops.inventory import Inventory, load

REPO = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((REPO / "docs/schemas/doctor.schema.json").read_text("utf-8"))

COMMAND = 'command = ["sh", "x.sh"]\n'
TRAINER = "[jobs.a.trainer]\ntarget_devices = {target}\ndrafter_devices = {drafter}\n"
CPU = TRAINER.format(target='["cpu"]', drafter='["cpu"]')
CUDA = TRAINER.format(target="[0, 1]", drafter="[2]")


@pytest.fixture
def socket() -> Iterator[str]:
    name = f"dflash-test-{uuid.uuid4().hex[:8]}"
    yield name
    subprocess.run(["tmux", "-L", name, "kill-server"], check=False, timeout=20, capture_output=True)


@pytest.fixture
def write(tmp_path: Path, socket: str) -> Callable[..., Path]:
    def put(body: str = COMMAND, *, keys: str = "", root: str = "r") -> Path:
        path = tmp_path / "inventory.toml"
        path.write_text(
            f'[hosts.h]\nkind = "local"\npython = "{sys.executable}"\n'
            f'[jobs.a]\nhost = "h"\nroot = "{root}"\nsocket = "{socket}"\n{keys}\n{body}',
            "utf-8",
        )
        return path

    return put


def look(path: Path) -> Report:
    inventory = load(path)
    return examine.examine(inventory, inventory.job(), LocalHost("h"), os.environ)


def checks(report: Report, name: str) -> list[Check]:
    return [c for s in report.sections for c in s.checks if c.name == name]


def only(report: Report, name: str) -> Check:
    (check,) = checks(report, name)
    return check


# -- this machine, for real


def test_all_is_ready_for_the_trainer(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = write(CPU, keys=f'interpreter = "{sys.executable}"')
    assert run(["doctor", "-i", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    jsonschema.validate(said, SCHEMA)
    assert (said["kind"], said["ok"], said["job"], said["host"], said["failed"]) == ("doctor", True, "a", "h", 0)
    by_name = {(c["place"], c["name"]): c for c in said["checks"]}
    assert "torch 2." in by_name["job a", "imports"]["what"]
    assert by_name["host h", "tmux"]["what"].startswith("tmux ")
    assert not (path.parent / "r").exists()  # it only looked


def test_lines_for_people_without_colours(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = write('command = ["no-such-program-here"]\n')
    assert run(["doctor", "a", "-i", str(path)]) == 3
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["this machine", "host h", "job a", "1 to mend"]
    at = next(i for i, line in enumerate(lines) if "no-such-program-here" in line)
    assert lines[at].split()[:2] == ["fail", "command"]
    assert lines[at + 1].strip() == "next: correct `command` of job a"


def test_a_program_is_looked_for_where_the_job_will_look(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the PATH of who asks: an attempt has an environment of its own."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/mine"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert only(look(write('command = ["mine"]\n')), "command").status == "fail"
    theirs = write(f'command = ["mine"]\nenv = {{ PATH = "{program.parent}" }}\n')
    assert only(look(theirs), "command").what == str(program)


def test_every_warn_and_fail_says_what_to_do(write: Callable[..., Path], socket: str) -> None:
    subprocess.run(
        ["tmux", "-L", socket, "-f", "/dev/null", "new-session", "-d", "-s", "dflash-a", "sleep 60"],
        check=True,
        timeout=20,
    )
    report = look(write(CPU, keys='interpreter = "none/python"\nsource = "none"\nsecret_env = ["DFLASH_TEST_NONE"]'))
    failed = [c for s in report.sections for c in s.checks if c.status == "fail"]
    assert {c.name for c in failed} == {"interpreter", "session", "source", "secrets"}
    assert all(c.next for c in failed)
    assert "somebody else's" in only(report, "session").what
    assert f"tmux -L {socket} attach" in only(report, "session").next
    assert "export DFLASH_TEST_NONE" in only(report, "secrets").next


def test_an_interpreter_without_packages(write: Callable[..., Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    report = look(write(CPU, keys='interpreter = "./bare python"'))
    check = only(report, "imports")
    assert check.status == "fail"
    assert check.what == "not installed there: torch, transformers, safetensors, tokenizers, jinja2, numpy"
    assert check.next.startswith(f"'{bare}' -m pip install 'torch>=2.11,<2.15'")


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("#!/bin/sh\nexit 0\n", "does not run as a Python: no answer"),
        ("#!/bin/sh\necho broken lib >&2; exit 127\n", "broken lib"),
        ("#!/none\n", "does not run as a Python"),
        (None, "cannot be executed"),
    ],
)
def test_an_interpreter_that_is_none(script: str | None, what: str, write: Callable[..., Path], tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(script or "x")
    fake.chmod(0o755 if script else 0o644)
    check = only(look(write(CPU, keys='interpreter = "./python"')), "interpreter")
    assert check.status == "fail"
    assert what in check.what
    assert "`interpreter` of job a" in check.next


def test_a_link_to_nothing_is_named_so(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(tmp_path / "gone")
    check = only(look(write(CPU, keys='interpreter = "./python"')), "interpreter")
    assert "is a dangling link" in check.what


@pytest.mark.parametrize(("root", "what"), [("/proc/dflash-test", "/proc cannot be written"), ("file", "no folder")])
def test_a_root_that_cannot_be(root: str, what: str, write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = only(look(write(root=root)), "root")
    assert check.status == "fail"
    assert what in check.what
    assert "`root` of job a" in check.next


def test_a_root_on_a_file_system_that_is_mounted_read_only_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:  # such a mount is for root alone to make
        patch.setattr(probe.tempfile, "NamedTemporaryFile", refuse)
        said = probe.root(tmp_path / "r")
    assert said["read_only"] is True
    check = only(judged(tmp_path / "inventory.toml", root=said), "root")
    assert (check.status, check.what) == ("fail", f"{tmp_path} cannot be written: the file system is mounted read-only")
    assert check.next == "mount it writable, or choose another `root` for job a"
    check = only(judged(tmp_path / "inventory.toml", root={**said, "error": "no", "read_only": False}), "root")
    assert "the right to write" in check.next


def test_the_probe_leaves_nothing_behind(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    before = sorted(tmp_path.rglob("*"))
    path = write()
    look(path)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, path])


def test_a_driver_that_hangs_does_not_hold_us(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text("#!/bin/sh\ntrap '' TERM\nsleep 100\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(examine, "GPU_S", 0.5)
    check = only(look(write(CUDA, keys='interpreter = "none/python"')), "gpus")
    assert check.status == "fail"
    assert "no answer within" in check.what


def test_a_resident_that_lives_is_known_by_pid_and_start_time(write: Callable[..., Path], tmp_path: Path) -> None:
    from dflash_ops.doctor.probe import start_ticks

    (tmp_path / "r/run").mkdir(parents=True)
    said = tmp_path / "r/run/resident.json"
    start = start_ticks(os.getpid())
    assert start is not None
    said.write_text(json.dumps({"pid": os.getpid(), "start": start}))
    assert only(look(write()), "resident").what == f"runs, pid {os.getpid()}"
    said.write_text(json.dumps({"pid": os.getpid(), "start": start + 1}))
    assert "not running" in only(look(write()), "resident").what
    said.write_text('{"pid": 1')
    check = only(look(write()), "resident")
    assert check.status == "fail"
    assert "damaged" in check.what


def test_our_own_session_is_not_taken(write: Callable[..., Path], tmp_path: Path, socket: str) -> None:
    from dflash_ops.doctor.probe import start_ticks

    tmux = ["tmux", "-L", socket, "-f", "/dev/null"]
    subprocess.run([*tmux, "new-session", "-d", "-s", "dflash-a", "sleep 60"], check=True, timeout=20)
    shown = subprocess.run(
        [*tmux, "list-panes", "-a", "-F", "#{pane_pid}"], check=True, timeout=20, capture_output=True, text=True
    )
    pid = int(shown.stdout)
    attempt = tmp_path / "r/run/attempts/1"
    attempt.mkdir(parents=True)
    (attempt / "start.json").write_text(json.dumps({"wrapper": {"pid": pid, "start": start_ticks(pid)}}))
    report = look(write())
    assert only(report, "session").status == "ok"
    assert only(report, "resident").status == "warn"  # the job runs, nobody watches it


# -- no inventory, no job


def test_without_an_inventory_this_machine_is_still_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("DFLASH_INVENTORY", raising=False)
    assert run(["doctor"]) == 3
    said = capsys.readouterr().out
    assert "ok    packages" in said
    assert "dflash-ops init" in said


def test_every_fault_of_the_inventory_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text('[hosts.h]\nkind = "lokal"\n[jobs.a]\nhost = "x"\n')
    assert run(["doctor", "-i", str(path), "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    jsonschema.validate(said, SCHEMA)
    faults = [c["what"] for c in said["checks"] if c["place"] == "inventory"]
    assert len(faults) == 4
    assert f"{path}:2" in faults[0]


def test_a_job_that_is_not_there(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "b", "-i", str(write())]) == 2
    assert "no job 'b'" in capsys.readouterr().err


# -- other machines, by canned facts

GB = 1 << 30
FACTS: dict[str, Any] = {
    "schema": 1,
    "python": [3, 11, 2],
    "executable": "/usr/bin/python3",
    "machine": "gpu, Linux 6.8",
    "root": {
        "base": "/srv",
        "exists": False,
        "folder": True,
        "error": None,
        "read_only": False,
        "room": {"free": 90 * GB, "total": 100 * GB, "inodes": 10**6},
    },
    "shm": {"free": 60 * GB, "total": 64 * GB, "inodes": 10**6},
    "tmux": {"version": "tmux 3.3a", "rc": 0, "err": "", "session": 1, "pids": []},
    "interpreter": {
        "path": "/opt/venv/bin/python",
        "answer": {
            "python": [3, 10, 12],
            "found": {
                name: {"version": version, "error": None}
                for name, version in {
                    "torch": "2.12.1+cu130",
                    "transformers": "5.0.0",
                    "safetensors": "0.7.0",
                    "tokenizers": "0.22.1",
                    "jinja2": "3.1.6",
                    "numpy": "2.4.1",
                }.items()
            },
            "cuda": {"build": "13.0", "count": 4},
        },
        "err": "",
    },
    "gpus": {
        "list": [{"index": n, "name": "NVIDIA H200", "total": 140 * GB, "used": 0} for n in range(4)],
        "why": "",
    },
    "resident": {"there": False, "alive": False, "error": None},
    "wrappers": [],
}


def judged(path: Path, body: str = CUDA, **facts: Any) -> Report:
    """The report on a machine of these facts; `a__b=1` replaces one value below."""
    whole = json.loads(json.dumps(FACTS))
    for key, value in facts.items():
        at = whole
        *way, last = key.split("__")
        for step in way:
            at = at[step]
        at[last] = value
    if isinstance(whole["gpus"], dict) and (listed := whole["gpus"].pop("list", None)) is not None:
        # as nvidia-smi prints them
        whole["gpus"]["said"] = "".join(
            f"{g['index']}, {g['name']}, GPU-{g['index']}, 0, {g['used'] >> 20}, {g['total'] >> 20}\n" for g in listed
        )
    path.write_text(f'[hosts.gpu]\nkind = "local"\n[jobs.a]\nhost = "gpu"\nroot = "/srv/a"\n{body}', "utf-8")
    host = FakeHost("gpu").answer("python3", "-c", ..., stdout="noise\n" + json.dumps(whole) + "\n")
    inventory = load(path)
    report = examine.examine(inventory, inventory.job(), host, {})
    jsonschema.validate(report.to_dict(), SCHEMA)
    return report


def test_a_machine_that_has_all(tmp_path: Path) -> None:
    report = judged(tmp_path / "i.toml")
    assert report.ok
    assert report.count("warn") == 0
    assert only(report, "gpus").what == "0, 1, 2 of 4 x NVIDIA H200"
    assert only(report, "torch").what == "CUDA 13.0, 4 GPUs"


TROUBLE: list[tuple[dict[str, Any], str, str, str, str]] = [
    # facts, name, status, part of what, part of next
    ({"python": [3, 9, 2]}, "python", "fail", "needs 3.10", "the host's `python`"),
    ({"tmux": None}, "tmux", "fail", "not installed", "apt-get install tmux"),
    ({"tmux__version": "tmux 2.8"}, "tmux", "fail", "too old", "3.0"),
    ({"tmux__version": "", "tmux__rc": 127, "tmux__err": "libevent"}, "tmux", "fail", "libevent", "install tmux"),
    ({"tmux__session": None}, "session", "fail", "does not answer", "tmux -L dflash-ops ls"),
    ({"tmux__session": 0, "tmux__pids": [7]}, "session", "fail", "somebody else's", "another `session`"),
    ({"shm": None}, "shm", "fail", "no /dev/shm", "tmpfs"),
    ({"shm__free": 1 << 20}, "shm", "warn", "1.0 MiB free", "ring.slots"),
    (
        {"gpus": {"list": None, "why": "nvidia-smi is not there"}},
        "gpus",
        "fail",
        "GPUs 0, 1, 2 are asked for",
        "driver",
    ),
    ({"gpus__list": FACTS["gpus"]["list"][:2]}, "gpus", "fail", "GPUs 2 are asked for, but 2 are there", "devices"),
    ({"interpreter__answer__cuda": {"build": None, "count": 0}}, "torch", "fail", "without CUDA", "with CUDA"),
    ({"interpreter__answer__cuda__count": 0}, "torch", "fail", "sees no GPU", "driver"),
    ({"interpreter__answer__python": [3, 9, 1]}, "interpreter", "fail", "3.10 or newer", "`interpreter`"),
    ({"root__error": "Read-only file system"}, "root", "fail", "Read-only file system", "`root`"),
    ({"root__room__free": 1 << 20}, "disk", "fail", "only 1.0 MiB free", "make room"),
    ({"root__room__inodes": 3}, "disk", "fail", "3 inodes", "make room"),
    ({"root__room__free": 1 << 30}, "disk", "warn", "only 1.0 GiB free", "two checkpoints"),
    ({"root__room": {"error": "Function not implemented"}}, "disk", "skip", "not known", ""),
    ({"resident__error": "x", "resident__there": True}, "resident", "fail", "damaged", "status"),
]


@pytest.mark.parametrize(("facts", "name", "status", "what", "to_do"), TROUBLE)
def test_trouble(facts: dict[str, Any], name: str, status: str, what: str, to_do: str, tmp_path: Path) -> None:
    report = judged(tmp_path / "i.toml", **facts)
    check = next(c for s in report.sections[1:] for c in s.checks if c.name == name)
    assert check.status == status
    assert what in check.what
    assert to_do in check.next
    assert report.count("fail") == (status == "fail")


def test_packages_outside_their_range_and_broken_ones(tmp_path: Path) -> None:
    found = json.loads(json.dumps(FACTS["interpreter"]["answer"]["found"]))
    found["torch"]["version"] = "2.15.0"
    found["numpy"] = {"version": "", "error": "ImportError: libopenblas.so.0: cannot open shared object file"}
    found["tokenizers"] = {"version": "", "error": "ModuleNotFoundError: No module named 'tokenizers'"}
    report = judged(tmp_path / "i.toml", interpreter__answer__found=found)
    said = [(c.status, c.what) for c in checks(report, "imports")]
    assert ("fail", "not installed there: tokenizers") in said
    assert ("fail", "torch 2.15.0 is outside >=2.11,<2.15") in said
    assert any(s == "fail" and "libopenblas" in w for s, w in said)
    assert ("ok", "transformers 5.0.0, safetensors 0.7.0, jinja2 3.1.6") in said


def test_a_gpu_in_use_is_said_before_it_runs_out(tmp_path: Path) -> None:
    gpus = json.loads(json.dumps(FACTS["gpus"]["list"]))
    gpus[1]["used"] = 100 * GB
    report = judged(tmp_path / "i.toml", gpus__list=gpus)
    assert [c.status for c in checks(report, "gpus")] == ["ok", "warn"]
    assert "GPU 1 has 100.0 GiB of 140.0 GiB in use" in checks(report, "gpus")[1].what
    assert judged(tmp_path / "i.toml", gpus__list=gpus, wrappers=[7]).count("warn") == 1  # ours; but no resident
    gpus[1]["used"], gpus[3]["used"] = 0, 100 * GB  # not one of the job's
    assert judged(tmp_path / "i.toml", gpus__list=gpus).count("warn") == 0


def test_visible_devices_of_the_job_count(tmp_path: Path) -> None:
    report = judged(tmp_path / "i.toml", 'env = { CUDA_VISIBLE_DEVICES = "4,5" }\n' + CUDA)
    assert "CUDA_VISIBLE_DEVICES in the job's env" in only(report, "gpus").what
    assert only(report, "gpus").status == "fail"


def test_a_cpu_job_needs_no_gpu(tmp_path: Path) -> None:
    report = judged(tmp_path / "i.toml", CPU, gpus={"list": None, "why": "nvidia-smi is not there"})
    assert report.ok
    assert not checks(report, "torch")


@pytest.mark.parametrize(
    ("answer", "name", "what", "next"),
    [
        (
            {"error": HostUnreachable("no route to 192.0.2.6", "", "see the network")},
            "reach",
            "no route",
            "network",
        ),
        ({"error": DeadlineExceeded("no answer within 180 s", "host gpu", "look")}, "reach", "180 s", "look"),
        ({"rc": 127}, "python", "there is no python3", "install Python"),
        ({"rc": 1, "stderr": "x\nSyntaxError: invalid syntax"}, "python", "SyntaxError", "`python` of the host"),
        ({"stdout": "hello"}, "python", "did not answer as a Python does: 'hello'", "`python`"),
        ({"stdout": "{}"}, "python", "not in the agreed form", "again"),
    ],
)
def test_a_host_that_cannot_be_asked(answer: dict[str, Any], name: str, what: str, next: str, tmp_path: Path) -> None:
    path = tmp_path / "i.toml"
    path.write_text(f'[hosts.gpu]\nkind = "local"\n[jobs.a]\nhost = "gpu"\nroot = "/srv/a"\n{COMMAND}', "utf-8")
    inventory = load(path)
    report = examine.examine(inventory, inventory.job(), FakeHost("gpu").answer("python3", ..., **answer), {})
    (section,) = [s for s in report.sections if s.place == "host gpu"]
    (check,) = section.checks
    assert (check.name, check.status) == (name, "fail")
    assert what in check.what
    assert next in check.next
    assert not report.ok


def test_the_request_carries_no_environment_and_one_line_of_ascii(tmp_path: Path) -> None:
    path = tmp_path / "i.toml"
    path.write_text(
        f'[hosts.gpu]\nkind = "local"\n[jobs.a]\nhost = "gpu"\nroot = "/srv/ü"\nenv = {{ K = "hunter2" }}\n{COMMAND}',
        "utf-8",
    )
    inventory = load(path)
    host = FakeHost("gpu").answer("python3", ..., stdout=json.dumps(FACTS))
    examine.probe(host, "python3", inventory.job())
    (call,) = host.calls
    assert all(word.isascii() and "\n" not in word for word in call.argv)
    assert call.stdin is not None
    assert b"hunter2" not in call.stdin
    assert call.deadline == examine.PROBE_S


# -- held to the project file


def test_requirements_are_those_of_the_project() -> None:
    from dflash_ops.deploy.spec import REQUIRES

    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    assert [f"{name}{wanted}" for name, wanted in examine.PACKAGES.items()] == project["dependencies"]
    assert [f"{n}{w}" for n, w in REQUIRES.items()] == project["optional-dependencies"]["trainer"]


def test_the_probe_compiles_where_the_resident_runs() -> None:
    import ast

    source = (REPO / "dflash_ops/doctor/probe.py").read_text("utf-8")
    ast.parse(source, feature_version=(3, 7))
    imported = {
        name.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for name in node.names
    } | {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if str(name).partition(".")[0] not in sys.stdlib_module_names]


def test_an_inventory_is_frozen(tmp_path: Path) -> None:
    path = tmp_path / "i.toml"
    path.write_text(f'[hosts.gpu]\nkind = "local"\n[jobs.a]\nhost = "gpu"\nroot = "/srv/a"\n{COMMAND}', "utf-8")
    inventory: Inventory = load(path)
    with pytest.raises(AttributeError):
        inventory.job().root = "x"  # type: ignore[misc]
    assert replace(inventory.job(), root="x").root == "x"
