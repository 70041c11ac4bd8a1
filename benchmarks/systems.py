"""One pipeline under four regimes, for goodput.py and supervise.py: undisturbed, supervised, in a loop, by torchrun.

All of them run the same run.json with stages of known length (slow_stages/), side by side, each in a folder of its own.
What they share is what the benchmark asks of them: start, the step now, pids of a role's workers, the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from parts import ROOT, write_config

sys.path.append(str(ROOT))
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "resident")]

HERE = Path(__file__).resolve().parent
#: A restart of everything without end: what an operator's shell loop does.
FOREVER = 'd=$1; shift; n=0; while :; do n=$((n+1)); mkdir -p "$d/$n"; "$@" --out "$d/$n" >"$d/$n/log" 2>&1; done'
_STEP = re.compile(r"^dflash (?:step=|event=resumed step=|event=drafters_restart .*\bstep=)(\d+)", re.MULTILINE)
_SAVED = re.compile(r"^dflash event=checkpoint step=(\d+)", re.MULTILINE)


def shape(
    root: Path, *, targets: int, drafters: int, samples: int = 1000, hang_s: float, **tables: dict[str, Any]
) -> Path:
    """run.json: tiny modules, stages that sleep, an average every 4 steps and a checkpoint every 20."""
    workers = {
        "target_devices": ["cpu"] * targets,
        "drafter_devices": ["cpu"] * drafters,
        "timeout_s": 120.0,
        "step_timeout_s": hang_s,
    }
    values: dict[str, dict[str, Any]] = {
        "train": {"epochs": 10**5, "anchors": 4, "average_every": 4, "log_every": 1},
        "checkpoint": {"every": 20},
        "workers": workers,
    }
    for name, table in tables.items():
        values.setdefault(name, {}).update(table)
    return write_config(root, samples=samples, length=32, **values)


def environment(target_s: float, drafter_s: float) -> dict[str, str]:
    path = os.pathsep.join([str(HERE / "slow_stages"), str(ROOT)])
    stages = json.dumps({"target": target_s, "drafter": drafter_s})
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "DFLASH_SLOW_STAGES": stages}


class System:
    """A pipeline.

    Args:
        name: what the table calls it. root: its own folder. config: run.json. env: added to this process's own.
    """

    def __init__(self, name: str, root: Path, config: Path, env: dict[str, str]) -> None:
        self.name, self.root, self.config, self.env = name, root, config, env
        root.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Ends all that it started; safe at any time."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def spawn(self, command: list[str], log: Path) -> None:
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **self.env}, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def trainer(self) -> list[str]:
        command = [sys.executable, "-m", "trainer", "run", "--config", str(self.config)]
        return [*command, "--checkpoints", str(self.root / "checkpoints"), "--resume", "auto"]

    def step(self) -> int:
        """Steps that count at this moment: what was lost by going back counts no more."""
        numbers = sorted((int(p.name) for p in self.attempts.glob("[0-9]*")), reverse=True)
        for number in numbers:
            text = _tail(self.attempts / str(number) / "log")
            if number == numbers[0] and (found := _STEP.findall(text)):
                return int(found[-1])
            if found := _SAVED.findall(text):  # of an attempt before: its last checkpoint is all that is left
                return int(found[-1])
        return 0

    def workers(self, role: str) -> list[int]:
        """Pids of its living workers of a role, in the order of their rank."""
        found = []
        for pid, words in _below(self.launcher()):
            if "trainer.worker_main" in words:
                at = words.index("trainer.worker_main")
                # A spare is called like its worker once it has taken its place.
                if words[at + 1] == role and ("spare" not in words or _comm(pid) == words[at + 2]):
                    found.append((words[at + 2], pid))
        return [pid for _, pid in sorted(found)]

    def launcher(self) -> int:
        """Pid above all of its workers, 0 where there is none."""
        return self.process.pid if self.process is not None else 0

    def tail(self) -> str:
        numbers = sorted((int(p.name) for p in self.attempts.glob("[0-9]*")), reverse=True)
        return _tail(self.attempts / str(numbers[0]) / "log")[-3000:] if numbers else ""

    def faults(self) -> list[str]:
        """What is wrong with what it has trained, asked at the end."""
        return []


class Plain(System):
    """The launcher alone: what is possible, where nothing strikes it."""

    def start(self) -> None:
        attempt = self.attempts / "1"
        attempt.mkdir(parents=True)
        self.spawn([*self.trainer(), "--out", str(attempt)], attempt / "log")


class Loop(System):
    """Everything is started anew: no worker is, and a shell loop starts the launcher again as soon as it has ended."""

    def start(self) -> None:
        self.attempts.mkdir(parents=True)
        off = ["--set", "workers.restarts=0", "--set", "workers.drafter_restarts=0"]
        self.spawn(["bash", "-c", FOREVER, "loop", str(self.attempts), *self.trainer(), *off], self.root / "loop.log")


class Torchrun(System):
    """`torchrun --max-restarts` over torchrun_stages.py; its monitor looks every 0.1 s, torch's default.

    With torch 2.13's default one store serves all restarts, and a rank may read the address that another one had before
    the last restart ("Connection refused"), again and again; so each restart gets a store of its own.
    """

    def __init__(self, name: str, root: Path, config: Path, env: dict[str, str], restarts: int = 10**6) -> None:
        super().__init__(name, root, config, {**env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        self.restarts = restarts

    def start(self) -> None:
        workers = json.loads(self.config.read_text())["workers"]
        count = len(workers["target_devices"]) + len(workers["drafter_devices"])
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command += [f"--max-restarts={self.restarts}", str(HERE / "torchrun_stages.py")]
        self.spawn([*command, str(self.config), str(self.root)], self.root / "log")

    def close(self) -> None:
        # Its workers live in sessions of their own, and outlive an agent that is killed.
        below = [pid for pid, _ in _below(self.launcher())]
        super().close()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def step(self) -> int:
        words = _tail(self.root / "steps", 200).split()
        return int(words[-1]) if words else 0

    def workers(self, role: str) -> list[int]:
        alive = {pid for pid, _ in _below(self.launcher())}
        found = [int(p.read_text() or 0) for p in sorted((self.root / "pids").glob(f"{role}*"))]
        return [pid for pid in found if pid in alive]

    def tail(self) -> str:
        return _tail(self.root / "log")[-3000:]


class Supervised(System):
    """The bundled trainer as a job of the resident, which acts: as after `dflash-ops deploy`, on this machine.

    Args:
        pyz: the resident. step_s: silence in a step after which the job counts as hung.
    """

    def __init__(
        self, name: str, root: Path, config: Path, env: dict[str, str], pyz: Path, step_s: float = 300.0
    ) -> None:
        super().__init__(name, root, config, env)
        self.step_s = step_s
        from resident_lab import Lab  # type: ignore[import-not-found]

        (root / "root").mkdir()
        self.lab = Lab(pyz, root / "root", root, socket=f"dflash-test-{secrets.token_hex(4)}")

    @property
    def attempts(self) -> Path:
        return Path(self.lab.layout.attempts)

    def start(self) -> None:
        from dflash_ops.contracts import Limits, Policy, RemedyTable, from_dict

        table = from_dict(RemedyTable, json.loads((ROOT / "trainer" / "remedies.json").read_text()), "remedies.json")
        argv = [sys.executable, "-m", "trainer", "run", "--config", str(self.config), "--out", "{attempt}"]
        self.lab.start(
            argv=(*argv, "--checkpoints", "{checkpoints}", "--resume", "auto"), cwd=str(ROOT), env=self.env,
            progress="", remedies=table, policy=Policy("act"), limits=Limits(step_s=self.step_s),
        )  # fmt: skip

    def launcher(self) -> int:
        from dflash_ops.resident import attempts

        last = attempts.last(self.lab.layout)
        return last.start.launcher.pid if last is not None and last.start is not None and last.launcher_alive else 0

    def close(self) -> None:
        self.lab.close()

    def faults(self) -> list[str]:
        """Ends the job as an operator does, and replays the plan's record: every sample once an epoch."""
        from trainer.plan_record import audit

        answer = self.lab.run("stop", "--grace", "60")
        result = audit(self.attempts)
        said = [] if answer.rc == 0 else [f"stop ended with {answer.rc}: {answer.out.decode('utf-8', 'replace')}"]
        said += [str(p) for p in result.problems]
        if not result.ok:
            said.append("audit: not every sample was trained once an epoch")
        return said + ([] if result.epochs and result.epochs[0].complete else ["no epoch was completed"])


def build_pyz(folder: Path) -> Path:
    """The resident as a deploy installs it: its zipapp with the compiled form beside it."""
    from dflash_ops.deploy.zipapp import build_resident

    id = build_resident(folder / "new.pyz")
    return (folder / "new.pyz").rename(folder / f"{id}.pyz")


def wait_until(system: System, steps: int, within: float = 400.0) -> None:
    """Until it has made so many steps.

    Raises:
        RuntimeError: it did not.
    """
    deadline = time.monotonic() + within
    while system.step() < steps:
        ended = system.process is not None and system.process.poll() is not None
        if ended:
            raise RuntimeError(f"{system.name} ended with {system.process.returncode}:\n{system.tail()}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{system.name}: no step {steps} within {within:g} s:\n{system.tail()}")
        time.sleep(0.1)


def _tail(file: Path, size: int = 1 << 14) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - size))
            return opened.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _below(pid: int) -> list[tuple[int, list[str]]]:
    """(pid, words of its command line) of all living descendants."""
    if not pid:
        return []
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            with contextlib.suppress(OSError):
                line = (Path("/proc") / str(child) / "cmdline").read_bytes().decode("utf-8", "replace")
                found.append((child, [word for word in line.split("\0") if word]))
                todo.append(child)
    return found
