"""What a job's snapshot says, as metrics: one table of names, labels and where each number comes from. Pure.

The rules here: what is not known has no sample, never 0; nothing of a job that could not be asked is told but that; a
label has few values, however odd what a job says is (docs/exporter.md, held to this table by a test).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from dflash_ops.contracts import Event, State
from dflash_ops.contracts.incident import IncidentState
from dflash_ops.contracts.snapshot import GpuInfo, Snapshot
from dflash_ops.supervise.ledger import by_supervisor
from dflash_ops.tell.incidents import incidents

#: Labels that every sample of a job has; `node` is empty for a job on one machine.
OWN = ("job", "host", "node")

#: Most workers, cards and reasons of one job that are told: a trainer that makes names up must not fill a database.
MOST = 256

#: What one metric says of one job: values of its own labels, and the number (None: not known).
Samples = Iterable[tuple[tuple[str, ...], float | int | None]]


@dataclass(frozen=True)
class History:
    """What a job's journal says in all: starts by the supervisor, and incidents by state."""

    restarts: int = 0
    incidents: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Sequence[Event]) -> History:
        """From the events of a journal."""
        starts = sum(e.event == "attempt_started" and by_supervisor(e.actor) for e in events)
        return cls(starts, Counter(one.state.value for one in incidents(events)))


@dataclass(frozen=True)
class Told:
    """One job or node. `snapshot`: None where it could not be asked; `now`: by its own machine's clock.

    `look_s`: how long the newest look took; `age_s`: since when it is over. Both by the exporter's clock.
    """

    job: str
    host: str
    node: str
    snapshot: Snapshot | None
    now: float = 0.0
    history: History | None = None
    look_s: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True)
class Metric:
    """`labels`: beside OWN; `read`: its samples of a job that could be asked."""

    name: str
    help: str
    read: Callable[[Snapshot, Told], Samples]
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"


def one(value: float | int | None) -> Samples:
    return [((), value)]


def _progress(name: str) -> Callable[[Snapshot, Told], Samples]:
    return lambda s, told: one(getattr(s.progress, name) if s.progress is not None else None)


def _live(name: str) -> Callable[[Snapshot, Told], Samples]:
    """A number of the present moment: of an attempt that has ended there is none."""
    return lambda s, told: one(getattr(s.progress, name) if s.progress is not None and s.exit is None else None)


def _rate(name: str) -> Callable[[Snapshot, Told], Samples]:
    return lambda s, told: one(s.rates.get(name) if s.exit is None else None)


def _age(t: float | None, told: Told) -> float | None:
    return None if t is None else max(0.0, told.now - t)


def _shares(s: Snapshot, told: Told) -> Samples:
    if s.exit is not None:
        return
    for name, shares in islice(s.workers.items(), MOST):
        for share in ("wait", "compute", "copy", "sync"):
            yield (name, share), getattr(shares, share)


def _lives(s: Snapshot, told: Told) -> Samples:
    return [((name,), shares.life) for name, shares in islice(s.workers.items(), MOST)]


def _gpus(s: Snapshot) -> list[GpuInfo]:
    """Each card once, whatever the machine says."""
    return list({gpu.index: gpu for gpu in s.gpus[:MOST]}.values())


def _gpu(name: str) -> Callable[[Snapshot, Told], Samples]:
    return lambda s, told: [((str(gpu.index),), getattr(gpu, name)) for gpu in _gpus(s)]


def _throttle(s: Snapshot, told: Told) -> Samples:
    return [((str(g.index), why), 1) for g in _gpus(s) for why in sorted(set(g.throttle or ()))[:16]]


def _ecc(s: Snapshot, told: Told) -> Samples:
    for gpu in _gpus(s):
        yield (str(gpu.index), "corrected"), gpu.ecc_corrected
        yield (str(gpu.index), "uncorrected"), gpu.ecc_uncorrected


def _states(s: Snapshot, told: Told) -> Samples:
    return [((state.value,), int(s.state is state)) for state in State]


def _incidents(s: Snapshot, told: Told) -> Samples:
    if told.history is None:
        return []
    return [((state.value,), told.history.incidents.get(state.value, 0)) for state in IncidentState]


