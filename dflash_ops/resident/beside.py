"""A command that runs beside the loop: begun, read when it has ended, never waited for.

The rule here: nothing here blocks. A command that takes too long is killed, and so is one whose loop was killed; one
that cannot even be killed (a driver in uninterruptible sleep) is left alone, and no other is begun while it is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

#: Bytes of an answer at most; who says more is killed.
MOST = 1 << 18

_PIECE = 1 << 16


@dataclass(frozen=True)
class Answer:
    """`rc` None: it was ended for `fault`, or could not be started."""

    rc: int | None
    text: str
    fault: str = ""


class Beside:
    """
    Args:
        patience: seconds until a command is killed. clock: monotonic seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = 0.0
        self._said = bytearray()
        self._fault = ""

    @property
    def pid(self) -> int | None:
        """Of the command that runs, if one does."""
        return self._process.pid if self._process is not None else None

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return self._clock() - self._begun if self._process is not None else 0.0

    def begin(self, argv: Sequence[str]) -> Answer | None:
        """Start it; an answer only where that fails at once."""
        assert self._process is None
        self._said.clear()
        self._fault = ""
        try:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # nvidia-smi tells its faults on either
                cwd="/",
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        except OSError as error:
            return Answer(None, "", f"cannot be run: {error.strerror}")
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._begun = self._clock()
        return None

    def look(self) -> Answer | None:
        """Its answer once it has ended; None while it runs, or where none does."""
        process = self._process
        if process is None:
            return None
        whole = self._read(process)
        if process.poll() is None or not whole:
            if not self._fault and len(self._said) > MOST:
                self._kill(process, f"says more than {MOST >> 10} KiB")
            elif not self._fault and self.seconds > self._patience:
                self._kill(process, f"did not answer within {self._patience:.0f} s")
            if process.poll() is None or not self._fault:
                return None  # of one that was killed a child may hold the pipe for ever
        self._close(process)
        rc = 128 - process.returncode if process.returncode < 0 else process.returncode
        return Answer(None if self._fault else rc, self._said[:MOST].decode("utf-8", "replace"), self._fault)

    def close(self) -> None:
        """End it, without waiting."""
        if self._process is not None:
            self._kill(self._process, "ended with the loop")
            self._close(self._process)

    def _read(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether its output has ended."""
        assert process.stdout is not None
        while len(self._said) <= MOST:
            try:
                piece = os.read(process.stdout.fileno(), _PIECE)
            except BlockingIOError:
                return False
            if not piece:
                return True
            self._said += piece
        return False

    def _kill(self, process: subprocess.Popen[bytes], fault: str) -> None:
        self._fault = fault
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its own group; not reaped yet, so that the number is its own

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        process.stdout.close()
        self._process = None


@cache
def _libc() -> Any:
    """The C library; None where Python comes without ctypes: then a command may outlive a loop that was killed."""
    try:
        import ctypes

        return ctypes.CDLL(None)
    except (ImportError, OSError):
        return None


def _die_with(parent: int) -> Callable[[], None] | None:
    """In the child, before its exec: the kernel kills it when `parent` ends (PR_SET_PDEATHSIG)."""
    libc = _libc()  # here: between fork and exec nothing is loaded any more
    if libc is None:
        return None

    def ask() -> None:
        libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
