"""The launcher: one thread, one loop. It owns signals, ring slots, the plan, the last average, the checkpoints.

    signals --.                         .--> target workers   (fill a slot)
    sockets ---+--> event --> Scheduler -+-> drafter workers  (train, average)
    ticks ----'              (pure)      +-> saver process    (a checkpoint, from the last average)
                                         '--> plan.jsonl, metrics.jsonl, progress lines

Workers never talk to each other but in the drafters' averaging. A target that dies is started anew and its batch given
again. When a drafter dies, all drafters start anew from the last average, and what was trained since is trained again;
targets and what they have filled stay. TERM or INT: what drafters have begun is trained, averaged and saved; a second
signal changes nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.actions import Average, Commit, Fill, Join, Phase, Save, Train
from trainer.averages import Averages
from trainer.board import Board
from trainer.channel import Message
from trainer.checkpoint import Store
from trainer.crew import Crew
from trainer.errors import FINISHED, STOPPED, ConfigError, TrainerError
from trainer.plan import learning_rate
from trainer.plan_record import PlanRecord
from trainer.prepare import Prepared
from trainer.progress import Meter, Output
from trainer.restarts import Restarts
from trainer.ring import create_ring
from trainer.saves import Saves
from trainer.saving import Saver
from trainer.scheduler import Scheduler
from trainer.several import Several
from trainer.signals import StopSignals
from trainer.workers import Worker

if TYPE_CHECKING:
    from trainer.nodes import Nodes

TICK_S = 0.2


def launch(
    prepared: Prepared,
    attempt: Path,
    checkpoints: Path,
    signals: StopSignals,
    nodes: Nodes | None = None,
    *,
    shared: bool = False,
) -> int:
    """Runs to the end.

    Args:
        prepared: what to run. attempt: folder of this attempt, made if missing. checkpoints: their folder.
        signals: TERM and INT, also those that came before. nodes: this node among several, which have met.
        shared: the checkpoints folder is that of node 0, which alone writes it.

    Returns:
        The exit code: 0 finished, 3 stopped.

    Raises:
        TrainerError: everything else; its `exit_code` is the launcher's.
    """
    try:
        attempt.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the attempt's folder cannot be made: {error}", str(attempt), "name a folder that can be written"
        ) from error
    keep = prepared.config.checkpoint
    store = Store(checkpoints, keep.keep_last, keep.keep_every, writes=not shared)
    try:
        ring = create_ring(prepared.layout, prepared.config.ring.dir)
        try:
            averages = Averages(prepared.state, prepared.config.ring.dir)
            try:
                return Launcher(prepared, attempt, store, ring, averages, signals, nodes).run()
            finally:
                averages.close()
        except OSError as error:
            raise TrainerError(
                f"the launcher lost a file or a socket: {error}",
                str(error.filename or attempt),
                "look at room and permissions there, then resume from the last checkpoint",
            ) from error
        finally:
            os.close(ring)
    finally:
        store.close()


class Launcher:
    """The state of one attempt. Use `launch`."""

    def __init__(
        self,
        prepared: Prepared,
        attempt: Path,
        store: Store,
        ring: int,
        averages: Averages,
        signals: StopSignals,
        nodes: Nodes | None = None,
    ) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.store = store
        self.averages = averages
        self.signals = signals
        self.output = Output()
        self.meter = Meter(self.output, attempt / "metrics.jsonl")
        self.record = PlanRecord(attempt)
        self.board = Board(attempt, self.output.line) if self.config.train.tensorboard else None
        if self.board is not None:
            self.meter.sinks.append(self.board.write)
        self.saver = Saver(store, averages, self.config.checkpoint.grace_s, attempt / "logs" / "saver.log")
        self.crew = Crew(
            self.config.workers,
            attempt,
            {"target": (ring,), "reader": (ring,), "drafter": (ring, averages.descriptor)},
            self.output,
            setup=self._setup,
            told=self._told,
            lost=self._target_lost,
            fallen=self._drafters_fell,
            readers=self.config.readers,
        )
        # With sync "step" a drafter waits in its batch for the others', which a target may still have to fill.
        self.crew.several = nodes is not None
        self.crew.patient = self.crew.several or self.config.train.sync == "step"
        self.scheduler = Scheduler(
            drafters=tuple(w.name for w in self.crew.drafters),
            slots=prepared.layout.slots,
            cursor=prepared.cursor,
            step=prepared.step,
            total=prepared.total,
            average_every=self.config.train.average_every,
            save_every=self.config.checkpoint.every,
            schedule=self.config.train.schedule,
            sync=self.config.train.sync,
            world=0 if nodes is None else nodes.world,
            first=0 if nodes is None else nodes.first,
            aligned=nodes is not None,
        )
        self.restarts = Restarts(self.config.workers.drafter_restarts)
        self.sums: dict[int, int] = {}
        self.written: dict[int, tuple[int | None, str]] = {}  # slot -> its checksum (ring.debug), and who filled it
        self.mismatched: set[int] = set()
        self.samples = 0
        self.committed = prepared.cursor
        self.committed_samples = 0
        self.committed_at = self.averaging_at = time.monotonic()
        self.fell_at: float | None = None
        self.saves = Saves(self.saver, store, self.record, self.scheduler, prepared, self.output)
        self.saves.took = self.meter.stages.saving
        self.lr = 0.0
        self.tcp_store: Any = None
        self.several: Several | None = None if nodes is None else Several(self, nodes)
        if nodes is not None:
            self.saves.nodes = nodes.ranks

    # ---- the loop

    def run(self) -> int:
        """Until the plan is done or a stop is; the exit code."""
        self._say_beginning()
        try:
            self._signalled()
            if self.several is not None:
                self.several.first()
            self._act()
            if self.scheduler.phase is not Phase.ENDED:
                self._serve()
            code = FINISHED if self.scheduler.cursor >= self.scheduler.total else STOPPED
            self.crew.dismiss()
        except TrainerError:
            if self.several is not None:
                self.several.save_what_is_held()
            self.saves.finish()
            try:
                self.record.close()
            except OSError as error:  # what the run ended with is told, and not that the disk is full as well
                self.output.line(f"the last lines of plan.jsonl are lost: {error.strerror}")
            raise
        finally:
            self.crew.close()
            self.saver.close()
            if self.board is not None:
                self.board.close()
            self.record.close()
        step = f"{self.scheduler.step}/{self.scheduler.total_steps}"
        self.output.event("finished" if code == FINISHED else "stopped", step=step)
        return code

    def _serve(self) -> None:
        self._new_rendezvous()
        self.crew.start_all()
        last_tick = 0.0
        others = {self.signals.reader: self._signalled, self.saver.reader: self.saves.look}
        if self.several is not None:
            others[self.several.reader] = self.several.look
        while self.scheduler.phase is not Phase.ENDED or (self.several is not None and self.several.meeting):
            self.crew.wait(TICK_S, others)
            if time.monotonic() - last_tick >= TICK_S:
                last_tick = time.monotonic()
                self.crew.tick()
                self.saves.look()
                if self.several is not None:
                    self.several.look()
            self._act()

    def _new_rendezvous(self) -> None:
        """A store for this life of the drafters; the one before, with whatever they left in it, goes."""
        self.tcp_store = None
        if self.several is None and len(self.scheduler.drafters) > 1:
            self.tcp_store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]

    def _say_beginning(self) -> None:
        p = self.prepared
        for note in p.notes:
            self.output.line(f"note: {note}")
        if p.index.bad_count:
            first = p.index.bad[0]
            self.output.event("bad_data", count=p.index.bad_count, line=first.number + 1, reason=first.reason)
            for bad in p.index.bad:
                self.output.line(f"bad data: {p.index.source}:{bad.number + 1}: {bad.reason}")
        epoch, _ = p.plan.place(p.cursor)
        if self.several is not None and self.several.joins_a_run:
            self.store.went_back(p.step)
            self.output.event("resumed", step=f"{p.step}/{self.scheduler.total_steps}", path="of_the_other_nodes")
        elif p.resume is not None:
            self.store.resumed_from(p.resume)
            self.output.event("resumed", step=f"{p.step}/{self.scheduler.total_steps}", path=p.resume.path)
        else:
            self.output.line(f"no checkpoint to resume from in {self.store.folder}: a fresh start")
        self.record.begin(seed=self.config.train.seed, step=p.step, epoch=epoch, batch=p.cursor, accepted=p.index.ids)

    def _signalled(self) -> None:
        for number in self.signals.read():
            if not self.scheduler.stopping:
                self.output.event("stop_requested", signal=number.name)
            if self.several is None:
                self.scheduler.stop()
            else:
                self.several.stop()

    # ---- workers

    def _setup(self, worker: Worker) -> Message:
        p = self.prepared
        # A target that starts anew has no part in this: its setup must not wipe an average for a state to receive.
        several = self.several if worker.role == "drafter" else None
        receives = several is not None and several.receives()
        return {
            "k": "setup",
            "rank": worker.rank,
            "device": worker.device,
            "config": self.config.to_dict(),
            "layout": p.layout.to_dict(),
            "drafter": p.drafter.to_hf(),
            "layer_ids": list(p.drafter.target_layer_ids),
            "data": {"path": p.index.path, "size": p.index.size, "mtime_ns": p.index.mtime_ns},
            "lengths_used": list(p.plan.lengths_used()),
            "state": p.state.to_dict(),
            "average": None if self.averages.current is None else self.averages.current.buffer,
            "resume": None if p.resume is None or receives else str(p.resume.path),
            "step": p.step,
            "group": None if several is None else several.group(worker),
            "store": None if self.tcp_store is None else self.tcp_store.port,
        }

    def _target_lost(self, worker: Worker) -> None:
        self.scheduler.target_died(worker.name)

    def _drafters_fell(self, cause: Worker) -> bool:
        """All drafters are dead. True if they start anew, from the last average.

        Raises:
            TrainerError: the cause, if they would only die again.
        """
        now = time.monotonic()
        if self.scheduler.phase is Phase.SAVING:
            return False  # all that was begun is in the last average, which is being saved
        why = cause.fault_text()
        # Of several nodes most drafters end because of another one, over and over in the same words.
        outside = self.several is not None or (cause.fault is None and cause.exit_code == -signal.SIGKILL)
        refusal = self.restarts.refusal(why, from_outside=outside)
        if refusal:
            error = self.crew.error_of(cause)
            raise type(error)(f"{error.what} ({refusal})", error.where, error.next)
        if self.several is not None:
            self.several.fell(f"{cause.name}: {why}")
            return False
        again = self.scheduler.drafters_died()
        step = self.scheduler.step
        self.record.rollback(step, why)
        self.samples = self.committed_samples
        self.meter.roll_back(step, self.crew.times)
        self._new_rendezvous()
        if self.fell_at is None:
            self.fell_at = min(now, cause.ended_at)
        self.output.event(
            "drafters_restart",
            cause=why,
            worker=cause.name,
            life=cause.life + 1,
            step=step,
            batches_again=again,
            lost_s=f"{max(0.0, self.fell_at - self.committed_at):.1f}",
        )
        return not self.scheduler.stopping

    # ---- what workers say

    def _told(self, worker: Worker, message: Message) -> None:
        kind = message["k"]
        if kind == "ask":
            self._idle(worker)
        elif kind == "filled":
            slot = int(message["slot"])
            self.scheduler.filled(worker.name, slot)
            self.written[slot] = (message["crc"], worker.name)
            self._took(worker, int(message["length"]), compute="forward", copy="copy_in")
            self._idle(worker)
        elif kind == "copied":
            self.scheduler.copied(worker.name, int(message["slot"]))
        elif kind == "trained":
            self._trained(worker, message)
        elif kind == "mismatch":
            self._mismatch(worker, int(message["slot"]))
        elif kind == "joined":
            self._idle(worker)
        elif kind == "received" and self.several is not None:
            self.several.received(message["sums"])
        elif kind == "averaged":
            self.sums |= {int(region): int(total) for region, total in message["sums"].items()}
            self.scheduler.averaged(worker.name)
            self._idle(worker)
        else:
            raise TrainerError(f"{worker.name} said {kind!r}", "worker channel", "report this as a fault")

    def _took(self, worker: Worker, length: int, **stages: str) -> None:
        """Counts what a batch took a worker; `stages`: the stage's name for each kind of its time."""
        seconds = {stage: worker.gained.get(kind, 0.0) for kind, stage in stages.items()}
        seconds["hop_out" if worker.role == "drafter" else "hop_in"] = worker.hop
        self.meter.stages.batch(worker.name, worker.life, length, **seconds)

    def _idle(self, worker: Worker) -> None:
        worker.idle()
        if worker.role != "drafter":
            self.scheduler.target_asks(worker.name)
        else:
            self.scheduler.drafter_asks(worker.name)

    def _trained(self, worker: Worker, message: Message) -> None:
        number = int(message["batch"])
        batch = self.prepared.plan.batch(number)
        self.scheduler.trained(worker.name, number)
        self.record.ack(batch, worker.name)
        self.samples += len(batch.sample_ids)
        self.meter.add(message["stats"], len(batch.sample_ids))
        self._took(worker, batch.length, compute="step", copy="copy_out", sync="sync")
        if self.fell_at is not None:
            self.output.event("drafters_back", life=worker.life, down_s=f"{time.monotonic() - self.fell_at:.1f}")
            self.fell_at = None
        self._idle(worker)
        if self.meter.due(self.scheduler.steps_done, self.config.train.log_every):
            self._report()

    def _mismatch(self, worker: Worker, slot: int) -> None:
        """ring.debug: the slot does not hold what was written there; its batch goes again, once."""
        writer = self.written[slot][1]
        batch = self.scheduler.refused(worker.name, slot)
        self.output.event("slot_mismatch", slot=slot, batch=batch, writer=writer, worker=worker.name)
        if batch in self.mismatched:
            raise TrainerError(
                f"slot {slot} did not hold what {writer} wrote there for batch {batch}, for the second time",
                f"{worker.name}, ring.dir = {self.config.ring.dir}",
                "something else writes to this memory, or it is faulty: look at the kernel's log, test the memory",
            )
        self.mismatched.add(batch)
        self._idle(worker)

    def _report(self) -> None:
        s = self.scheduler
        if self.several is not None:
            self.several.add_others()
        self.meter.record(
            step=s.steps_done,
            total=s.total_steps,
            epoch=self.prepared.plan.epochs_at(s.done),
            lr=self.lr,
            ring=(s.ready, s.slots),
            samples=self.samples,
            workers=self.crew.times(),
        )

    # ---- what to do

    def _act(self) -> None:
        for action in self.scheduler.decide():
            if isinstance(action, Fill):
                batch = self.prepared.plan.batch(action.batch)
                places = [self.prepared.index.place(i) for i in batch.sample_ids]
                message = {"k": "fill", "slot": action.slot, "batch": action.batch, "length": batch.length}
                self.crew.send(action.worker, {**message, "samples": places})
            elif isinstance(action, Train):
                self._train(action)
            elif isinstance(action, Join):
                self.crew.send(action.worker, {"k": "join", "lr": self._lr(action.batch)})
            elif isinstance(action, Average):
                self.sums.clear()
                self.averaging_at = time.monotonic()
                buffer = self.averages.begin(wipe=self.several is None)
                for name in self.scheduler.drafters:
                    self.crew.send(name, {"k": "average", "step": action.step, "buffer": buffer})
            elif isinstance(action, Commit):
                self._commit(action)
            else:
                self._save(action)

    def _train(self, action: Train) -> None:
        if self.meter.start(self.scheduler.steps_done, self.crew.times):
            self.crew.stepping = True
            self.output.stage("stepping", 1, 1, "drafters")
        batch = self.prepared.plan.batch(action.batch)
        self.lr = self._lr(action.batch)
        message = {
            "k": "train",
            "slot": action.slot,
            "batch": action.batch,
            "length": batch.length,
            "epoch": batch.epoch,
            "samples": list(batch.sample_ids),
            "lr": self.lr,
            "crc": self.written[action.slot][0],
        }
        self.crew.send(action.worker, message)

    def _lr(self, batch: int) -> float:
        """By batch number; all batches of one step have the same."""
        train = self.config.train
        return learning_rate(self.scheduler.step_of(batch)[0], self.scheduler.total, train.lr, train.warmup)

    def _commit(self, commit: Commit) -> None:
        self.meter.stages.averaging(self.crew.drafters[0].life, time.monotonic() - self.averaging_at)
        self.averages.keep(commit.step, commit.upto, [self.sums[i] for i in sorted(self.sums)])
        for epoch in self._epochs_over(commit.upto):
            self.record.epoch(epoch)
            self.output.event("epoch", epoch=epoch)
        self.record.commit(commit.step, commit.upto)
        if self.several is not None:
            self.several.committed(commit)
        self.committed, self.committed_samples, self.committed_at = commit.upto, self.samples, time.monotonic()
        self.restarts.progress()
        self.crew.progress()

    def _epochs_over(self, upto: int) -> Iterator[int]:
        before, _ = self.prepared.plan.place(self.committed)
        now, _ = self.prepared.plan.place(upto)
        yield from range(before, now)

    def _save(self, save: Save) -> None:
        if self.scheduler.phase is Phase.SAVING:  # the last one: nothing else is left to do
            self._report()
            self.output.stage("saving", 0, 1, f"step-{save.step}")
        self.saves.start(save)
