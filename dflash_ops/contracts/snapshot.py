"""snapshot.json: the resident's view of the job, also one line of `follow`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dflash_ops.contracts.attempt import ExitRecord
from dflash_ops.contracts.journal import Event
from dflash_ops.contracts.states import State

#: Seconds after which a snapshot is not trusted any more.
FRESH_S = 3.0


@dataclass(frozen=True)
class StageInfo:
    name: str
    k: int | None = None
    n: int | None = None
    what: str = ""


@dataclass(frozen=True)
class Progress:
    """The last progress line's numbers and when it was read (`t`); `rate` is a foreign trainer's own."""

    t: float
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    loss: float | None = None
    acc: float | None = None
    tau: float | None = None
    block_tok_s: float | None = None
    ctx_tok_s: float | None = None
    rate: float | None = None
    lr: float | None = None
    ring_ready: int | None = None
    ring_slots: int | None = None
    eta_s: float | None = None


@dataclass(frozen=True)
class WorkerShares:
    """Shares (0 to 1) of a worker's wall time since the last record."""

    wait: float | None = None
    compute: float | None = None
    copy: float | None = None
    sync: float | None = None
    life: int = 0


@dataclass(frozen=True)
class ErrorInfo:
    worker: str
    message: str
    t: float | None = None


@dataclass(frozen=True)
class CheckpointInfo:
    step: int
    path: str
    t: float


@dataclass(frozen=True)
class SessionInfo:
    name: str
    socket: str
    alive: bool


@dataclass(frozen=True)
class ResidentInfo:
    alive: bool
    pid: int | None = None
    start: int | None = None
    version: str = ""


@dataclass(frozen=True)
class Snapshot:
    SCHEMA: ClassVar[int] = 1

    job: str
    t: float
    state: State
    since: float
    detail: str = ""
    seq: int = 0
    stage: StageInfo | None = None
    attempt: int | None = None
    life: int | None = None
    release: str | None = None
    started: float | None = None
    progress: Progress | None = None
    rates: dict[str, float | None] = field(default_factory=dict)
    workers: dict[str, WorkerShares] = field(default_factory=dict)
    exit: ExitRecord | None = None
    error: ErrorInfo | None = None
    last_event: Event | None = None
    checkpoint: CheckpointInfo | None = None
    session: SessionInfo | None = None
    resident: ResidentInfo | None = None
    warnings: tuple[str, ...] = ()
    schema: int = 1
