"""What the tests of several nodes share: launchers that know each other, in one network or in two."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline_support import REPO, Run  # type: ignore[import-not-found]

sys.path.append(str(REPO / "tests"))  # the lab's package, also where only these tests are run
from lab import net
from lab.needs import SBIN
from lab.shell import sh
from ports import free_port


@dataclass
class Cluster:
    """Nodes of one job, each with its own attempts and checkpoints.

    Args:
        runs: by rank. host: of node 0, as all reach it. inside: by rank, a context in which a node is started (its
        network namespace).
    """

    runs: list[Run]
    host: str = "127.0.0.1"
    inside: list[Callable[[], Any]] = field(default_factory=list)
    port: int = 0

    def start(self, rank: int, *overrides: str, resume: str = "auto", timeout: float = 60) -> subprocess.Popen[str]:
        """Starts a node's next attempt."""
        run = self.runs[rank]
        run.attempts += 1
        run.attempt.mkdir(parents=True)
        command = [sys.executable, "-m", "trainer", "run", "--config", str(run.config), "--out", str(run.attempt)]
        command += ["--checkpoints", str(run.checkpoints), "--resume", resume, "--nnodes", str(len(self.runs))]
        command += ["--node-rank", str(rank), "--rdzv-endpoint", f"{self.host}:{self.port}"]
        command += ["--rdzv-timeout", str(timeout)]
        for override in overrides:
            command += ["--set", override]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        for name in ("TORCHELASTIC_ERROR_FILE", "GLOO_SOCKET_IFNAME"):
            environment.pop(name, None)
        where = self.inside[rank] if self.inside else contextlib.nullcontext
        with (run.attempt / "log").open("w") as log, where():
            process = subprocess.Popen(
                command, cwd=REPO, env=environment, text=True, stdout=log, stderr=subprocess.STDOUT
            )
        run.running.append(process)
        return process

    def start_all(self, *overrides: str, **options: Any) -> list[subprocess.Popen[str]]:
        where = self.inside[0] if self.inside else contextlib.nullcontext
        with where():
            self.port = free_port()
        return [self.start(rank, *overrides, **options) for rank in range(len(self.runs))]

    def wait(self, within: float = 120) -> list[int]:
        """Exit codes of all nodes' present launchers."""
        return [run.running[-1].wait(within) for run in self.runs]

    @property
    def logs(self) -> str:
        return "\n".join(f"---- node {rank}\n{run.log}" for rank, run in enumerate(self.runs))


def no_namespaces() -> str | None:
    """Why there can be no network namespaces here, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = [name for name in ("ip", "iptables", "nsenter") if shutil.which(name, path=SBIN) is None]
    return f"network namespaces need {', '.join(absent)} (.ci/lab-packages installs them)" if absent else None


class Wire:
    """Two network namespaces and a wire between them, 192.0.2.1 and 192.0.2.2. A context."""

    def __init__(self) -> None:
        number = secrets.token_hex(3)
        self.spaces = [f"dn{number}-{rank}" for rank in (0, 1)]

    def __enter__(self) -> Wire:
        for space in self.spaces:
            sh(["ip", "netns", "add", space])
        first, second = self.spaces
        sh(["ip", "-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second])
        for rank, space in enumerate(self.spaces):
            sh(["ip", "-n", space, "link", "set", "lo", "up"])
            sh(["ip", "-n", space, "addr", "add", f"192.0.2.{rank + 1}/30", "dev", "wire"])
            sh(["ip", "-n", space, "link", "set", "wire", "up"])
        return self

    def __exit__(self, *about: object) -> None:
        for space in self.spaces:
            sh(["ip", "netns", "del", space], ok=None)

    def inside(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """What this thread starts is on that node's side."""
        return net.inside(self.spaces[rank])

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing passes, and nobody is told: no FIN, no reset."""
        table = ["nsenter", f"--net=/run/netns/{self.spaces[0]}", "iptables", "-w", "5"]
        rules = [[chain, way, "wire", "-j", "DROP"] for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o"))]
        for rule in rules:
            sh([*table, "-I", *rule])
        try:
            yield
        finally:
            for rule in rules:
                sh([*table, "-D", *rule])
