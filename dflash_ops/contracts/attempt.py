"""start.json and exit.json: what the wrapper says of one attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dflash_ops.contracts.states import State, TrainerExit


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for another: pid and start time (clock ticks since boot)."""

    pid: int
    start: int


@dataclass(frozen=True)
class StartRecord:
    SCHEMA: ClassVar[int] = 1

    attempt: int
    job: str
    release: str | None
    argv: tuple[str, ...]
    cwd: str
    t: float
    wrapper: Process
    launcher: Process
    boot_id: str = ""
    env_names: tuple[str, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    cache_dir: str = ""
    schema: int = 1


@dataclass(frozen=True)
class StopRecord:
    """stop.json: somebody asked for the end of this attempt; written before the signal is sent."""

    SCHEMA: ClassVar[int] = 1

    attempt: int
    t: float
    actor: str = "operator"
    reason: str = ""
    grace_s: float = 0.0
    schema: int = 1


@dataclass(frozen=True)
class ExitRecord:
    """Exactly one of `rc` and `signal` is not null. `detail` says why a trainer could not be started at all."""

    SCHEMA: ClassVar[int] = 1

    attempt: int
    rc: int | None
    signal: str | None
    t: float
    duration_s: float
    requested: str | None = None
    log_bytes: int = 0
    log_lost_bytes: int = 0
    detail: str = ""
    schema: int = 1

    def state(self, finished_rc: tuple[int, ...] = (0,)) -> State:
        """finished, stopped or crashed: an operator's own stop, Ctrl-C or TERM is never a crash."""
        if self.rc is not None and self.rc in finished_rc:
            return State.FINISHED
        if self.requested is not None or self.rc == TrainerExit.STOPPED or self.signal in ("SIGTERM", "SIGINT"):
            return State.STOPPED
        return State.CRASHED

    def describe(self) -> str:
        if self.signal is not None:
            return f"ended by {self.signal}"
        if self.rc is not None and self.rc in TrainerExit._value2member_map_:
            return f"exit code {self.rc} ({TrainerExit(self.rc).meaning})"
        return f"exit code {self.rc}"
