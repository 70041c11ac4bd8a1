"""`dflash-ops triage --job`: real attempts of a foreign script on this machine; only the kernel is told what to say."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from job_lab import JobLab
from schemas import valid

from dflash_ops.cli.main import run
from dflash_ops.collect import kernel
from dflash_ops.contracts.evidence import Evidence
from dflash_ops.deploy.zipapp import build_resident
from dflash_ops.errors import HostUnreachable
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.hosts.local import LocalHost

ROOT = Path(__file__).resolve().parents[2]
OOM = """Traceback (most recent call last):
  File "/root/train_dflash.py", line 402, in drafter_loop
    loss = drafter(batch)
  File "/root/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1790, in _call_impl
    return forward_call(*args, **kwargs)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 139.80 GiB of which 1.20 GiB is free. Of the allocated memory 130.10 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated.
"""
STEPS = "import os, sys, time\nfor s in range(1, 6): print(f'it {s}/100 loss {4 / s:.3f}')\n"
CRASH = STEPS + f"sys.stderr.write({OOM!r})\nsys.exit(1)\n"
DISK = STEPS + "raise OSError(28, 'No space left on device')\n"
ENDLESS = STEPS + "time.sleep(300)\n"


@pytest.fixture(scope="session")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident")
    return (folder / "new.pyz").rename(folder / f"{build_resident(folder / 'new.pyz')}.pyz")


class Kernel:
    """The layer below the job, as the test wants it: `[seconds before now, text]` in its log, or a fault."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []
        self.refused = ""
        self.unreachable = False
        self.container: int | None = None
        self.memory = "/sys/fs/cgroup/lxc/200/memory.events\noom 0\noom_kill 0"

    def place(self, *_: Any) -> kernel.KernelHost:
        return kernel.KernelHost(_Below(self), self.container)


class _Below(FakeHost):
    """Answers the real script's form with what the test's kernel says."""

    def __init__(self, said: Kernel) -> None:
        super().__init__("proxmox")
        self.said = said

    def run(self, argv: Any, **options: Any) -> Any:
        if self.said.unreachable:
            raise HostUnreachable("no route to the Proxmox host", "192.0.2.6")
        mark, now, up = argv[3], time.time(), 500_000.0
        if self.said.refused:
            dmesg = self.said.refused
        else:
            rows = [(up - before, text) for before, text in self.said.lines]
            dmesg = "\n".join(["[    0.000000] Linux version 6.1", *(f"[{at:12.6f}] {t}" for at, t in rows)])
        out = f"now {now:.0f}\nup {up}\n\n{mark} clock\n{dmesg}\n{mark} dmesg\n\n{mark} journal\n{self.said.memory}\n{mark} memory\n"
        self.answer("sh", ..., stdout=out)
        return super().run(argv, **options)


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(kernel, "kernel_host", made.place)
    return made


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[[], tuple[str, str]]:
    def read() -> tuple[str, str]:
        seen = capfd.readouterr()
        return seen.out, seen.err

    return read


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, pyz: Path) -> Iterator[JobLab]:
    """Two attempts that really ran: the first met a full disk, the second ran out of GPU memory. Not to be changed."""
    lab = JobLab(tmp_path_factory.mktemp("both"), pyz, lambda: ("", ""))
    lab.deploy()
    try:
        assert (lab.start(DISK), lab.start(CRASH)) == (1, 2)
        yield lab
    finally:
        lab.end()


@pytest.fixture
def crashed(both: JobLab, said: Callable[[], tuple[str, str]], below: Kernel) -> JobLab:
    both.said = said
    return both


@pytest.fixture
def spoilt(both: JobLab, tmp_path: Path, said: Callable[[], tuple[str, str]], below: Kernel) -> JobLab:
    """The files of `both` once more, to be changed."""
    return both.copy(tmp_path, said)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, pyz: Path) -> Iterator[tuple[JobLab, int]]:
    """An attempt whose launcher was really killed, and its pid."""
    lab = JobLab(tmp_path_factory.mktemp("killed"), pyz, lambda: ("", ""))
    lab.deploy()
    try:
        at = lab.attempt(lab.start(ENDLESS, wait=False))
        launcher = json.loads((at / "start.json").read_text())["launcher"]["pid"]
        os.kill(launcher, signal.SIGKILL)
        lab.wait(at / "exit.json")
        yield lab, launcher
    finally:
        lab.end()


@pytest.fixture
def killed(ended: tuple[JobLab, int], said: Callable[[], tuple[str, str]], below: Kernel) -> tuple[JobLab, int]:
    ended[0].said = said
    return ended


@pytest.fixture
def toy(tmp_path: Path, pyz: Path, said: Callable[[], tuple[str, str]], below: Kernel) -> Iterator[JobLab]:
    """Deployed, never started."""
    lab = JobLab(tmp_path, pyz, said)
    lab.deploy()
    try:
        yield lab
    finally:
        lab.end()


