"""A drafter's place is taken by a process that has loaded its code before; a step's silence has a limit of its own."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pipeline_support import Run, children_of, worker_pid, write_samples  # type: ignore[import-not-found]

from trainer import workers
from trainer.channel import Peer
from trainer.config import WorkersConfig
from trainer.crew import Crew
from trainer.errors import TrainerError, write_error_file
from trainer.plan_record import audit
from trainer.progress import Output
from trainer.workers import Worker


def spares(run: Run) -> list[int]:
    """Pids of the spares that wait."""
    everybody = children_of(run.running[-1].pid, spares=True)
    working = {pid for pid, _ in children_of(run.running[-1].pid)}
    return [pid for pid, line in everybody if line.endswith(" spare ") and pid not in working]


@pytest.mark.timeout(300)
def test_a_spare_takes_over_and_gets_a_successor_and_one_that_is_lost_is_replaced(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run(data=write_samples(tmp_path / "data.jsonl", 60), **{"train.epochs": 1000})
    launcher = run.start()
    (first,) = run.until(lambda: spares(run))
    os.kill(first, signal.SIGKILL)
    run.until(lambda: "event=spare_exit worker=drafter0 life=1 exitcode=-9" in run.log)
    (second,) = run.until(lambda: spares(run))
    assert "event=worker_" not in run.log, run.log

    os.kill(worker_pid(run, "drafter0"), signal.SIGKILL)
    run.until(lambda: "event=drafters_back life=1 " in run.log)
    assert worker_pid(run, "drafter0") == second
    (third,) = run.until(lambda: spares(run))
    pids = [*run.workers(), third]
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 3, run.log
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    result = audit(run.root / "attempts")
    assert result.ok and not result.provisional, result


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    return now


def test_the_limit_of_silence_is_learned_from_what_was_finished(clock: list[float]) -> None:
    config = WorkersConfig(timeout_s=600.0, step_timeout_s=20.0)
    worker, peer = (Worker(f"drafter{rank}", "drafter", rank, "cpu") for rank in (0, 1))

    def did(seconds: float, kind: str = "compute", *, compiles: bool = False) -> None:
        worker.busy(kind)
        worker.compiles = compiles
        clock[0] += seconds
        worker.idle()

    assert worker.limit_s(config, [worker, peer]) == 600.0  # it loads
    worker.busy()
    assert worker.limit_s(config, [worker, peer]) == 600.0  # its first batch
    clock[0] += 90.0
    worker.idle()
    worker.busy()
    assert worker.limit_s(config, [worker, peer]) == 180.0  # twice the first one: nothing else is known of this machine
    worker.compiles = True
    assert worker.limit_s(config, [worker, peer]) == 600.0
    clock[0] += 90.0
    worker.idle()
    did(1.0)
    assert worker.limit_s(config, [worker, peer]) == 20.0  # the first one took long, and says nothing of the others
    did(5.0)
    assert worker.limit_s(config, [worker, peer]) == 30.0  # 10 x the mean
    did(294.0)
    assert worker.limit_s(config, [worker, peer]) == 600.0  # never more than the other one
    worker.busy("sync")
    assert worker.limit_s(config, [worker, peer]) == 600.0  # the first averaging
    worker.idle()

    peer.pieces = {"compute": (7, 10.0)}
    worker.take_over(Worker("drafter0", "drafter", 0, "cpu", 1))
    worker.busy()
    assert worker.limit_s(config, [worker, peer]) == 600.0  # it loads again
    worker.idle()
    did(40.0)  # held up by something else: of one piece nothing is learned
    assert worker.limit_s(config, [worker, peer]) == 10 * (1.0 + 5.0 + 294.0 + 40.0 + 10.0) / 11


@pytest.fixture
def crew(tmp_path: Path, clock: list[float]) -> Iterator[Crew]:
    """One drafter that was never started, and has finished three batches of a second each."""
    config = WorkersConfig(target_devices=(), timeout_s=600.0, step_timeout_s=20.0, spare_drafters=False)
    made = Crew(config, tmp_path, {}, Output(), setup=lambda _: {}, told=lambda *_: None, lost=lambda _: None)
    worker = made["drafter0"]
    for _ in range(3):
        worker.busy()
        clock[0] += 1.0
        worker.idle()
    made.tick()
    yield made
    made.close()


def passes(crew: Crew, clock: list[float], seconds: int) -> None:
    """Time, in which the launcher looks after its workers."""
    for _ in range(seconds):
        clock[0] += 1.0
        crew.tick()


def test_a_later_shape_that_compiles_is_given_the_time_of_loading(crew: Crew, clock: list[float]) -> None:
    worker = crew["drafter0"]
    ours, its = socket.socketpair()
    worker.peer = Peer(ours)
    crew.selector.register(ours, selectors.EVENT_READ, worker)
    crew.send("drafter0", {"k": "train"})
    its.sendall(json.dumps({"k": "stage", "stage": "compiling", "done": 1, "of": 2}).encode() + b"\n")
    crew.wait(5.0, {})
    passes(crew, clock, 300)
    assert worker.fault is None
    worker.idle()
    crew.send("drafter0", {"k": "train"})
    passes(crew, clock, 30)  # the next one does not compile
    assert worker.fault == {"what": "drafter0 said nothing for 20 s"}
    its.close()


def test_time_in_which_the_launcher_stood_still_is_nobodys_silence(crew: Crew, clock: list[float]) -> None:
    crew.send("drafter0", {"k": "train"})
    passes(crew, clock, 10)
    clock[0] += 300.0  # the whole container was frozen
    passes(crew, clock, 8)
    assert crew["drafter0"].fault is None
    passes(crew, clock, 8)
    assert crew["drafter0"].fault is not None


def test_drafters_that_wait_for_others_within_a_batch_have_the_long_limit(crew: Crew, clock: list[float]) -> None:
    crew.patient = True
    crew.send("drafter0", {"k": "train"})
    passes(crew, clock, 300)
    assert crew["drafter0"].fault is None


def test_a_spare_that_can_no_longer_be_told_anything_does_not_take_over(crew: Crew, tmp_path: Path) -> None:
    spare = Worker("drafter0", "drafter", 0, "cpu", 1)
    spare.start(tmp_path, crew._address, 1, spare=True)
    crew._spares["drafter0"] = spare
    for _ in range(600):
        crew.wait(0.1, {})
        if spare.greeted:
            break
    write_error_file(spare.error_file(tmp_path), TrainerError("it could not be imported"))
    crew._lost(spare)
    crew.tick()
    assert spare.poll() == -signal.SIGKILL
    assert not crew._spares
    assert not spare.error_file(tmp_path).exists()  # nobody takes it for the run's first cause
