"""A foreign script as a job on this machine: its real resident, tmux and processes; all of it ended afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ending import end_supervisors, kill_recorded

from dflash_ops.cli.main import run
from dflash_ops.contracts import JobSpec, dumps

SOON = 30.0


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def row(self) -> dict[str, Any]:
        return dict(json.loads(self.out))

    def missing(self, name: str) -> str:
        """Why a text is missing, or an empty string."""
        return next((m for m in self.row["facts"].get("missing", ()) if m.startswith(name)), "")

    def source(self, name: str) -> dict[str, Any]:
        return next(s for s in self.row["facts"]["sources"] if s["name"] == name)


@dataclass
class JobLab:
    folder: Path
    pyz: Path
    said: Callable[[], tuple[str, str]]
    socket: str = field(default_factory=lambda: f"dflash-test-{secrets.token_hex(4)}")
    progress: str = r"it (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def script(self) -> Path:
        return self.folder / "train.py"

    def inventory(self, top: str = "") -> Path:
        file = self.folder / "inventory.toml"
        file.write_text(
            f'schema = 1\n{top}\n[hosts.here]\nkind = "local"\npython = "{sys.executable}"\n'
            f'[jobs.toy]\nhost = "here"\nroot = "root"\nsession = "toy"\nsocket = "{self.socket}"\n'
            f'command = ["python3", "{self.script}"]\nprogress = \'{self.progress}\'\n'
        )
        return file

    def copy(self, folder: Path, said: Callable[[], tuple[str, str]]) -> JobLab:
        """The same job's files elsewhere, free to be damaged; its pane stays with this one."""
        shutil.copytree(self.root, folder / "root", symlinks=True, ignore=shutil.ignore_patterns("inductor"))
        return JobLab(folder, self.pyz, said, self.socket)

    def deploy(self) -> None:
        """What `deploy` leaves there: the resident, and nothing started."""
        place = self.root / "resident"
        place.mkdir(parents=True)
        (place / "current.pyz").symlink_to(self.pyz)

    def ask(self, command: str, stdin: str = "", **options: Any) -> dict[str, Any]:
        argv = [sys.executable, "-I", "-S", str(self.root / "resident/current.pyz"), command, "--root", str(self.root)]
        done = subprocess.run(argv, input=stdin.encode(), capture_output=True, timeout=90, check=False, **options)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return dict(json.loads(done.stdout))

    def start(self, script: str, *, wait: bool = True) -> int:
        """One attempt of a script, to its end; its number."""
        name = hashlib.sha256(script.encode()).hexdigest()[:8]
        file = self.folder / f"train-{name}.py"
        file.write_text(script)
        spec = JobSpec(
            job="toy",
            root=str(self.root),
            session="toy",
            argv=(sys.executable, "-u", str(file)),
            checkpoints="checkpoints",
            socket=self.socket,
            progress=self.progress,
        )
        number = int(self.ask("start", dumps(spec))["attempt"])
        if wait:
            self.wait(self.attempt(number) / "exit.json")
        return number

    def attempt(self, number: int) -> Path:
        return self.root / "run/attempts" / str(number)

    def wait(self, path: Path) -> None:
        end = time.monotonic() + SOON
        while not path.exists():
            assert time.monotonic() < end, f"no {path}"
            time.sleep(0.05)

    def triage(self, *args: str, top: str = "") -> Said:
        """`dflash-ops triage --job toy ...`, in this process."""
        self.said()
        code = run(["triage", "--job", "toy", "-i", str(self.inventory(top)), *args])
        out, err = self.said()
        return Said(code, out, err)

    def tmux(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("TMUX")}
        return subprocess.run(
            ["tmux", "-L", self.socket, *args], capture_output=True, text=True, env=env, timeout=20, check=False
        )

    def end(self) -> None:
        end_supervisors(self.root)
        self.tmux("kill-server")
        Path(f"/tmp/tmux-{os.getuid()}/{self.socket}").unlink(missing_ok=True)
        kill_recorded(self.root)
