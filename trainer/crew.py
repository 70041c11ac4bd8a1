"""The launcher's worker processes as one body: who lives, who speaks, who died, and what that means.

start_all --> [hello] --> setup --> [ready] ... messages ... --> end-of-file --> exit code --> started anew | fault

A target comes back alone. Drafters are one body: when one has died, the others are given a moment to say what they
know (the first cause is told, not a cascade), are killed, and all start anew, if the launcher says so.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer import channel
from trainer.channel import Message, Peer
from trainer.config import WorkersConfig
from trainer.errors import BY_EXIT_CODE, TrainerError, write_error_file
from trainer.progress import Output, WorkerTimes
from trainer.workers import GRACE_S, Worker

#: Seconds in which other deaths are gathered when a drafter died, so that the first cause is told and not a cascade.
CASCADE_S = 2.0
#: Seconds between two lines about weights that are being loaded.
WEIGHTS_EVERY_S = 2.0
#: Who was ended by one of these is no echo of another death: the others are not waited for.
KILLED, KILLED_S = frozenset((-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)), 0.2
#: Seconds of training before there are spares: a run of a moment has no use for them.
SPARES_AFTER_S = 10.0
#: Between two ticks of a launcher that was itself held up (a frozen container, a disk) nobody was silent.
STALL_S = 5.0
#: Spares that ended by themselves, then there are no more of them: something here does not let them be.
SPARES_LOST = 5
_SERVER = "server"


class Crew:
    """All workers of an attempt.

    Args:
        config: devices, threads, restarts, deadline. attempt: folder for logs and errors.
        memory: role -> descriptors of shared memory that its workers get. output: for events and the workers' own
        lines. setup: a worker's first message. told: called with every later message. lost: called once when a target
        or reader is found dead. fallen: called when all drafters are dead, with the first cause; False: do not start
        them. readers: how many read features from disk, in place of targets.
    """

    def __init__(
        self,
        config: WorkersConfig,
        attempt: Path,
        memory: Mapping[str, Sequence[int]],
        output: Output,
        *,
        setup: Callable[[Worker], Message],
        told: Callable[[Worker, Message], None],
        lost: Callable[[Worker], None],
        fallen: Callable[[Worker], bool] = lambda _: False,
        readers: int = 0,
    ) -> None:
        self.config = config
        self.attempt = attempt
        self.memory = memory
        self.output = output
        self._setup, self._told, self._on_lost, self._fallen = setup, told, lost, fallen
        self.workers: dict[str, Worker] = {}
        roles = (("target", config.target_devices), ("reader", ("cpu",) * readers), ("drafter", config.drafter_devices))
        for role, devices in roles:
            for rank, device in enumerate(devices):
                self.workers[f"{role}{rank}"] = Worker(f"{role}{rank}", role, rank, device)
        self.selector = selectors.DefaultSelector()
        self._server, self._address = channel.listen()
        self.selector.register(self._server, selectors.EVENT_READ, _SERVER)
        #: Set by the launcher once steps come: a worker that is ready only then sets the run's stage not back.
        self.stepping = False
        #: How far the target that spoke last has loaded its weights; empty before.
        self.weights = ""
        self._weights_told = float("-inf")
        #: Set by the launcher where drafters wait for others within a piece: these may load, compile, or lack a batch.
        self.patient = False
        #: Set by the launcher of one of several nodes.
        self.several = False
        self._spares: dict[str, Worker] = {}
        self._spares_lost = 0
        self._first_use: float | None = None  # of this crew
        self._hopeless: Worker | None = None
        self._ticked = float("inf")
        self._fell_at: float | None = None  # when the first of the drafters was found dead

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]

    @property
    def drafters(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.role == "drafter"]

    def start_all(self) -> None:
        self.output.stage("loading", 0, len(self.workers), "workers")
        for worker in self.workers.values():
            worker.start(self.attempt, self._address, self.config.threads)

    # ---- sockets

    def wait(self, seconds: float, others: Mapping[socket.socket, Callable[[], None]]) -> None:
        """Waits for whatever comes first, and handles it. `others`: further sockets and what to do with them."""
        for other, call in others.items():
            if other not in self.selector.get_map():
                self.selector.register(other, selectors.EVENT_READ, call)
        for key, events in self.selector.select(seconds):
            if key.data == _SERVER:
                self._admit()
            elif isinstance(key.data, Worker):
                self._hear(key.data, events)
            else:
                key.data()

    def send(self, name: str, message: Message) -> None:
        worker = self.workers[name]
        worker.busy("sync" if message["k"] in ("average", "join") else "compute")
        if worker.peer is not None:
            worker.peer.send(message)
            self._watch_writes(worker)

    def _admit(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._server.accept()
            pid = channel.peer_pid(connection)
            known = (*self.workers.values(), *self._spares.values())
            worker = next((w for w in known if w.pid == pid and w.peer is None), None)
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
                self._handle(worker, peer, message)
        self._watch_writes(worker)
        if peer.closed:
            self._lost(worker)

    def _handle(self, worker: Worker, peer: Peer, message: Message) -> None:
        kind = message["k"]
        if "seconds" in message:
            worker.heard(message["seconds"])
        if kind == "hello":
            worker.greeted = True
            if worker is not self._spares.get(worker.name):
                self._set_up(worker, peer)
        elif kind == "ready":
            worker.ready, worker.ready_at = True, time.monotonic()
            # Of a later life, or once the first step was begun, the others take no notice: they are past loading.
            if worker.life == 0 and not self.stepping:
                done = sum(w.ready for w in self.workers.values())
                self.output.stage("loading", done, len(self.workers), worker.name)
        elif kind == "stage":
            worker.compiles |= message["stage"] == "compiling"
            self._stage(worker, message["stage"], int(message["done"]), int(message["of"]))
        elif kind == "error":
            worker.fault, worker.fault_at = message, time.monotonic()
        else:
            worker.useful |= kind == "filled"
            self._told(worker, message)

    def _stage(self, worker: Worker, stage: str, done: int, of: int) -> None:
        """A worker's own stage. Weights that a later life loads do not set the run's stage back, and of several targets
        that load at one time one line in two seconds is enough."""
        if stage != "loading":
            self.output.stage(stage, done, of, worker.name)
            return
        self.weights = f"{worker.name}: {done} of {of} weights"
        now = time.monotonic()
        if worker.life == 0 and not self.stepping and now - self._weights_told >= WEIGHTS_EVERY_S:
            self._weights_told = now
            self.output.stage(stage, done, of, f"{worker.name}:weights")

    def _set_up(self, worker: Worker, peer: Peer) -> None:
        with contextlib.suppress(ConnectionError):  # it has just died, which a tick finds
            peer.send_with_descriptors(self._setup(worker), self.memory[worker.role])

    def _watch_writes(self, worker: Worker) -> None:
        peer = worker.peer
        if peer is not None and not peer.closed:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.pending else 0)
            if self.selector.get_key(peer.socket).events != wanted:
                self.selector.modify(peer.socket, wanted, worker)

    # ---- deaths

    def _lost(self, worker: Worker) -> None:
        """End-of-file: it is dead or dying. Its exit code comes with a later tick."""
        if worker.peer is not None:
            self.selector.unregister(worker.peer.socket)
            worker.disconnect()
        if worker.lost_at is None:
            worker.lost_at = time.monotonic()
            if worker.role != "drafter":
                self._on_lost(worker)

    def tick(self) -> None:
        """Looks after the processes themselves: output, exit codes, silences.

        Raises:
            TrainerError: a worker ended that cannot be started anew; with its own words and exit code.
        """
        now = time.monotonic()
        held_up, self._ticked = now - self._ticked, now
        self._look_at_spares()
        for worker in self.workers.values():
            self._tee(worker)
            if worker.exit_code is not None:
                continue  # it is known, and was not started anew
            code = worker.poll()
            if held_up > STALL_S and worker.busy_since is not None:
                worker.busy_since = min(now, worker.busy_since + held_up)
            limit = self.config.timeout_s
            if not (self.patient and worker.role == "drafter"):
                limit = worker.limit_s(self.config, [w for w in self.workers.values() if w.role == worker.role])
            silent = worker.busy_since is not None and now - worker.busy_since > limit
            if code is None and worker.lost_at is not None and now - worker.lost_at > GRACE_S:
                code = worker.kill()
            elif code is None and silent:
                worker.fault = {"what": f"{worker.name} said nothing for {limit:g} s"}
                worker.fault_at = now
                code = worker.kill()
            if code is not None:
                self._hear(worker, selectors.EVENT_READ)  # its last words may still wait in the socket
                self._lost(worker)
                self._exited(worker, code)
        if self._hopeless is not None:
            raise self.error_of(self._hopeless)
        codes = [w.exit_code for w in self.drafters]
        others = KILLED_S if any(code in KILLED for code in codes) else CASCADE_S
        if self._fell_at is not None and (now - self._fell_at > others or None not in codes):
            self._fell_at = None
            self._raise_again()

    def _exited(self, worker: Worker, code: int) -> None:
        if worker.exit_code is not None:
            return
        worker.exit_code = code
        self._tee(worker, rest=True)
        self.output.event("worker_exit", worker=worker.name, life=worker.life, exitcode=code)
        error_file = worker.error_file(self.attempt)
        if not error_file.exists():  # killed from outside: nobody else will say it
            write_error_file(error_file, TrainerError(worker.fault_text()))
        if worker.role == "drafter":
            if self._fell_at is None:
                self._fell_at = time.monotonic()
        elif not worker.hopeless and worker.tries < self.config.restarts:
            worker.tries += 1
            self._start_anew(worker)
        elif self._hopeless is None:
            self._hopeless = worker

    def _start_anew(self, worker: Worker) -> None:
        self._look_at_spares()
        spare = self._spares.pop(worker.name, None)
        if spare is not None and spare.lost_at is None:
            worker.take_over(spare)
            if worker.peer is not None:
                self.selector.modify(worker.peer.socket, selectors.EVENT_READ, worker)
                if worker.greeted:
                    self._set_up(worker, worker.peer)
                    self._watch_writes(worker)
        else:
            worker.life += 1
            worker.start(self.attempt, self._address, self.config.threads)
        self.output.event("worker_start", worker=worker.name, life=worker.life)

    # ---- spares

    def _have_spares(self) -> None:
        """One beside each drafter. Only while training goes on: what loads first is what is needed first."""
        # Of several nodes: a takeover in the middle of their meeting was never tried.
        if not self.config.spare_drafters or self.several or self._spares_lost >= SPARES_LOST:
            return
        self._first_use = self._first_use or time.monotonic()
        if time.monotonic() - self._first_use < SPARES_AFTER_S:
            return
        for worker in self.drafters:
            if worker.name not in self._spares:
                spare = Worker(worker.name, worker.role, worker.rank, worker.device, worker.life + 1)
                spare.start(self.attempt, self._address, self.config.threads, spare=True)
                self._spares[worker.name] = spare

    def _look_at_spares(self) -> None:
        for spare in list(self._spares.values()):
            code = spare.poll()
            if code is None and spare.lost_at is not None:
                code = spare.kill()  # nobody can tell it anything any more
            if code is not None:
                self._lost(spare)
                # A fault of nobody who worked: as the run's first cause it would mislead.
                with contextlib.suppress(OSError):
                    spare.error_file(self.attempt).unlink()
                del self._spares[spare.name]
                self._spares_lost += 1
                self.output.event("spare_exit", worker=spare.name, life=spare.life, exitcode=code)

    def _raise_again(self) -> None:
        """All drafters end, and begin their next life.

        Raises:
            TrainerError: the first cause, if another life would end in the same way.
        """
        # A fault that a drafter could name says most, a connection that broke least; of the rest the first one.
        ended = [w for w in self.drafters if w.exit_code is not None or w.fault is not None]
        cause = min(ended, key=lambda w: (not w.hopeless, w.echo, w.ended_at))
        if cause.hopeless:
            raise self.error_of(cause)
        self.end_drafters()
        if self._fallen(cause):
            self.start_drafters()

    def end_drafters(self) -> None:
        """Kills those that live; what they still say is of a life that does not count."""
        self._fell_at = None
        for worker in self.drafters:
            if worker.exit_code is None:
                self._lost(worker)
                worker.exit_code = worker.kill()
                self._tee(worker, rest=True)
                ended_by = {"exitcode": worker.exit_code, "by": "launcher"}
                self.output.event("worker_exit", worker=worker.name, life=worker.life, **ended_by)

    def start_drafters(self) -> None:
        """The next life of all of them."""
        for worker in self.drafters:
            self._start_anew(worker)

    def error_of(self, worker: Worker) -> TrainerError:
        """Why a worker ended, as the error that the run ends with."""
        fault = worker.fault or {}
        cls = BY_EXIT_CODE.get(fault.get("code", 1), TrainerError) if fault.get("known") else TrainerError
        where = fault.get("where") or f"{worker.name}, {worker.log_file(self.attempt)}"
        return cls(worker.fault_text(), where, fault.get("next") or "read its log and error.json")

    def _tee(self, worker: Worker, *, rest: bool = False) -> None:
        for line in worker.new_output(rest=rest):
            self.output.line(f"[{worker.name}] {line}")

    def progress(self) -> None:
        """A new average, or a whole shard of features: who filled a batch in this life is forgiven its earlier deaths.

        A run of weeks would use up any budget for a whole run. One that dies again before it is of use still does.
        """
        for worker in self.workers.values():
            if worker.useful:
                worker.tries = 0
        self._have_spares()

    # ---- numbers, the end

    def times(self) -> list[WorkerTimes]:
        return [WorkerTimes(w.name, w.life, w.times()) for w in self.workers.values()]

    def dismiss(self) -> None:
        """Tells every worker to end, and waits a while for it; one that still loads has nothing to finish."""
        ready = [w for w in self.workers.values() if w.ready and w.peer is not None]
        for worker in ready:
            self.send(worker.name, {"k": "exit"})
        deadline = time.monotonic() + GRACE_S
        for worker in ready:
            worker.wait(deadline)

    def close(self) -> None:
        """No worker outlives the launcher: kills what is left."""
        for worker in (*self._spares.values(), *self.workers.values()):
            worker.kill()
            self._tee(worker, rest=True)
            worker.disconnect()
        self._server.close()
        self.selector.close()
