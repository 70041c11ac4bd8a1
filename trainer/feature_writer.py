"""Writes a target's features to disk: the pipeline's own target workers and ring, with this process at the far end.

    targets --ring--> threads (pwrite, CRC-32) --> .shard-N.partial --all in--> fsync, sha256, rename --> features.json

A target that dies comes back and its batch is given again, as in training. A kill -9 costs the shards that were open;
the next call goes on with them. A batch's place in its shard is known beforehand, so threads write side by side.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.channel import Message
from trainer.checkpoint import sha256, sync
from trainer.crew import Crew
from trainer.errors import FINISHED, STOPPED, ConfigError, DataError, TrainerError
from trainer.features import (
    Identity,
    Manifest,
    Shard,
    ShardPlan,
    divide,
    identity_of,
    read_manifest,
    shard_bytes,
    shard_header,
    sweep,
)
from trainer.plan import PlannedBatch
from trainer.prepare import Prepared
from trainer.progress import Output
from trainer.ring import ITEM_BYTES, Ring, bytes_of, create_ring, room
from trainer.signals import StopSignals
from trainer.workers import Worker

TICK_S = 0.2
THREADS = 4
#: Kept free beside the features: a full file system stops others too.
SPARE_BYTES = 64 << 20
#: What `progress` is told before a target is ready.
LOADING = "loading targets"
_WORK = ".work"

Progress = Callable[[int, int, str], None]


@dataclass
class OpenShard:
    """A shard that is being written. `places`: sample -> byte offset and tokens. `left`: batches still to come."""

    plan: ShardPlan
    descriptor: int
    beside: Path
    places: dict[int, tuple[int, int]]
    checksums: dict[int, int] = field(default_factory=dict)
    left: int = 0


def write_features(prepared: Prepared, out: Path, shard_limit: int, signals: StopSignals, progress: Progress) -> int:
    """Writes what is missing.

    Args:
        prepared: a run from its beginning, with at least one target device. out: the folder, made if missing.
        shard_limit: bytes of a shard. signals: TERM and INT. progress: called with (tokens done, in all, a few words).

    Returns:
        0 all is there, 3 stopped.

    Raises:
        ConfigError: no room, or another command writes here. DataError: other features lie there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"the folder cannot be used: {error}", str(out), "name one that can be written") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("another command writes features here", str(out), "wait for it, or stop it") from None
        return _write(prepared, out, shard_limit, signals, progress)
    finally:
        os.close(lock)


def _write(prepared: Prepared, out: Path, shard_limit: int, signals: StopSignals, progress: Progress) -> int:
    config, index = prepared.config, prepared.index
    identity = identity_of(prepared.target, prepared.drafter, index, config)
    division = {
        "seed": config.train.seed,
        "batch_size": config.data.batch_size,
        "buckets": list(config.buckets),
        "shard_bytes": shard_limit,
    }
    manifest = _begun(out, identity, division)
    if manifest.complete and not _lost(out, manifest):
        return FINISHED
    whole = [s for s in manifest.shards if s not in _lost(out, manifest)]
    manifest = replace(manifest, shards=tuple(whole), complete=False)
    lengths = dict(zip(index.ids, index.lengths, strict=True))
    plans = divide(prepared.plan, lengths, identity.width * ITEM_BYTES[identity.dtype], shard_limit)
    have = {s.name for s in whole}
    missing = [p for p in plans if p.name not in have]
    sweep(out, whole)
    needed = sum(shard_bytes(p, identity.width, identity.dtype) for p in missing)
    free = room(out)
    if needed + SPARE_BYTES > free:
        raise ConfigError(
            f"there is no room: {needed} bytes are needed and {SPARE_BYTES} to spare, {free} are free",
            str(out),
            "free some room, name another folder, or cut the data (data.max_length, fewer samples)",
        )
    manifest.save(out)
    ring = create_ring(prepared.layout, config.ring.dir)
    try:
        writer = _Writer(prepared, out, manifest, missing, ring, signals, progress)
        try:
            code = writer.run()
        except OSError as error:
            raise _unwritable(error, out) from error
    finally:
        os.close(ring)
    if code == FINISHED:
        shutil.rmtree(out / _WORK, ignore_errors=True)
    return code


def _begun(out: Path, identity: Identity, division: dict[str, object]) -> Manifest:
    found = read_manifest(out)
    if found is None:
        others = [p.name for p in out.iterdir() if p.name not in (".lock", _WORK)]
        if others:
            raise ConfigError(
                f"the folder holds other things, first {min(others)}", str(out), "name an empty or a new folder"
            )
        return Manifest(identity, division, False)
    differ = found.identity.differences(identity)
    if not found.complete or _lost(out, found):
        differ += [f"{k} {found.division.get(k)}, now {v}" for k, v in division.items() if found.division.get(k) != v]
    if differ:
        raise DataError(
            f"features of something else lie there: {'; '.join(differ)}", str(out), "name another folder for these"
        )
    return found


