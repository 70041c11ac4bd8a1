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
class GpuHolder:
    """A process that holds memory of a card: `worker` where it is one of this attempt's, else only its name."""

    pid: int
    bytes: int | None = None
    worker: str | None = None
    name: str = ""


@dataclass(frozen=True)
class GpuInfo:
    """One card as nvidia-smi tells it. What it does not tell (`[N/A]`, a driver in trouble) is None, never 0.

    Attributes:
        util: 0 to 1. mem_used, mem_total: bytes. temp_c: degrees Celsius. power_w, power_limit_w: watts.
        throttle: why its clocks are held down, such as `sw_thermal_slowdown`; empty: nothing holds them.
        ecc_corrected, ecc_uncorrected: memory errors since the driver was loaded (volatile).
        holders: who holds its memory, the largest first.
    """

    index: int
    name: str = ""
    uuid: str = ""
    util: float | None = None
    mem_used: int | None = None
    mem_total: int | None = None
    temp_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttle: tuple[str, ...] | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    holders: tuple[GpuHolder, ...] | None = None


@dataclass(frozen=True)
class DiskInfo:
    """The file system that holds the checkpoints; `full_in_s` = seconds until it is full at the last hour's pace."""

    path: str
    free: int
    total: int
    full_in_s: float | None = None


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
    gpus: tuple[GpuInfo, ...] = ()
    gpus_note: str = ""
    disk: DiskInfo | None = None
    curves: dict[str, tuple[float, ...]] = field(default_factory=dict)
    deeds: tuple[str, ...] = ()
    schema: int = 1
