"""The launcher's side of its worker processes: start, watch, end. One elastic context a worker, so that each has a
life of its own.

`start_processes` runs a command, not a function: a spawned function would bring named semaphores and a resource
tracker, which a kill -9 leaves behind in /dev/shm. Its signal handlers are not wanted: the launcher owns signals.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, start_processes

import trainer
from trainer.channel import Peer
from trainer.config import WorkersConfig
from trainer.stopwatch import SHARES

#: Seconds for a worker that was told to end, or whose socket closed, before it is killed.
GRACE_S = 20.0
#: So many times as long as such a piece takes on average may one take, whatever `step_timeout_s` says.
MEANS = 10
#: So many times as long as the first piece may the second one take: on a slow machine nothing else is known yet.
FIRSTS = 2
_TEE_BYTES = 1 << 16
#: How gloo and NCCL say that the process at the other end is gone.
_ECHO = re.compile(r"(?i)connection (?:reset|closed|refused)|broken pipe|remote (?:worker|process)|ncclRemoteError")


def import_path() -> str:
    """PYTHONPATH with which a process of ours finds this very trainer."""
    found = [str(Path(trainer.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.pathsep.join(found)


class WorkerLogs(LogsSpecs):
    """Puts a worker's output and its error.json where docs/contracts.md says."""

    def __init__(self, log: Path, error_file: Path) -> None:
        super().__init__()
        self._log = log
        self._error_file = error_file

    @property
    def root_log_dir(self) -> str:
        return str(self._log.parent)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        envs[0]["TORCHELASTIC_ERROR_FILE"] = str(self._error_file)
        # stderr joins stdout in the worker itself: two descriptors of one file would overwrite each other.
        return LogsDest(stdouts={0: str(self._log)}, stderrs={0: ""}, error_files={0: str(self._error_file)})


