"""The launcher's side of the saver: one process for each checkpoint, one at a time.

start --> [hidden folder, saver process] --> its answer or its end --> the record, then the name | a counted failure
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.averages import Averages
from trainer.checkpoint import Store
from trainer.workers import import_path


@dataclass(frozen=True)
class Saved:
    """What came of one checkpoint: the hidden folder of a sealed one, or why there is none."""

    step: int
    beside: Path | None
    failure: str
    seconds: float


class Saver:
    """
    Args:
        store: of the checkpoints. averages: what is saved. grace_s: longest time for one checkpoint, in seconds.
        log: file that a saver's own output goes to.
    """

    def __init__(self, store: Store, averages: Averages, grace_s: float, log: Path) -> None:
        self.store = store
        self.averages = averages
        self.grace_s = grace_s
        self._log = log
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._process: subprocess.Popen[bytes] | None = None
        self._step = 0
        self._beside: Path | None = None
        self._began = 0.0
        self._answer = b""

    @property
    def busy(self) -> bool:
        return self._process is not None

    @property
    def step(self) -> int:
        """Of the checkpoint that is being written, or was last."""
        return self._step

    def abandon(self) -> None:
        """What is being written is not wanted any more."""
        if self._process is not None:
            self._done("given up")

    def start(self, step: int, state: Mapping[str, Any]) -> Saved | None:
        """Begins to write the last average; a result at once only if not even that was possible."""
        assert self._process is None and self.averages.current is not None
        self._step, self._began, self._answer = step, time.monotonic(), b""
        with contextlib.suppress(BlockingIOError):
            self.reader.recv(1 << 16)  # of one that was given up, and spoke after all
        try:
            self._beside = self.store.begin(step, state)
            self._process = self._run(self.averages.current.buffer, self._beside)
        except OSError as error:
            return self._done(f"{error.strerror or error}: {error.filename or self.store.folder}")
        return None

    def _run(self, buffer: int, beside: Path) -> subprocess.Popen[bytes]:
        answer, averages = self._writer.fileno(), self.averages.descriptor
        numbers = [os.getpid(), answer, averages, buffer]
        layout = json.dumps(self.averages.layout.to_dict(), separators=(",", ":"))
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "trainer.saver", *map(str, numbers), layout, str(beside)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
                pass_fds=(answer, averages),
                start_new_session=True,  # a Ctrl-C at the terminal is for the launcher alone
            )

    def poll(self) -> Saved | None:
        """What came of the checkpoint that is being written, once it is known."""
        if self._process is None:
            return None
        code = self._process.poll()  # before its answer is read: it may come between the two
        with contextlib.suppress(BlockingIOError):
            self._answer += self.reader.recv(1 << 16)
        if self._answer.endswith(b"\n"):
            answer = json.loads(self._answer)
            return self._done("" if answer["ok"] else str(answer["what"]))
        if code is not None:
            by = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return self._done(f"the saver {by} ({self._log})")
        if time.monotonic() - self._began > self.grace_s:
            return self._done(f"not written within checkpoint.grace_s = {self.grace_s:g} s")
        return None

    def _done(self, failure: str) -> Saved:
        self._end()
        beside, self._beside = self._beside, None
        if failure and beside is not None:
            self.store.discard(beside)
            beside = None
        return Saved(self._step, beside, failure, time.monotonic() - self._began)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5 if self._answer.endswith(b"\n") else 0)
            return
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that hangs holds it: the kernel ends it later
            process.wait(1.0)

    def close(self) -> None:
        """What is still being written is given up."""
        self.abandon()
        self.reader.close()
        self._writer.close()