def test_a_crash_is_named_from_the_newest_attempt_alone(crashed: JobLab) -> None:
    """Two attempts with two causes: the newest counts, `--attempt 1` shows the first."""
    toy = crashed
    said = toy.triage("--json")
    assert said.code == 0, said.err
    row = said.row
    valid("triage", row)
    assert (row["class"], row["job"], row["attempt"], row["path"]) == ("cuda_oom", "toy", 2, "toy")
    assert row["user_frame"] == "/root/train_dflash.py:402"
    cause = row["evidence"][0]
    log = (toy.attempt(2) / "log").read_text().splitlines()
    assert cause["source"] == "attempt 2, log"
    assert "CUDA out of memory" in log[cause["number"] - 1]
    assert [e["role"] for e in row["evidence"]].count("same") == 0, "the pane repeats the log"
    assert any(r["command"] == "dflash-ops triage --job toy --explain" for r in row["remedies"]), "the job's own name"
    older = toy.triage("--json", "--attempt", "1").row
    valid("triage", older)
    assert (older["class"], older["attempt"]) == ("disk_full", 1)
    pane = next(s for s in older["facts"]["sources"] if s["name"] == "pane")
    assert (pane["status"], pane["note"]) == ("none", "it shows a later attempt")


def test_the_text_for_people_begins_with_the_verdict_and_keeps_its_sections_apart(
    crashed: JobLab, below: Kernel
) -> None:
    below.refused = "dmesg: read kernel buffer failed: Operation not permitted"
    said = crashed.triage()
    assert said.code == 0, said.err
    rows = said.out.splitlines()
    assert rows[0].startswith("toy, attempt 2: cuda_oom  Out of GPU memory")
    for title in ("Evidence", "What it means", "Why we think so", "What to do", "Not available"):
        assert rows[rows.index(title) - 1] == "", f"no empty line before {title}"
    at = rows.index("Evidence") + 1
    assert rows[at].split()[0].isdigit()
    assert any(row.startswith("  - kernel log (dmesg: read kernel buffer") for row in rows)
    assert said.out.endswith("\n")