@dataclass
class Worker:
    """One worker through all its lives.

    Attributes:
        name: target0, drafter1, ... role: target or drafter. rank: among its role. device: "cpu" or "cuda:N".
        life: 0 at first. peer: its connection, None until it said hello. ready: it has loaded what it needs.
        busy_since, idle_since: when it got what it is doing, or ran out of it (monotonic); the other one is None.
        seconds: wait, compute, copy, sync since it was ready, as it reported them last. pending_wait: of the time that
            they lack. doing: what it was last given. started_at, ready_at: of this life (monotonic).
        gained: what its last report added to `seconds`. hop: of its wait, what the launcher did not see as one: the way
            of its answer and of its order.
        fault, fault_at: its own last words, and when they came.
        lost_at: when its socket closed. exit_code: once it has ended.
        tries: lives begun since it was last of use. useful: something that it did in this life counts.
        greeted: it said hello. given: it got something to do in this life. compiles: it said so of what it does now.
        did: kinds of pieces that it has finished in this life, and seconds of the first one of each. pieces: of each
        kind how many in all lives but for their first ones, and the seconds of these.
    """

    name: str
    role: str
    rank: int
    device: str
    life: int = 0
    peer: Peer | None = None
    ready: bool = False
    busy_since: float | None = None
    idle_since: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    gained: dict[str, float] = field(default_factory=dict)
    hop: float = 0.0
    fault: dict[str, Any] | None = None
    fault_at: float | None = None
    pending_wait: float = 0.0
    doing: str = "compute"
    started_at: float = 0.0
    ready_at: float | None = None
    lost_at: float | None = None
    exit_code: int | None = None
    tries: int = 0
    useful: bool = False
    greeted: bool = False
    given: bool = False
    compiles: bool = False
    did: dict[str, float] = field(default_factory=dict)
    pieces: dict[str, tuple[int, float]] = field(default_factory=dict)
    _context: PContext | None = None
    _log: Path | None = None
    _told: int = 0
    _partial: bytes = b""

    @property
    def folder(self) -> str:
        """Name for its files; a later life never overwrites an earlier one's."""
        return self.name if self.life == 0 else f"{self.name}.life{self.life}"

    def log_file(self, attempt: Path) -> Path:
        return attempt / "logs" / f"{self.folder}.log"

    def error_file(self, attempt: Path) -> Path:
        return attempt / "errors" / self.folder / "error.json"

    def times(self) -> dict[str, float]:
        """Seconds of this life so far, together all that have passed: loading is a wait too.

        What it has not reported yet is known only by what it was given to do; its own account replaces that later.
        """
        now = time.monotonic() if self.exit_code is None else min(time.monotonic(), self.ended_at)
        ready = now if self.ready_at is None else self.ready_at
        seconds = {kind: self.seconds.get(kind, 0.0) for kind in SHARES}
        rest = max(0.0, now - ready - sum(seconds.values()))
        idle = self.pending_wait + (0.0 if self.idle_since is None else max(0.0, now - self.idle_since))
        waited = min(rest, idle)
        seconds["wait"] += waited + max(0.0, ready - self.started_at)
        seconds[self.doing] += rest - waited
        return seconds

    def busy(self, kind: str = "compute") -> None:
        """It was given something to do; the wait before is not in `seconds` until it speaks again."""
        self.doing = kind
        self.given = True
        if self.idle_since is not None:
            self.pending_wait += time.monotonic() - self.idle_since
        self.busy_since, self.idle_since = time.monotonic(), None

    def idle(self) -> None:
        """It waits for work: no silence is too long now."""
        now = time.monotonic()
        if self.given and self.busy_since is not None and not self.compiles:
            # A life's first piece of a kind loads this and that, and says nothing of the next ones.
            if self.doing in self.did:
                count, seconds = self.pieces.get(self.doing, (0, 0.0))
                self.pieces[self.doing] = (count + 1, seconds + now - self.busy_since)
            self.did.setdefault(self.doing, now - self.busy_since)
        self.busy_since, self.idle_since, self.compiles = None, now, False

    def limit_s(self, config: WorkersConfig, peers: Sequence[Worker]) -> float:
        """Longest silence now: of a batch or an averaging by what they took before, of anything else `timeout_s`.

        Args:
            peers: all workers of its role, in all of whose lives what is usual is known better than in a young one.
        """
        if not self.given or self.compiles or self.doing not in self.did:
            return config.timeout_s
        known = [peer.pieces.get(self.doing, (0, 0.0)) for peer in peers]
        count, seconds = (sum(sums) for sums in zip(*known, strict=True))
        usual = MEANS * seconds / count if count else FIRSTS * self.did[self.doing]
        return min(config.timeout_s, max(config.step_timeout_s, usual))

    def heard(self, seconds: Mapping[str, float]) -> None:
        self.gained = {kind: max(0.0, spent - self.seconds.get(kind, 0.0)) for kind, spent in seconds.items()}
        self.hop = max(0.0, self.gained.get("wait", 0.0) - self.pending_wait)
        self.seconds, self.pending_wait = dict(seconds), 0.0

    @property
    def hopeless(self) -> bool:
        """It could name its fault, and another life would meet the same one: bad config, data, numbers, checkpoint."""
        return self.fault is not None and bool(self.fault.get("known")) and self.fault.get("code") != 1

    @property
    def echo(self) -> bool:
        """Its last words only tell that another one went: the averaging lost its connection."""
        return self.fault is not None and not self.fault.get("known") and bool(_ECHO.search(str(self.fault["what"])))

    @property
    def ended_at(self) -> float:
        """When the first sign of its end came (monotonic); later than anything while there is none."""
        return min((t for t in (self.fault_at, self.lost_at) if t is not None), default=float("inf"))

    def fault_text(self) -> str:
        """Why it ended, in its own words if it had any."""
        if self.fault is not None:
            return str(self.fault["what"])
        if self.exit_code is not None and self.exit_code < 0:
            return f"{self.name} was killed by {signal.Signals(-self.exit_code).name}"
        return f"{self.name} ended with exit code {self.exit_code}"

    def start(self, attempt: Path, socket: str, threads: int, *, spare: bool = False) -> None:
        """Starts the present life. Signals stay as the launcher has set them.

        Args:
            spare: it will load its code, and then wait for its setup until it takes over (`take_over`).
        """
        self._log = self.log_file(attempt)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        error_file = self.error_file(attempt)
        error_file.parent.mkdir(parents=True, exist_ok=True)
        self._told, self._partial = 0, b""
        self.peer, self.greeted = None, False
        self._begin()
        environment = {
            "PYTHONPATH": import_path(),
            "PYTHONUNBUFFERED": "1",
            "TQDM_DISABLE": "1",  # bars are for terminals, this is a log
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # One machine: the loopback is always there, the host's name may not resolve inside a container.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        arguments: tuple[str, ...] = (
            "-m",
            "trainer.worker_main",
            self.role,
            self.name,
            str(self.life),
            socket,
            str(os.getpid()),
        )
        if spare:
            arguments = (*arguments, "spare")
        self._context = _quietly_start(self.name, arguments, environment, WorkerLogs(self._log, error_file))

    def take_over(self, spare: Worker) -> None:
        """The spare's process is the present life from now on."""
        self.life = spare.life
        self._context, self._log, self._told, self._partial = spare._context, spare._log, spare._told, spare._partial
        self.peer, self.greeted = spare.peer, spare.greeted
        self._begin()

    def _begin(self) -> None:
        self.ready, self.fault, self.lost_at, self.exit_code = False, None, None, None
        self.fault_at, self.useful, self.given, self.compiles, self.did = None, False, False, False, {}
        self.seconds, self.pending_wait, self.ready_at, self.started_at = {}, 0.0, None, time.monotonic()
        self.busy_since, self.idle_since = time.monotonic(), None

    @property
    def pid(self) -> int | None:
        return None if self._context is None else self._context.pids()[0]

    def poll(self) -> int | None:
        """Its exit code once it has ended (negative: a signal), else None."""
        if self._context is None:
            return None
        result = self._context.wait(0)
        if result is None:
            return None
        failure = result.failures.get(0)
        return 0 if failure is None else failure.exitcode

    def wait(self, deadline: float) -> int | None:
        """Polls until it has ended or the monotonic deadline has passed."""
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return code

    def kill(self) -> int | None:
        """SIGKILL to its process group, and its exit code."""
        if self._context is not None and self.poll() is None:
            self._context.close(signal.SIGKILL, timeout=10)
        return self.poll()

    def disconnect(self) -> None:
        if self.peer is not None:
            self.peer.close()
            self.peer = None

    def new_output(self, *, rest: bool = False) -> list[str]:
        """Whole lines that its log has gained since the last call; `rest` gives the unfinished last one too."""
        if self._log is None:
            return []
        try:
            with self._log.open("rb") as opened:
                opened.seek(self._told)
                got = opened.read(_TEE_BYTES)
        except OSError:
            return []
        self._told += len(got)
        *lines, self._partial = (self._partial + got).split(b"\n")
        if rest and self._partial:
            lines.append(self._partial)
            self._partial = b""
        # Of a line that was overwritten by carriage returns only its last state is worth telling.
        texts = (line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2] for line in lines)
        return [text for text in texts if text.strip()]


def _quietly_start(name: str, arguments: tuple[str, ...], environment: dict[str, str], logs: WorkerLogs) -> PContext:
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    handlers = {number: signal.getsignal(number) for number in wanted}
    try:
        return start_processes(name, sys.executable, {0: arguments}, {0: environment}, logs)
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