def _lost(out: Path, manifest: Manifest) -> list[Shard]:
    """Shards of the manifest that are gone or cut."""

    def size(shard: Shard) -> int:
        try:
            return (out / shard.name).stat().st_size
        except FileNotFoundError:
            return -1

    return [s for s in manifest.shards if size(s) != s.bytes]


def verify_features(out: Path, progress: Callable[[int, int, str], None]) -> Manifest:
    """Reads every shard and compares it with the hash in the manifest.

    Raises:
        DataError: names every shard that is not what was written.
    """
    manifest = read_manifest(out)
    if manifest is None:
        raise DataError("there are no features", str(out), "write them first")
    wrong = []
    for number, shard in enumerate(manifest.shards):
        file = out / shard.name
        if not file.is_file() or file.stat().st_size != shard.bytes or sha256(file) != shard.sha256:
            wrong.append(shard.name)
        progress(number + 1, len(manifest.shards), "")
    if wrong:
        raise DataError(
            f"damaged or gone: {', '.join(wrong)}",
            str(out),
            "remove these files and write the features again: only they are computed anew",
        )
    return manifest


def _unwritable(error: OSError, out: Path) -> TrainerError:
    fix = "free some room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "look at room and permissions there"
    return TrainerError(
        f"the features cannot be written: {error.strerror or error}",
        str(error.filename or out),
        f"{fix}, and call it again: whole shards stay",
    )