#: All of them, in the order in which they are documented.
METRICS: tuple[Metric, ...] = (
    Metric("dflash_state", "1 for the state that the job is in, 0 for the others", _states, ("state",)),
    Metric("dflash_state_seconds", "seconds since it is in this state", lambda s, t: one(_age(s.since, t))),
    Metric("dflash_snapshot_age_seconds", "age of what the job's machine knows", lambda s, t: one(_age(s.t, t))),
    Metric("dflash_attempt", "number of the newest attempt", lambda s, t: one(s.attempt)),
    Metric("dflash_life", "largest life of a worker in it: restarts of single workers", lambda s, t: one(s.life)),
    Metric(
        "dflash_release_info",
        "1, with the release that runs",
        lambda s, t: [((s.release,), 1)] if s.release else [],
        ("release",),
    ),
    Metric("dflash_exit_code", "exit code of the newest attempt, if it has ended with one",
           lambda s, t: one(s.exit.rc if s.exit is not None else None)),
    Metric("dflash_restarts", "starts by the supervisor, of the journal",
           lambda s, t: one(t.history.restarts if t.history is not None else None), kind="counter"),
    Metric("dflash_incidents", "incidents by how far they are (docs/supervise.md), of the journal",
           _incidents, ("state",)),
    Metric("dflash_step", "training step", _progress("step")),
    Metric("dflash_steps_planned", "step at which the run is over", _progress("total")),
    Metric("dflash_epoch", "epoch, with its fraction", _progress("epoch")),
    Metric("dflash_progress_age_seconds", "seconds since the last progress line",
           lambda s, t: one(_age(s.progress.t if s.progress is not None else None, t))),
    Metric("dflash_eta_seconds", "seconds until it is over, as the trainer says", _live("eta_s")),
    Metric("dflash_loss", "training loss", _progress("loss")),
    Metric("dflash_accuracy_ratio", "share of block tokens that were right", _progress("acc")),
    Metric("dflash_tau", "accepted tokens for each forward of the target", _progress("tau")),
    Metric("dflash_learning_rate", "learning rate", _progress("lr")),
    Metric("dflash_block_tokens_per_second", "block tokens a second, of the last line", _live("block_tok_s")),
    Metric("dflash_block_tokens_per_second_median", "block tokens a second, the attempt's median",
           _rate("block_tok_s_median")),
    Metric("dflash_context_tokens_per_second", "context tokens a second, of the last line", _live("ctx_tok_s")),
    Metric("dflash_context_tokens_per_second_median", "context tokens a second, the attempt's median",
           _rate("ctx_tok_s_median")),
    Metric("dflash_own_rate", "a foreign trainer's own rate, in its own unit", _live("rate")),
    Metric("dflash_step_seconds", "seconds a step, the median", _rate("step_s_median")),
    Metric("dflash_ring_ready_slots", "slots of the ring that wait for a drafter", _live("ring_ready")),
    Metric("dflash_ring_slots", "slots of the ring", _live("ring_slots")),
    Metric("dflash_worker_share_ratio", "share of a worker's time: wait, compute, copy, sync", _shares,
           ("worker", "share")),
    Metric("dflash_worker_life", "restarts of a worker in this attempt", _lives, ("worker",)),
    Metric("dflash_checkpoint_step", "step of the newest checkpoint",
           lambda s, t: one(s.checkpoint.step if s.checkpoint is not None else None)),
    Metric("dflash_checkpoint_age_seconds", "seconds since the newest checkpoint was written",
           lambda s, t: one(_age(s.checkpoint.t if s.checkpoint is not None else None, t))),
    Metric("dflash_resident_alive", "1 if the supervisor beside the trainer lives",
           lambda s, t: one(int(s.resident.alive) if s.resident is not None else None)),
    Metric("dflash_session_alive", "1 if its tmux session lives (the trainer does not need it)",
           lambda s, t: one(int(s.session.alive) if s.session is not None else None)),
    Metric("dflash_warnings", "warnings of status", lambda s, t: one(len(s.warnings))),
    Metric("dflash_gpu_info", "1, with the card's name and uuid",
           lambda s, t: [((str(g.index), g.name, g.uuid), 1) for g in _gpus(s)], ("gpu", "name", "uuid")),
    Metric("dflash_gpu_utilization_ratio", "share of the last moment in which it worked", _gpu("util"), ("gpu",)),
    Metric("dflash_gpu_memory_used_bytes", "memory in use", _gpu("mem_used"), ("gpu",)),
    Metric("dflash_gpu_memory_total_bytes", "memory", _gpu("mem_total"), ("gpu",)),
    Metric("dflash_gpu_temperature_celsius", "temperature", _gpu("temp_c"), ("gpu",)),
    Metric("dflash_gpu_power_watts", "power that it draws", _gpu("power_w"), ("gpu",)),
    Metric("dflash_gpu_power_limit_watts", "power that it may draw", _gpu("power_limit_w"), ("gpu",)),
    Metric("dflash_gpu_throttled", "1 for each reason that holds its clocks down now", _throttle, ("gpu", "reason")),
    Metric("dflash_gpu_ecc_errors", "memory errors since the driver was loaded", _ecc, ("gpu", "kind"), "counter"),
    Metric("dflash_disk_free_bytes", "room on the disk of the checkpoints",
           lambda s, t: one(s.disk.free if s.disk is not None else None)),
    Metric("dflash_disk_total_bytes", "size of the disk of the checkpoints",
           lambda s, t: one(s.disk.total if s.disk is not None else None)),
    Metric("dflash_disk_full_seconds", "seconds until that disk is full, at the last hour's pace",
           lambda s, t: one(s.disk.full_in_s if s.disk is not None else None)),
)  # fmt: skip


def samples(metric: Metric, told: Told) -> Iterator[tuple[tuple[str, ...], float]]:
    """Label values (OWN, then the metric's) and number of what is known."""
    if told.snapshot is None:
        return
    for values, number in metric.read(told.snapshot, told):
        if number is None:
            continue
        try:
            value = float(number)
        except OverflowError:  # more digits than a double has room for: nobody counts so far
            continue
        yield tuple(clean(text) for text in (told.job, told.host, told.node, *values)), value


def clean(text: str) -> str:
    """A label's value: what UTF-8 cannot say is replaced, and no page is filled by one name."""
    return text[:200].encode("utf-8", "replace").decode()
