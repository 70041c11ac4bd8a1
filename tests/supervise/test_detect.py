"""Health detectors: what a person would want to be told, and silence about healthy runs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from dflash_ops.contracts import Finding, Progress, Snapshot, State, WorkerShares
from dflash_ops.supervise.detect import DETECTORS, DiskSample, History, run

T0 = 1_000_000.0
GIB = 1 << 30


def looks(count: int, *, workers: dict[str, WorkerShares] | None = None, **values: Any) -> tuple[Snapshot, ...]:
    """`count` looks 10 s apart; a value may be a function of the number."""
    found = []
    for i in range(count):
        numbers = {k: v(i) if callable(v) else v for k, v in values.items()}
        progress = Progress(T0 + 10 * i, step=10 * i, **numbers)
        found.append(
            Snapshot("main", T0 + 10 * i, State.STEPPING, T0, attempt=1, progress=progress, workers=dict(workers or {}))
        )
    return tuple(found)


def healthy(count: int = 60, seed: int = 3) -> tuple[Snapshot, ...]:
    rng = random.Random(seed)
    shares = {
        f"{role}{n}": WorkerShares(wait=0.2 + rng.random() * 0.1, compute=0.6, sync=0.05)
        for role in ("target", "drafter")
        for n in range(3)
    }
    return looks(
        count,
        workers=shares,
        loss=lambda i: 8 / (1 + i / 20) + rng.gauss(0, 0.05),
        block_tok_s=lambda i: 13500 + rng.gauss(0, 300),
        ring_ready=lambda i: rng.randrange(9),
        ring_slots=8,
    )


def found(history: History) -> dict[str, Finding]:
    return {f.name: f for f in run(history).findings}


def over(snapshots: tuple[Snapshot, ...], **more: Any) -> History:
    return History(snapshots[-1].t if snapshots else T0, snapshots, **more)


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_gives_no_finding(seed: int) -> None:
    snapshots = healthy(seed=seed)
    now = snapshots[-1].t
    disks = tuple(DiskSample(now - 60 * i, "/srv", 500 * GIB + i, 1000 * GIB) for i in range(30, -1, -1))
    report = run(History(now, snapshots, disks, ("usb 1-1: new device",), now - 1.0))
    assert (report.findings, report.skipped) == ((), ())


def test_a_source_that_failed_is_skipped_and_said() -> None:
    report = run(History(T0))
    assert {s.detector for s in report.skipped} >= {"disk_filling", "gpu", "watcher_blind", "nan_loss", "loss_spike"}
    assert all(s.reason for s in report.skipped)
    assert report.findings == ()
    assert "kernel log" in next(s.reason for s in report.skipped if s.detector == "gpu")


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number(loss: float) -> None:
    finding = found(over(looks(8, loss=lambda i: loss if i >= 6 else 2.0)))["nan_loss"]
    assert finding.severity == "alarm"
    assert "step 70" in finding.text
    assert finding.since == T0 + 60
    assert finding.numbers == {"last_good_step": 50}


def test_null_after_numbers_is_no_number_but_a_run_without_losses_is_fine() -> None:
    assert "nan_loss" in found(over(looks(8, loss=lambda i: None if i >= 6 else 2.0)))
    assert "nan_loss" not in found(over(looks(8, loss=lambda i: None if i >= 7 else 2.0)))
    assert "nan_loss" not in found(over(looks(8)))


def test_an_exploding_loss_and_a_single_outlier() -> None:
    steady = random.Random(1)
    noise = [steady.gauss(2, 0.1) for _ in range(60)]
    finding = found(over(looks(60, loss=lambda i: 9.0 if i >= 57 else noise[i])))["loss_spike"]
    assert finding.numbers["loss"] == 9.0
    assert finding.since == T0 + 570
    assert "loss_spike" not in found(over(looks(60, loss=lambda i: 9.0 if i == 58 else noise[i])))
    assert "loss_spike" not in found(over(looks(60, loss=lambda i: 2.2 if i >= 57 else 2.0)))


def test_throughput_against_the_runs_own_median() -> None:
    drop = looks(40, block_tok_s=lambda i: 6000.0 if i >= 33 else 10000.0)
    assert found(over(drop))["perf_degraded_silent"].numbers == {"recent": 6000.0, "median": 10000.0}
    assert "perf_degraded_silent" not in found(over(looks(40, block_tok_s=lambda i: 8000.0 if i >= 33 else 10000.0)))
    foreign = looks(40, rate=lambda i: 1.0 if i >= 33 else 2.0)
    assert "perf_degraded_silent" in found(over(foreign))


def test_the_straggler_is_named() -> None:
    workers = {f"drafter{n}": WorkerShares(wait=0.1, sync=0.4 if n != 1 else 0.02) for n in range(3)}
    workers |= {f"target{n}": WorkerShares(wait=0.5) for n in range(2)}
    report = run(over(looks(6, workers=workers)))
    assert [(f.name, f.worker) for f in report.findings] == [("straggler", "drafter1")]
    alone = {"drafter0": WorkerShares(wait=0.0), "target0": WorkerShares(wait=0.9)}
    assert "straggler" not in found(over(looks(6, workers=alone)))


@pytest.mark.parametrize(("ready", "name"), [(0, "ring_starved"), (8, "ring_full")])
def test_the_ring_for_long(ready: int, name: str) -> None:
    assert found(over(looks(40, ring_ready=lambda i: ready if i > 5 else 3, ring_slots=8)))[name].severity == "note"
    assert name not in found(over(looks(40, ring_ready=lambda i: ready if i > 25 else 3, ring_slots=8)))


def test_when_the_disk_will_be_full() -> None:
    now = T0 + 3000

    def samples(gib_a_minute: float, free: float = 100.0, jump: float = 0.0) -> tuple[DiskSample, ...]:
        return tuple(
            DiskSample(
                now - 60 * (20 - i), "/srv", int((free - gib_a_minute * i + (jump if i % 2 else 0)) * GIB), 1000 * GIB
            )
            for i in range(21)
        )

    def disk(given: tuple[DiskSample, ...]) -> Finding | None:
        return found(History(now, disks=given)).get("disk_filling")

    soon = disk(samples(2.0))
    assert soon is not None
    assert soon.severity == "alarm"
    assert soon.numbers["seconds_to_full"] == pytest.approx(60 / 2 * 60, rel=0.05)
    later = disk(samples(0.5))
    assert later is not None
    assert later.severity == "warn"
    assert disk(samples(0.0)) is None
    assert disk(samples(-1.0)) is None
    assert disk(samples(0.05, jump=40.0)) is None  # checkpoints that come and go
    full = disk(samples(0.0, free=0.5))
    assert full is not None
    assert full.severity == "alarm"


def test_xid_and_ecc_lines_of_the_kernel() -> None:
    lines = (
        "[ 812.1] NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "[ 812.2] NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "[ 813.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=41, MMU Fault",
        "[ 813.1] NVRM: Xid (PCI:0000:3b:00): 43, pid=41",
        "[ 814.0] NVRM: GPU 0000:86:00.0: uncorrectable ECC error, row remapping pending",
    )
    findings = run(History(T0, kernel=lines)).findings
    assert [(f.name, f.worker, f.severity) for f in findings] == [
        ("gpu_xid", "PCI:0000:18:00", "alarm"),
        ("gpu_xid", "PCI:0000:3b:00", "warn"),
        ("gpu_ecc", "0000:86:00.0", "warn"),
    ]
    assert findings[0].evidence == (lines[0],)


def test_a_supervisor_that_stopped_looking() -> None:
    assert found(History(T0, pass_t=T0 - 120))["watcher_blind"].severity == "alarm"
    assert found(History(T0, pass_t=T0 - 5)) == {}
    assert found(History(T0, pass_t=T0 - 120, every_s=60)) == {}


def test_a_hang_is_told_with_its_limit() -> None:
    hung = Snapshot("main", T0, State.HUNG, T0 - 9, "nothing for 309 s at step 7 (limit 300 s)", attempt=1)
    assert found(over((hung,)))["hung"].text == hung.detail


def test_each_detector_states_its_rule() -> None:
    import sys

    for detector in DETECTORS:
        doc = sys.modules[detector.__module__].__doc__ or ""
        assert "The rule" in doc, detector.__module__


def test_a_new_attempt_begins_without_the_old_ones_numbers() -> None:
    old = looks(60, loss=2.0, block_tok_s=10000.0)
    new = Snapshot("main", T0 + 700, State.STEPPING, T0 + 690, attempt=2, progress=Progress(T0 + 700, 1, loss=9.0))
    assert found(over((*old, new))) == {}