class _Writer:
    """One call's work, until all shards are whole or a signal came."""

    def __init__(
        self,
        prepared: Prepared,
        out: Path,
        manifest: Manifest,
        missing: list[ShardPlan],
        ring: int,
        signals: StopSignals,
        progress: Progress,
    ) -> None:
        self.prepared, self.out, self.manifest = prepared, out, manifest
        self.signals, self.progress = signals, progress
        self.ring = Ring(ring, prepared.layout, pin=False)
        self.shard_of = {batch: plan for plan in missing for batch in range(plan.first, plan.end)}
        self.todo = deque(sorted(self.shard_of))
        self.open: dict[int, OpenShard] = {}
        self.unfinished = len(missing)
        self.free = deque(range(prepared.layout.slots))
        self.asking: deque[str] = deque()
        self.given: dict[str, tuple[int, int]] = {}  # worker -> (slot, batch)
        self.running: dict[Future[object], Callable[[object], None]] = {}
        self.stopping = False
        lengths = dict(zip(prepared.index.ids, prepared.index.lengths, strict=True))
        self.total = sum(lengths.values())
        self.done = self.total - sum(sum(plan.lengths) for plan in missing)
        self.woken, self._wake = socket.socketpair()
        self.woken.setblocking(False)
        self._wake.setblocking(False)
        workers = replace(prepared.config.workers, drafter_devices=())
        self.crew = Crew(
            workers,
            out / _WORK,
            {"target": (ring,)},
            Output(),
            setup=self._setup,
            told=self._told,
            lost=self._target_lost,
        )

    def run(self) -> int:
        shutil.rmtree(self.out / _WORK, ignore_errors=True)
        (self.out / _WORK).mkdir()
        pool = ThreadPoolExecutor(THREADS, "features")
        try:
            self.pool = pool
            self.crew.start_all()
            self._show()
            last = 0.0
            while self.unfinished and not (self.stopping and not self.running):
                self.crew.wait(TICK_S, {self.signals.reader: self._signalled, self.woken: self._collect})
                self._collect()
                if time.monotonic() - last >= TICK_S:
                    last = time.monotonic()
                    self.crew.tick()
                    self._show()
                self._give()
            self._show()
            self.crew.dismiss()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self.crew.close()
            for shard in self.open.values():
                with contextlib.suppress(OSError):
                    os.close(shard.descriptor)
                    shard.beside.unlink()
            self.woken.close()
            self._wake.close()
        return STOPPED if self.unfinished else FINISHED

    def _show(self) -> None:
        ready = any(w.ready for w in self.crew.workers.values())
        loading = f"{LOADING} ({self.crew.weights})" if self.crew.weights else LOADING
        self.progress(self.done, self.total, f"{len(self.manifest.shards)} shards" if ready else loading)

    def _signalled(self) -> None:
        self.stopping = self.stopping or bool(self.signals.read())

    # ---- workers

    def _setup(self, worker: Worker) -> Message:
        p = self.prepared
        return {
            "k": "setup",
            "rank": worker.rank,
            "device": worker.device,
            "config": p.config.to_dict(),
            "layout": p.layout.to_dict(),
            "layer_ids": list(p.drafter.target_layer_ids),
            "data": {"path": p.index.path, "size": p.index.size, "mtime_ns": p.index.mtime_ns},
        }

    def _told(self, worker: Worker, message: Message) -> None:
        if message["k"] == "filled":
            slot, number = self.given.pop(worker.name)
            batch, shard = self.prepared.plan.batch(number), self.open[self.shard_of[number].number]
            self._submit(lambda: self._store(slot, batch, shard), lambda _: self._stored(slot, batch, shard))
        elif message["k"] != "ask":
            raise TrainerError(f"{worker.name} said {message['k']!r}", "worker channel", "report this as a fault")
        worker.idle()
        if worker.name not in self.asking:
            self.asking.append(worker.name)

    def _target_lost(self, worker: Worker) -> None:
        if worker.name in self.asking:
            self.asking.remove(worker.name)
        if worker.name in self.given:
            slot, batch = self.given.pop(worker.name)
            self.free.append(slot)
            self.todo.appendleft(batch)

    def _give(self) -> None:
        while self.asking and self.free and self.todo and not self.stopping:
            worker, slot, number = self.asking.popleft(), self.free.popleft(), self.todo.popleft()
            self._begin(self.shard_of[number])
            batch = self.prepared.plan.batch(number)
            self.given[worker] = (slot, number)
            places = [self.prepared.index.place(i) for i in batch.sample_ids]
            message = {"k": "fill", "slot": slot, "batch": number, "length": batch.length, "samples": places}
            self.crew.send(worker, message)

    # ---- shards (this thread opens and closes them, the pool writes)

    def _begin(self, plan: ShardPlan) -> None:
        if plan.number in self.open:
            return
        identity = self.manifest.identity
        header = shard_header(plan, identity.width, identity.dtype)
        beside = self.out / f".{plan.name}.partial"
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        places: dict[int, tuple[int, int]] = {}
        at = len(header)
        for sample, length in zip(plan.ids, plan.lengths, strict=True):
            places[sample] = (at, length)
            at += length * identity.width * ITEM_BYTES[identity.dtype]
        self.open[plan.number] = OpenShard(plan, descriptor, beside, places, left=plan.end - plan.first)
        os.posix_fallocate(descriptor, 0, at)

    def _store(self, slot: int, batch: PlannedBatch, shard: OpenShard) -> None:
        """In a thread: a batch's rows, from the ring to their places. Neither copy nor sum holds the interpreter."""
        features = self.ring.slot(slot, batch.length).features
        for row, sample in enumerate(batch.sample_ids):
            offset, tokens = shard.places[sample]
            memory = bytes_of(features[row, :tokens])
            shard.checksums[sample] = zlib.crc32(memory)
            _write_all(shard.descriptor, memory, offset)

    def _stored(self, slot: int, batch: PlannedBatch, shard: OpenShard) -> None:
        self.free.append(slot)
        self.done += sum(shard.places[i][1] for i in batch.sample_ids)
        shard.left -= 1
        if shard.left == 0:
            self._submit(lambda: self._close(shard), self._closed)

    def _close(self, shard: OpenShard) -> Shard:
        """In a thread: header, durable, hash, name."""
        identity, plan = self.manifest.identity, shard.plan
        header = shard_header(plan, identity.width, identity.dtype, [shard.checksums[i] for i in plan.ids])
        _write_all(shard.descriptor, memoryview(header), 0)
        os.fsync(shard.descriptor)
        size = os.fstat(shard.descriptor).st_size
        whole = Shard(plan.name, size, sha256(shard.beside), len(plan.ids), plan.first, plan.end)
        shard.beside.replace(self.out / plan.name)
        sync(self.out)
        return whole

    def _closed(self, whole: object) -> None:
        assert isinstance(whole, Shard)
        shard = next(s for s in self.open.values() if s.plan.name == whole.name)
        os.close(self.open.pop(shard.plan.number).descriptor)
        self.unfinished -= 1
        shards = sorted((*self.manifest.shards, whole), key=lambda s: s.first)
        self.manifest = replace(self.manifest, shards=tuple(shards), complete=not self.unfinished)
        self.manifest.save(self.out)
        self.crew.progress()

    # ---- the pool

    def _submit(self, work: Callable[[], object], then: Callable[[object], None]) -> None:
        future = self.pool.submit(work)
        self.running[future] = then
        future.add_done_callback(self._poke)

    def _poke(self, _: object) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody waits
            self._wake.send(b"x")

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)
        for future in [f for f in self.running if f.done()]:
            self.running.pop(future)(future.result())


def _write_all(descriptor: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], offset + done)