def test_what_the_supervisor_would_do_is_told_with_evidence_reason_and_command(crashed: JobLab) -> None:
    told = crashed.triage("--what-if")
    assert told.code == 0, told.err
    lines = told.out.splitlines()
    assert lines[0] == "toy, attempt 2: cuda_oom; its policy acts"
    assert lines[1] == "this would be done now: wait_memory (grade A)"
    assert any("torch.OutOfMemoryError" in line for line in lines)
    assert "cuda_oom struck at step 5; wait_memory is the first step of its ladder that may be done" in told.out
    assert any(line.strip().startswith("start attempt 3: ") and "train-" in line for line in lines)
    said = crashed.triage("--what-if", "--json").row
    schema = json.loads((ROOT / "docs/schemas/what_if.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(said)
    assert [d["action"] for d in said["decisions"]] == ["wait_memory"]
    assert set(said["decisions"][0]) == set(schema["properties"]["decisions"]["items"]["properties"])
    assert not (crashed.root / "run/attempts/3").exists()


def test_what_if_asks_about_a_jobs_newest_attempt_only(crashed: JobLab) -> None:
    refused = crashed.triage("--what-if", "--attempt", "1")
    assert refused.code == 2
    assert "leave --attempt out" in refused.err
    crashed.said()
    assert run(["triage", "--what-if", "some.log"]) == 2
    assert "--what-if needs --job" in crashed.said()[1]


def test_a_kill_that_only_the_kernel_explains(killed: tuple[JobLab, int], below: Kernel) -> None:
    """kill -9 without a word of the kernel is one guess; with its word it is the OOM killer, with the time of day."""
    toy, launcher = killed
    alone = toy.triage("--json").row
    assert alone["class"] == "host_oom_sigkill"
    assert alone["confidence"] < 0.8
    kill = f"Out of memory: Killed process {launcher} (python3) total-vm:9000000kB, anon-rss:8000000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:100kB oom_score_adj:0"
    below.lines = [(1.0, kill)]
    told = toy.triage("--json").row
    valid("triage", told)
    assert told["class"] == "host_oom_kernel_log"
    assert str(launcher) in told["root_exception"]
    assert time.strftime("%Y", time.gmtime()) in told["evidence"][0]["text"]
    below.lines = [(7200.0, kill)]
    assert toy.triage("--json").row["class"] == "host_oom_sigkill", "a kill of before the attempt is not its end"


def test_counters_speak_only_where_no_kernel_log_does(killed: tuple[JobLab, int], below: Kernel) -> None:
    """memory.events counts since the container was made: beside a readable kernel log it proves nothing."""
    toy, _ = killed
    below.memory = "/sys/fs/cgroup/lxc/200/memory.events\noom 3\noom_kill 3"
    assert toy.triage("--json").row["class"] == "host_oom_sigkill"
    below.refused = "dmesg: read kernel buffer failed: Operation not permitted"
    refused = toy.triage("--json")
    assert refused.row["class"] == "host_oom_kernel_log"
    assert "Operation not permitted" in refused.missing("kernel log")


def test_every_text_that_cannot_be_had_is_named_and_the_others_are_read(spoilt: JobLab, below: Kernel) -> None:
    toy = spoilt
    below.unreachable = True
    (toy.attempt(2) / "exit.json").write_text("{torn")
    (toy.attempt(2) / "logs").mkdir()
    (toy.attempt(2) / "logs/drafter0.log").mkdir()
    said = toy.triage("--json")
    valid("triage", said.row)
    assert said.row["class"] == "cuda_oom"
    assert "no route" in said.missing("kernel log")
    assert "no route" in said.missing("memory events")
    assert "belongs to somebody else" in said.missing("attempt 2, pane")
    assert "damaged" in said.missing("attempt 2, exit.json")
    assert "irectory" in said.missing("logs/drafter0.log")
    assert "not installed" in said.missing("nvidia-smi") or shutil.which("nvidia-smi")
    assert (said.source("error.json")["status"], said.source("error.json")["note"]) == ("none", "none was written")
    (toy.attempt(2) / "log").unlink()
    blind = toy.triage("--json")
    assert blind.code == 0
    assert "no such file" in blind.missing("attempt 2, log")


def test_a_tmux_server_that_does_not_answer_costs_its_deadline_only(crashed: JobLab) -> None:
    toy = crashed
    server = int(toy.tmux("display-message", "-p", "#{pid}").stdout)
    os.kill(server, signal.SIGSTOP)
    try:
        said = toy.triage("--json")
    finally:
        os.kill(server, signal.SIGCONT)
    assert said.row["class"] == "cuda_oom"
    assert "no answer within 2 s" in said.missing("attempt 2, pane")


def test_what_nvidia_smi_says_is_a_fact_and_evidence_only_where_it_fails(
    spoilt: JobLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '| 0  NVIDIA H200   On | 00000000:3B:00.0 Off | 0 |'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    row = spoilt.triage("--json").row
    valid("triage", row)
    assert "NVIDIA H200" in row["facts"]["nvidia_smi"]
    assert "missing" not in row["facts"] or not any("nvidia" in m for m in row["facts"]["missing"])
    (spoilt.attempt(2) / "log").write_text("it 5/100 loss 0.8\n")
    tool.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\necho 'NVML library version: 550.54'\nexit 18\n"
    )
    failed = spoilt.triage("--json").row
    assert failed["evidence"][0]["source"] == "nvidia-smi"
    assert "version mismatch" in failed["root_exception"]


def test_worker_logs_and_reports_come_along(spoilt: JobLab) -> None:
    """The launcher's log only says that a worker failed; the worker's own report names the cause."""
    at = spoilt.attempt(2)
    (at / "log").write_text("it 5/100 loss 0.8\ndflash event=worker_exit worker=target0 life=0 exitcode=1\n")
    (at / "errors/target0").mkdir(parents=True)
    report = {
        "message": {
            "message": "OSError: [Errno 28] No space left on device",
            "extraInfo": {
                "py_callstack": OOM.replace(
                    "torch.OutOfMemoryError: CUDA out of memory.", "OSError: [Errno 28] No space left on device"
                ),
                "timestamp": "1764441072",
            },
        }
    }
    (at / "errors/target0/error.json").write_text(json.dumps(report))
    (at / "logs").mkdir()
    (at / "logs/target0.log").write_bytes(b"\x00\xff binary \x1b[31m" + DISK.encode())
    said = spoilt.triage("--json").row
    assert said["class"] == "disk_full"
    assert said["evidence"][0]["source"] == "errors/target0/error.json"


def test_of_a_long_log_the_end_is_read_and_its_lines_keep_their_numbers(spoilt: JobLab) -> None:
    log = spoilt.attempt(2) / "log"
    crash = log.read_bytes()
    log.write_bytes(b"".join(b"it %d/900000 loss 2.0\n" % n for n in range(1, 60_000)) + crash)
    rows = log.read_bytes().splitlines()
    said = spoilt.triage("--json", "--mib", "0.2")
    cause = said.row["evidence"][0]
    assert b"CUDA out of memory" in rows[cause["number"] - 1]
    assert said.row["why"][0].startswith(f"line {cause['number']}:")
    note = said.source("log")["note"]
    assert note.startswith("the last 0.2 of 1.")
    assert "from its line" in note


def test_never_deployed_never_started_no_such_attempt_and_paths_beside(
    toy: JobLab, crashed: JobLab, tmp_path: Path
) -> None:
    (toy.root / "resident/current.pyz").rename(tmp_path / "away")
    never = toy.triage()
    assert (never.code, never.out) == (1, "")
    assert "toy was never deployed" in never.err and "dflash-ops deploy toy" in never.err
    (tmp_path / "away").rename(toy.root / "resident/current.pyz")
    empty = toy.triage("--json")
    assert (empty.code, json.loads(empty.out)["kind"]) == (2, "error")
    assert "nothing was ever started" in empty.err
    other = crashed.triage("--attempt", "7")
    assert other.code == 2
    assert "there is no attempt 7" in other.err and "use one of 1, 2" in other.err
    both = toy.triage("some.log")
    assert both.code == 2
    assert "exclude each other" in both.err
    toy.said()
    assert run(["triage", "--attempt", "1", str(toy.script)]) == 2
    assert "--attempt needs --job" in toy.said()[1]


def test_a_machine_that_cannot_be_reached_is_exit_code_5(toy: JobLab, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise HostUnreachable("no connection to 192.0.2.6", "host here", "see whether it is up")

    monkeypatch.setattr(LocalHost, "run", lost)
    said = toy.triage("--json")
    assert (said.code, json.loads(said.out)["error"]["type"]) == (5, "HostUnreachable")
    assert "no connection to 192.0.2.6" in said.err


def test_a_resident_that_is_older_says_what_works_with_it(toy: JobLab) -> None:
    place = toy.root / "resident/current.pyz"
    place.unlink()
    place.write_text(
        'import sys\nprint(\'{"schema":1,"error":{"type":"UsageError","what":"no command \\\'evidence\\\'","where":"resident","next":""}}\')\nsys.exit(2)\n'
    )
    said = toy.triage()
    assert said.code == 1
    assert "older than this dflash-ops" in said.err
    assert "dflash-ops logs toy" in said.err


def test_own_kinds_of_the_inventory_are_used_and_a_missing_folder_is_a_fault_with_its_line(spoilt: JobLab) -> None:
    toy = spoilt
    folder = toy.folder / "kinds"
    folder.mkdir()
    (folder / "mine.toml").write_text(
        'schema = 1\nfamily = "mine"\ntitle = "Mine"\n[[kind]]\nid = "my_gremlin"\ntitle = "The gremlin"\nrole = "root"\n'
        'grade = "N"\npriority = 60\nmeaning = "It bites."\nreferences = ["own"]\n[[kind.signature]]\nliteral = "the gremlin bit"\n'
        'where = "exception"\n[[kind.remedy]]\naction = "tell"\ngrade = "N"\ntext = "Feed it."\n[[kind.example]]\ntext = """\nRuntimeError: the gremlin bit rank 2\n"""\ncause = "RuntimeError: the gremlin bit rank 2"\n'
    )
    (toy.attempt(2) / "log").write_text(
        'Traceback (most recent call last):\n  File "/root/train.py", line 7, in <module>\n    bite()\n'
        "RuntimeError: the gremlin bit rank 2\n"
    )
    assert toy.triage("--json").row["class"] == "unrecognised_error"
    for top in ('playbooks = "kinds"', f'playbooks = ["{folder}"]'):
        assert toy.triage("--json", top=top).row["class"] == "my_gremlin", top
    assert toy.triage("--json", "--playbooks", str(folder)).row["class"] == "my_gremlin"
    gone = toy.triage(top='playbooks = "no-such"')
    assert gone.code == 2
    assert "key playbooks" in gone.err and "no-such" in gone.err


def test_status_of_a_crashed_job_names_the_command(crashed: JobLab) -> None:
    toy = crashed
    toy.said()
    run(["status", "-i", str(toy.inventory()), "toy"])
    assert "dflash-ops triage --job toy" in toy.said()[0]


def test_a_job_that_runs_well_is_healthy(toy: JobLab) -> None:
    toy.start(ENDLESS, wait=False)
    said = toy.triage("--json")
    valid("triage", said.row)
    assert said.row["class"] == "healthy"
    assert said.source("exit.json")["note"] == "the attempt still runs"
    assert ", still running: healthy" in toy.triage().out


def test_this_machine_answers_for_its_kernel() -> None:
    """The real script on the real machine: read, or missing with the kernel's own words."""
    now = time.time()
    found = kernel.fetch(kernel.KernelHost(LocalHost()), Evidence(1, False, now, (), started=now - 86400.0, ended=now))
    may = subprocess.run(["dmesg"], capture_output=True, check=False)
    if may.returncode == 0 and may.stdout.count(b"\n") > 5:
        assert found[0].status == "ok"
    assert found[0].status == "ok" or found[0].note
    assert found[1].status == "ok" or found[1].note
