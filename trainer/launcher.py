"""The launcher: one thread, one loop. It owns signals, the ring's slots, the plan and the checkpoints folder.

    signals --.                         .--> target workers   (fill a slot)
    sockets ---+--> event --> Scheduler -+-> drafter workers  (train, average, save)
    ticks ----'              (pure)      '--> plan.jsonl, metrics.jsonl, progress lines

Workers never talk to each other but in the drafters' averaging. A target that dies is started anew and its batch given
again; a drafter that dies ends the run, which resumes from the last checkpoint. TERM or INT: what drafters have begun
is trained, averaged and saved; a second signal changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer import channel
from trainer.channel import Message, Peer
from trainer.checkpoint import Store
from trainer.errors import BY_EXIT_CODE, FINISHED, STOPPED, TrainerError, write_error_file
from trainer.plan import learning_rate
from trainer.plan_record import PlanRecord
from trainer.prepare import Prepared
from trainer.progress import Meter, Output, WorkerTimes
from trainer.ring import create_ring
from trainer.scheduler import Average, Commit, Fill, Phase, Scheduler, Train
from trainer.workers import GRACE_S, Worker

TICK_S = 0.2
#: Seconds in which other deaths are gathered when a drafter died, so that the first cause is told and not a cascade.
CASCADE_S = 2.0


def launch(prepared: Prepared, attempt: Path, checkpoints: Path) -> int:
    """Runs to the end.

    Args:
        prepared: what to run. attempt: folder of this attempt, made if missing. checkpoints: their folder.

    Returns:
        The exit code: 0 finished, 3 stopped.

    Raises:
        TrainerError: everything else; its `exit_code` is the launcher's.
    """
    attempt.mkdir(parents=True, exist_ok=True)
    store = Store(checkpoints, prepared.config.checkpoint.keep_last)
    try:
        ring = create_ring(prepared.layout, prepared.config.ring.dir)
        try:
            with _Signals() as signals:
                return Launcher(prepared, attempt, store, ring, signals).run()
        finally:
            os.close(ring)
    finally:
        store.close()


class _Signals:
    """TERM and INT as bytes on a socket, so that the loop meets them where it waits."""

    def __enter__(self) -> _Signals:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()

    def read(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            return [n for n in self.reader.recv(64) if n in (signal.SIGTERM, signal.SIGINT)]
        return []


class Launcher:
    """The state of one attempt. Use `launch`."""

    def __init__(self, prepared: Prepared, attempt: Path, store: Store, ring: int, signals: _Signals) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.attempt = attempt
        self.store = store
        self.ring = ring
        self.signals = signals
        workers = self.config.workers
        self.workers: dict[str, Worker] = {}
        for role, devices in (("target", workers.target_devices), ("drafter", workers.drafter_devices)):
            for rank, device in enumerate(devices):
                self.workers[f"{role}{rank}"] = Worker(f"{role}{rank}", role, rank, device)
        self.scheduler = Scheduler(
            drafters=tuple(w.name for w in self.workers.values() if w.role == "drafter"),
            slots=prepared.layout.slots,
            cursor=prepared.cursor,
            step=prepared.step,
            total=prepared.total,
            average_every=self.config.train.average_every,
            save_every=self.config.checkpoint.every,
            schedule=self.config.train.schedule,
        )
        self.output = Output()
        self.meter = Meter(self.output, attempt / "metrics.jsonl")
        self.record = PlanRecord(attempt)
        self.selector = selectors.DefaultSelector()
        self.samples = 0
        self.committed = prepared.cursor
        self.lr = 0.0
        self.saving: tuple[Path, Commit] | None = None
        self.first_fault: tuple[float, Worker] | None = None
        self.tcp_store: Any = None

    # ---- the loop

    def run(self) -> int:
        self._say_beginning()
        server, self.address = channel.listen()
        self.selector.register(server, selectors.EVENT_READ, "server")
        self.selector.register(self.signals.reader, selectors.EVENT_READ, "signals")
        try:
            if self.scheduler.cursor < self.scheduler.total:
                self._start_all()
                self._serve(server)
            code = STOPPED if self.scheduler.stopping and self.scheduler.cursor < self.scheduler.total else FINISHED
            self._dismiss()
        finally:
            self._end_all()
            server.close()
            self.selector.close()
            self.record.close()
        step = f"{self.scheduler.step}/{self.scheduler.total_steps}"
        self.output.event("finished" if code == FINISHED else "stopped", step=step)
        return code

    def _serve(self, server: socket.socket) -> None:
        last_tick = 0.0
        while self.scheduler.phase is not Phase.ENDED:
            for key, events in self.selector.select(TICK_S):
                if key.data == "server":
                    self._admit(server)
                elif key.data == "signals":
                    self._signalled(self.signals.read())
                else:
                    self._hear(key.data, events)
            if time.monotonic() - last_tick >= TICK_S:
                last_tick = time.monotonic()
                self._tick()
            self._act()

    def _say_beginning(self) -> None:
        p = self.prepared
        for note in p.notes:
            self.output.line(f"note: {note}")
        if p.index.bad_count:
            first = p.index.bad[0]
            self.output.event("bad_data", count=p.index.bad_count, line=first.number + 1, reason=first.reason)
            for bad in p.index.bad:
                self.output.line(f"bad data: {p.index.path}:{bad.number + 1}: {bad.reason}")
        epoch, _ = p.plan.place(p.cursor)
        if p.resume is not None:
            self.store.resumed_from(p.resume)
            self.output.event("resumed", step=f"{p.step}/{p.total_steps}", path=p.resume.path)
        else:
            self.output.line(f"no checkpoint to resume from in {self.store.folder}: a fresh start")
        self.record.begin(seed=self.config.train.seed, step=p.step, epoch=epoch, batch=p.cursor, accepted=p.index.ids)

    # ---- workers

    def _start_all(self) -> None:
        if len(self.scheduler.drafters) > 1:
            self.tcp_store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.output.stage("loading", 0, len(self.workers), "workers")
        for worker in self.workers.values():
            worker.start(self.attempt, self.address, self.config.workers.threads)

    def _setup(self, worker: Worker) -> Message:
        p = self.prepared
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
            "resume": None if p.resume is None else str(p.resume.path),
            "step": p.step,
            "store": None if self.tcp_store is None else self.tcp_store.port,
        }

    def _admit(self, server: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = server.accept()
            pid = channel.peer_pid(connection)
            worker = next((w for w in self.workers.values() if w.pid == pid and w.peer is None), None)
            if worker is None:  # abstract names can be reached by anybody on this machine
                connection.close()
                return
            worker.peer = Peer(connection)
            self.selector.register(connection, selectors.EVENT_READ, worker)

    def _hear(self, worker: Worker, events: int) -> None:
        peer = worker.peer
        if peer is None:
            return
        if events & selectors.EVENT_WRITE:
            peer.flush()
        if events & selectors.EVENT_READ:
            for message in peer.receive():
                self._told(worker, message)
        self._watch_writes(worker)
        if peer.closed:
            self._lost(worker)

    def _watch_writes(self, worker: Worker) -> None:
        peer = worker.peer
        if peer is not None and not peer.closed:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.pending else 0)
            if self.selector.get_key(peer.socket).events != wanted:
                self.selector.modify(peer.socket, wanted, worker)

    def _send(self, worker: Worker, message: Message) -> None:
        worker.busy()
        if worker.peer is not None:
            worker.peer.send(message)
            self._watch_writes(worker)

    def _lost(self, worker: Worker) -> None:
        """End-of-file: it is dead or dying. Its exit code comes with a later tick."""
        if worker.peer is not None:
            self.selector.unregister(worker.peer.socket)
            worker.disconnect()
        if worker.lost_at is None:
            worker.lost_at = time.monotonic()
            if worker.role == "target":
                self.scheduler.target_died(worker.name)

    def _tick(self) -> None:
        now = time.monotonic()
        for worker in self.workers.values():
            self._tee(worker)
            code = worker.poll()
            silent = worker.busy_since is not None and now - worker.busy_since > self.config.workers.timeout_s
            if code is None and worker.lost_at is not None and now - worker.lost_at > GRACE_S:
                code = worker.kill()
            elif code is None and silent:
                worker.fault = {"what": f"{worker.name} said nothing for {self.config.workers.timeout_s:g} s"}
                code = worker.kill()
            if code is not None:
                if worker.peer is not None:  # what it said last may still wait in the socket
                    self._hear(worker, selectors.EVENT_READ)
                self._lost(worker)
                self._exited(worker, code)
        if self.first_fault is not None and now - self.first_fault[0] > CASCADE_S:
            raise self._fault_of(self.first_fault[1])

    def _exited(self, worker: Worker, code: int) -> None:
        if worker.exit_code is not None:
            return
        worker.exit_code = code
        self._tee(worker, rest=True)
        self.output.event("worker_exit", worker=worker.name, life=worker.life, exitcode=code)
        error_file = worker.error_file(self.attempt)
        if not error_file.exists():  # killed from outside: nobody else will say it
            write_error_file(error_file, TrainerError(worker.fault_text()))
        fatal = worker.fault is not None and worker.fault.get("known") and worker.fault.get("code") in BY_EXIT_CODE
        if worker.role == "target" and not fatal and worker.life < self.config.workers.restarts:
            worker.life += 1
            worker.start(self.attempt, self.address, self.config.workers.threads)
            self.output.event("worker_start", worker=worker.name, life=worker.life)
        elif self.first_fault is None:
            self.first_fault = (time.monotonic() if worker.role == "drafter" else 0.0, worker)

    def _fault_of(self, worker: Worker) -> TrainerError:
        fault = worker.fault or {}
        cls = BY_EXIT_CODE.get(fault.get("code", 1), TrainerError) if fault.get("known") else TrainerError
        where = fault.get("where") or f"{worker.name}, {worker.log_file(self.attempt)}"
        return cls(worker.fault_text(), where, fault.get("next") or "read its log and error.json")

    def _tee(self, worker: Worker, *, rest: bool = False) -> None:
        for line in worker.new_output(rest=rest):
            self.output.line(f"[{worker.name}] {line}")

    # ---- what workers say

    def _told(self, worker: Worker, message: Message) -> None:
        kind = message["k"]
        if "seconds" in message:
            worker.heard(message["seconds"])
        if kind == "hello":
            assert worker.peer is not None
            worker.peer.send_with_descriptor(self._setup(worker), self.ring)
        elif kind == "ready":
            worker.ready = True
            done = sum(w.ready for w in self.workers.values())
            self.output.stage("loading", done, len(self.workers), worker.name)
        elif kind == "ask":
            self._idle(worker)
        elif kind == "filled":
            self.scheduler.filled(worker.name, int(message["slot"]))
            self._idle(worker)
        elif kind == "copied":
            self.scheduler.copied(worker.name, int(message["slot"]))
        elif kind == "trained":
            self._trained(worker, message)
        elif kind == "averaged":
            self.scheduler.averaged(worker.name)
            self._idle(worker)
        elif kind == "saved":
            self._saved(message)
        elif kind == "stage":
            self.output.stage(message["stage"], int(message["done"]), int(message["of"]), worker.name)
        elif kind == "error":
            worker.fault = message
        else:
            raise TrainerError(f"{worker.name} said {kind!r}", "worker channel", "report this as a fault")

    def _idle(self, worker: Worker) -> None:
        worker.idle()
        if worker.role == "target":
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
        self._idle(worker)
        if self.meter.due(self.scheduler.steps_done, self.config.train.log_every):
            self._report()

    def _report(self) -> None:
        s = self.scheduler
        self.meter.record(
            step=s.steps_done,
            total=s.total_steps,
            epoch=self.prepared.plan.epochs_at(s.done),
            lr=self.lr,
            ring=(s.ready, s.slots),
            samples=self.samples,
            workers=[WorkerTimes(w.name, w.life, w.times()) for w in self.workers.values()],
        )

    # ---- what to do

    def _act(self) -> None:
        for action in self.scheduler.decide():
            if isinstance(action, Fill):
                batch = self.prepared.plan.batch(action.batch)
                places = [self.prepared.index.place(i) for i in batch.sample_ids]
                message = {"k": "fill", "slot": action.slot, "batch": action.batch, "length": batch.length}
                self._send(self.workers[action.worker], {**message, "samples": places})
            elif isinstance(action, Train):
                self._train(action)
            elif isinstance(action, Average):
                for name in self.scheduler.drafters:
                    self._send(self.workers[name], {"k": "average", "step": action.step})
            else:
                self._commit(action)

    def _train(self, action: Train) -> None:
        if self.meter.start(self.scheduler.steps_done):
            self.output.stage("stepping", 1, 1, "drafters")
        batch = self.prepared.plan.batch(action.batch)
        train = self.config.train
        self.lr = learning_rate(action.batch, self.scheduler.total, train.lr, train.warmup)
        message = {
            "k": "train",
            "slot": action.slot,
            "batch": action.batch,
            "length": batch.length,
            "epoch": batch.epoch,
            "samples": list(batch.sample_ids),
            "lr": self.lr,
        }
        self._send(self.workers[action.worker], message)

    def _commit(self, commit: Commit) -> None:
        for epoch in self._epochs_over(commit.upto):
            self.record.epoch(epoch)
            self.output.event("epoch", epoch=epoch)
        self.committed = commit.upto
        if not commit.save:
            self.record.commit(commit.step, None)
            return
        if commit.upto >= self.scheduler.total or self.scheduler.stopping:
            self._report()
        self.output.stage("saving", 0, 1, f"step-{commit.step}")
        folder = self.store.begin(commit.step)
        self.saving = (folder, commit)
        self._send(self.workers[self.scheduler.drafters[0]], {"k": "save", "folder": str(folder)})

    def _epochs_over(self, upto: int) -> Iterator[int]:
        before, _ = self.prepared.plan.place(self.committed)
        now, _ = self.prepared.plan.place(upto)
        yield from range(before, now)

    def _saved(self, message: Message) -> None:
        assert self.saving is not None
        folder, commit = self.saving
        path = self.store.complete(folder, message["files"], self._state(commit))
        # The record first: a commit whose checkpoint never got its name is skipped by the replay, the other way
        # round a resume would find weights that no line explains.
        self.record.commit(commit.step, path)
        self.store.publish(folder, path)
        self.saving = None
        self.output.event("checkpoint", step=commit.step, path=path)
        self.workers[self.scheduler.drafters[0]].idle()
        self.scheduler.saved()

    def _state(self, commit: Commit) -> dict[str, Any]:
        p, config = self.prepared, self.config
        return {
            "step": commit.step,
            "batches": commit.upto,
            "total_batches": self.scheduler.total,
            "t": round(time.time(), 3),
            "plan": {
                "seed": config.train.seed,
                "batch_size": config.data.batch_size,
                "buckets": list(config.buckets),
                "base": p.plan.base.to_dict(),
            },
            "data": {"path": p.index.path, "sha256": p.index.sha256, "samples": len(p.index.ids)},
            "drafter": p.drafter.to_hf(),
            "drafters": len(self.scheduler.drafters),
            "threads": config.workers.threads,
            "torch": torch.__version__,
            "config": config.to_dict(),
        }

    # ---- the end

    def _signalled(self, numbers: list[int]) -> None:
        for number in numbers:
            if not self.scheduler.stopping:
                self.output.event("stop_requested", signal=signal.Signals(number).name)
            self.scheduler.stop()

    def _dismiss(self) -> None:
        """Tells every worker to end, and waits a while for it."""
        for worker in self.workers.values():
            self._send(worker, {"k": "exit"})
        deadline = time.monotonic() + GRACE_S
        for worker in self.workers.values():
            worker.wait(deadline)

    def _end_all(self) -> None:
        """No worker outlives the launcher: kills what is left."""
        for worker in self.workers.values():
            worker.kill()
            self._tee(worker, rest=True)
            worker.disconnect()
