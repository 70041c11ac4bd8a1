"""`loop`: a daemon that keeps snapshot.json fresh and writes down what happens.

The rules here: only one (a lock that dies with its process); once a second, and at once when the launcher ends; a full
disk or a damaged file is said in run/resident.log and tried again, it never ends the loop. The loop itself only looks;
what is to be repaired is left to `repair`, which it starts.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from dflash_ops.contracts import LIVE_STATES, JobSpec, Layout, Process, Snapshot, State, dumps
from dflash_ops.errors import DflashError
from dflash_ops.resident import attempts, daemon, itself, journal, proc
from dflash_ops.resident.daemon import LoopRecord
from dflash_ops.resident.files import flock, load, write_atomic
from dflash_ops.resident.guard import Guard
from dflash_ops.resident.repairs import Repairs, wanted
from dflash_ops.resident.scan import Said
from dflash_ops.resident.vitals import Vitals, checkpoints_of
from dflash_ops.resident.watch import Watcher, here

EVERY = 1.0
#: Seconds between two writings of the curves: a foreign trainer may print a line a step.
CURVES_EVERY = 2.0
#: Seconds after the last thing that happened to an ended job, then the loop leaves.
LINGER = 600.0
LOG_LIMIT = 1 << 20


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="loop")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--foreground", action="store_true", help="do not become a daemon (for tests)")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    layout.run.mkdir(parents=True, exist_ok=True)
    if options.foreground:
        return _locked(layout, None)
    return _daemonize(layout)


def _daemonize(layout: Layout) -> int:
    """Leave the caller's session and pipes; 0 once a loop (this one or another) watches, 1 if none came up."""
    ready_r, ready_w = os.pipe()
    if os.fork() > 0:
        os.close(ready_w)
        select.select([ready_r], [], [], daemon.WAIT)
        said = os.read(ready_r, 1) if select.select([ready_r], [], [], 0)[0] else b""
        return 0 if said == b"." else 1
    os.close(ready_r)
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    code = 1
    try:
        os.chdir("/")
        with suppress(FileNotFoundError):
            if layout.resident_log.stat().st_size > LOG_LIMIT:
                layout.resident_log.replace(layout.resident_log.with_suffix(".log.1"))
        null = os.open(os.devnull, os.O_RDWR)
        try:
            log = os.open(layout.resident_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:
            log = null
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # A caller's pipe kept open would keep its ssh waiting for ever.
        for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if fd > 2 and fd != ready_w:
                with suppress(OSError):
                    os.close(fd)
        code = _locked(layout, ready_w)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _locked(layout: Layout, ready: int | None) -> int:
    """Run as the only loop; another one that is there already is just as good."""
    lock = os.open(layout.resident_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    # The lock of a loop that was just killed is free at once; one that ends has a last snapshot to write.
    mine = flock(lock, 2.0)
    loop = Loop(layout, guarded=ready is not None) if mine else None  # in the foreground its starter looks after it
    if loop is not None:
        loop.guard()  # before anybody can know of us
        own = proc.me()
        record = LoopRecord(own.pid, own.start, itself.version(), time.time())
        write_atomic(layout.resident_pid, dumps(record).encode() + b"\n")
    if ready is not None:
        os.write(ready, b"." if mine or daemon.running(layout) else b"!")
        os.close(ready)
    if loop is not None:
        loop.run()
    return 0


class Loop:
    def __init__(self, layout: Layout, *, guarded: bool = True) -> None:
        self._layout = layout
        self._guarded = guarded
        self._run_folder = layout.run.stat().st_ino
        self._me = here(proc.me(), itself.version())
        self._watcher = Watcher(layout, daemon.last_snapshot(layout), self._on_event)
        self._events: list[tuple[int, Said]] = []
        self._state: tuple[int | None, State] | None = None
        self._busy_t = time.monotonic()
        self._said: dict[str, float] = {}
        self._stop = False
        self._pidfd: tuple[Process, int] | None = None
        self._first = True
        self._repairs = Repairs(layout, self._tell)
        self._vitals = Vitals(layout, checkpoints_of(self._job(), layout))
        self._curves: tuple[int, int] | None = None
        self._curves_t = float("-inf")
        self._guard = Guard(itself.newest(layout.root, "loop", "--root", str(layout.root)), self._needed)

    def _job(self) -> JobSpec | None:
        try:
            return load(JobSpec, self._layout.job)
        except (OSError, DflashError):
            return None  # a damaged job.json is told by the looks

    def guard(self) -> None:
        """Have a guard."""
        if self._guarded:
            self._guard.keep()

    def run(self) -> None:
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_term)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        for rest in (
            *self._layout.run.glob(".snapshot.json.*.tmp"),
            *self._layout.run.glob(".curves.json.*.tmp"),
        ):  # of a loop that was killed while it wrote
            with suppress(OSError):
                rest.unlink()
        self._journal("resident_started", data={"pid": self._me.pid, "version": self._me.version})
        while not self._stop and self._there():
            begun = time.monotonic()
            self.guard()
            snapshot = self._pass()
            if snapshot is not None and self._idle(snapshot):
                break
            self._wait(wake_r, max(0.05, EVERY - (time.monotonic() - begun)))
        self._guard.farewell()
        self._vitals.close()
        if self._there():
            self._journal("resident_stopped", data={"pid": self._me.pid})
            self._pass(alive=False)

    def _needed(self) -> bool:
        """Whether a killed loop is to come back: the trainer lives, or is to be repaired."""
        try:
            attempt = attempts.last(self._layout)
            if attempt is not None and attempt.launcher_alive:
                return True
            return wanted(self._layout, Watcher(self._layout).look(None), attempt)
        except (OSError, DflashError):
            return self._there()

    def _on_term(self, _number: int, _frame: object) -> None:
        self._stop = True

    def _there(self) -> bool:
        """Whether the run folder is still the one that we were started for."""
        try:
            return self._layout.run.stat().st_ino == self._run_folder
        except OSError:
            return False

    def _wait(self, wake: int, seconds: float) -> None:
        fds = [wake]
        if self._pidfd is not None:
            fds.append(self._pidfd[1])
        select.select(fds, [], [], seconds)
        with suppress(BlockingIOError):
            os.read(wake, 512)
        if self._pidfd is not None and not proc.alive(self._pidfd[0]):
            os.close(self._pidfd[1])
            self._pidfd = None

    def _pass(self, alive: bool = True) -> Snapshot | None:
        """One look, written down; None: it failed, and resident.log says how."""
        me = self._me if alive else type(self._me)(False, self._me.pid, self._me.start, self._me.version)
        try:
            snapshot = self._watcher.look(me)
            findings = self._vitals.look(snapshot) if alive else ()
            if alive:
                snapshot = self._vitals.add(snapshot, self._watcher.launcher)
            # Rebuilt within a second, so it need not survive a power cut: no fsync, which a busy disk answers late.
            write_atomic(self._layout.snapshot, dumps(snapshot).encode() + b"\n", sync=False)
            self._keep_curves()
        except (OSError, DflashError) as error:
            self._tell(f"look: {error}")
            return None
        self._write_down(snapshot)
        self._hold(snapshot)
        if alive:
            self._repairs.step(snapshot, self._watcher.attempt, findings)
        return snapshot

    def _keep_curves(self) -> None:
        """For `follow`, and for the loop after this one."""
        found = self._watcher.course
        if found is None or not found[1].changed or time.monotonic() - self._curves_t < CURVES_EVERY:
            return
        number, course = found
        if self._curves == (number, course.changed):
            return
        self._curves, self._curves_t = (number, course.changed), time.monotonic()
        try:
            write_atomic(self._layout.curves, dumps(course.keep(number)).encode() + b"\n", sync=False)
        except OSError as error:
            self._tell(f"curves: {error}")  # a full disk costs them, and nothing else

    def _hold(self, snapshot: Snapshot) -> None:
        """Be woken when the launcher ends."""
        if snapshot.state not in LIVE_STATES or self._pidfd is not None:
            return
        launcher = self._watcher.launcher
        if launcher is None:
            return
        with suppress(OSError):  # no pidfd here: the next second will see it
            self._pidfd = (launcher, os.pidfd_open(launcher.pid))

    def _on_event(self, attempt: int, said: Said) -> None:
        self._events.append((attempt, said))

    def _write_down(self, snapshot: Snapshot) -> None:
        for attempt, said in self._events:
            step = said.line.integer("step")
            if said.name == "checkpoint" and step is not None:
                data = {"step": step, "path": said.line.path}
                self._once("checkpoint", attempt, data)
            if said.name == "resumed" and step is not None:
                self._once("resumed", attempt, {"step": step})  # what a failure cost is counted from it
            self._busy_t = time.monotonic()
        self._events.clear()
        if snapshot.attempt is None or self._state == (snapshot.attempt, snapshot.state):
            return
        before = self._state
        self._state = (snapshot.attempt, snapshot.state)
        self._busy_t = time.monotonic()
        try:
            daemon.record_end(self._layout, snapshot)
        except (OSError, DflashError) as error:
            self._state = before  # once more at the next look
            self._tell(f"journal: {error}")
            return
        data = {"state": snapshot.state.value, "since": snapshot.since, "detail": snapshot.detail}
        if self._first:
            # After a restart of the loop the state is news only if it is not what the journal said last.
            self._first = False
            events, _ = journal.read(self._layout.journal)
            told = [e for e in events if e.event == "state" and e.attempt == snapshot.attempt]
            if told and told[-1].data.get("state") == snapshot.state.value:
                return
        self._journal("state", snapshot.attempt, data)

    def _once(self, event: str, attempt: int, data: dict[str, object]) -> None:
        try:
            journal.append_unless(
                self._layout.journal,
                lambda e: e.event == event and e.attempt == attempt and e.data == data,
                event,
                attempt=attempt,
                data=data,
            )
        except (OSError, DflashError) as error:
            self._tell(f"journal: {error}")

    def _journal(self, event: str, attempt: int | None = None, data: dict[str, object] | None = None) -> None:
        try:
            journal.append(self._layout.journal, event, attempt=attempt, data=data)
        except (OSError, DflashError) as error:
            self._tell(f"journal: {error}")

    def _idle(self, snapshot: Snapshot) -> bool:
        if self._repairs.busy:
            return False
        return snapshot.state not in LIVE_STATES and time.monotonic() - self._busy_t > LINGER

    def _tell(self, text: str) -> None:
        """To resident.log, the same thing once a minute at most."""
        now = time.monotonic()
        if now - self._said.get(text, float("-inf")) < 60.0:
            return
        if len(self._said) > 100:
            self._said.clear()
        self._said[text] = now
        with suppress(OSError):
            print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text.replace("\n", "; "), flush=True)
