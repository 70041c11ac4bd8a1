"""What the tests of several nodes share: launchers that know each other, in one network or in two."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline_support import REPO, Run  # type: ignore[import-not-found]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


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
