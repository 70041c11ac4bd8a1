"""`wrap`: what runs in the pane, between tmux and the trainer.

The rules here: the trainer never waits for us and never dies of us. The pane may vanish (HUP, EIO), its terminal may
stop taking bytes, the disk may fill: the pipe is read on. What happened is written down exactly, and a launcher that is
not written down never runs: it waits behind a gate until start.json is on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.contracts import AttemptLayout, ExitRecord, Layout, Process, StartRecord, dumps, signal_name
from dflash_ops.errors import StartError
from dflash_ops.resident import daemon, proc
from dflash_ops.resident.exitfile import ExitFile
from dflash_ops.resident.files import write_atomic
from dflash_ops.resident.sinks import Log, Mirror

#: Seconds for which grandchildren may keep the pipe open after the launcher's end.
EOF_WAIT = 2.0
#: Seconds in which `start` must hand over the order.
ORDER_WAIT = 15.0
#: Seconds for which exit.json is tried on a full disk.
EXIT_WAIT = 24 * 3600.0
READ = 1 << 16
IGNORED = (signal.SIGHUP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGQUIT)


@dataclass(frozen=True)
class Order:
    """What `start` hands over on the private socket; it holds the secrets and is never written down."""

    job: str
    release: str | None
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    env_names: tuple[str, ...]
    overrides: dict[str, str]
    reason: str
    cache_dir: str
    nofile: int | None = None

    @staticmethod
    def of(data: dict[str, Any]) -> Order:
        return Order(
            data["job"],
            data["release"],
            tuple(data["argv"]),
            data["cwd"],
            data["env"],
            tuple(data["env_names"]),
            data["overrides"],
            data["reason"],
            data["cache_dir"],
            data.get("nofile"),
        )


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="wrap")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--channel", required=True, help="name of the abstract socket on which `start` listens")
    options = parser.parse_args(args)
    layout = Layout(options.root)
    code = Wrapper(layout.attempt(options.attempt), options.attempt).run(options.channel)
    if daemon.running(layout) is None:
        # Loop and guard were both killed; whoever would see this end and act on it must be there.
        daemon.ensure(layout)
    return code


def receive_order(channel: socket.socket) -> Order:
    """One line of JSON from `start`.

    Raises:
        StartError: `start` went away, or was too slow.
    """
    channel.settimeout(ORDER_WAIT)
    raw = bytearray()
    try:
        while not raw.endswith(b"\n"):
            piece = channel.recv(READ)
            if not piece:
                raise StartError("the starter went away before it handed over the order", "", "start again")
            raw += piece
    except OSError as error:
        raise StartError(f"no order from the starter: {error}", "", "start again") from None
    return Order.of(json.loads(raw))


class Wrapper:
    def __init__(self, at: AttemptLayout, attempt: int) -> None:
        self._at = at
        self._attempt = attempt
        self._requested: str | None = None
        self._forward: list[int] = []
        self._pid = 0
        self._status: int | None = None
        self._started = time.time()
        self._mirror = Mirror(1)
        self._log = Log(at.log)
        self._exit_file = ExitFile(at.exit)

    def run(self, channel_name: str) -> int:
        # The pane is a terminal: Ctrl-Z, Ctrl-\\ or a lost server must not stop or end whoever empties the pipe.
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wakeup byte is all that we need of it
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            try:
                channel.connect("\0" + channel_name)
            except OSError as error:
                self._say(f"the starter is gone ({error}); nothing was started")
                return 1
            try:
                out = self._start(receive_order(channel))
            except (StartError, OSError) as error:
                return self._could_not_start(channel, error)
            _tell(channel, {"wrapper": vars(proc.me()), "launcher": vars(self._launcher)})
        self._pump(out, wake_r)
        return self._finish(out)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._requested = self._requested or signal.Signals(number).name.removeprefix("SIG")
        self._forward.append(number)

    def _say(self, text: str) -> None:
        """To log and pane, marked as ours."""
        line = f"dflash-ops: {text}\n".encode()
        self._log.write(line)
        self._mirror.write(line)
        self._mirror.flush()

    # -- start ---------------------------------------------------------------------------------------------------

    def _start(self, order: Order) -> int:
        """Fork, write start.json, open the gate; gives the read end of the launcher's output.

        Raises:
            StartError: exec failed, or a signal came first.
            OSError: start.json could not be written; the launcher never ran.
        """
        utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started))
        marker = f"==== dflash-ops attempt {self._attempt} release {order.release or '-'} {utc} ====\n".encode()
        self._log.write(marker)
        self._mirror.write(marker)
        self._exit_file.reserve()
        out_r, out_w = os.pipe2(os.O_CLOEXEC)
        gate_r, gate_w = os.pipe2(os.O_CLOEXEC)
        fail_r, fail_w = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            _become_launcher(order, out_w, gate_r, gate_w, fail_w)
        for fd in (out_w, gate_r, fail_w):
            os.close(fd)
        try:
            self._launcher = proc.of(self._pid)
            record = StartRecord(
                attempt=self._attempt,
                job=order.job,
                release=order.release,
                argv=order.argv,
                cwd=order.cwd,
                t=self._started,
                wrapper=proc.me(),
                launcher=self._launcher,
                boot_id=proc.boot_id(),
                env_names=order.env_names,
                overrides=order.overrides,
                reason=order.reason,
                cache_dir=order.cache_dir,
            )
            write_atomic(self._at.start, dumps(record).encode() + b"\n")
            if self._forward:
                raise StartError("a signal came before the trainer ran", "", "start again")
            os.write(gate_w, b"g")
        except BaseException:
            os.close(gate_w)  # the gate stays shut: the child leaves without having run anything
            os.waitpid(self._pid, 0)
            raise
        os.close(gate_w)
        with open(fail_r, "rb") as fail:
            said = fail.read()
        if said:
            os.waitpid(self._pid, 0)
            os.close(out_r)
            raise StartError(said.decode("utf-8", "replace"), order.cwd, "correct the job's command or its folder")
        os.set_blocking(out_r, False)
        return out_r

    def _could_not_start(self, channel: socket.socket, error: Exception) -> int:
        text = error.what if isinstance(error, StartError) else str(error)
        self._say(f"the trainer could not be started: {text}")
        self._log.sync()
        rc = 127
        self._exit_file.write(self._record(rc=rc, detail=text), until=time.monotonic() + 5.0)
        _tell(channel, {"error": text})
        return rc

    # -- while it runs -------------------------------------------------------------------------------------------

    def _pump(self, out: int, wake: int) -> None:
        """Carry bytes until the launcher has ended; its own last words included."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(out, select.POLLIN)
        open_ = True
        while self._status is None:
            # The limit is for a lost SIGCHLD only; everything else wakes us.
            waiting = self._mirror.waiting
            for fd, _ in poll.poll(50 if waiting else 5000):
                if fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 512)
                elif open_ and not self._carry(out):
                    poll.unregister(out)
                    open_ = False
            if waiting:
                self._mirror.flush()
            while self._forward:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, self._forward.pop(0))  # our own child, not yet waited for: cannot be another
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = status

    def _carry(self, out: int) -> bool:
        """One read; False at end of file."""
        try:
            piece = os.read(out, READ)
        except BlockingIOError:
            return True
        self._log.write(piece)
        self._mirror.write(piece)
        return bool(piece)

    def _drain(self, out: int, seconds: float) -> bool:
        """Read on until end of file (True) or for `seconds`; 0 reads what is already there."""
        end = time.monotonic() + seconds
        while True:
            ready, _, _ = select.select([out], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False
            if not self._carry(out):
                return True
            if time.monotonic() > end + 1.0:  # grandchildren that never stop talking
                return False

    # -- the end -------------------------------------------------------------------------------------------------

    def _record(self, *, rc: int | None = None, sig: str | None = None, detail: str = "") -> ExitRecord:
        now = time.time()
        requested = "stop" if self._at.stop.exists() else self._requested
        lost = self._log.lost_bytes
        duration = now - self._started
        return ExitRecord(
            self._attempt, rc, sig, now, duration, requested, self._log.kept_bytes, log_lost_bytes=lost, detail=detail
        )

    def _finish(self, out: int) -> int:
        """Write exit.json at once, wait a little for grandchildren's last words, write it anew with the final sizes."""
        status = self._status or 0
        if os.WIFSIGNALED(status):
            rc, sig = None, signal_name(os.WTERMSIG(status))
        else:
            rc, sig = os.WEXITSTATUS(status), None
        eof = self._drain(out, 0.0)
        self._log.sync()
        first = self._record(rc=rc, sig=sig)
        written = self._exit_file.write(first, until=time.monotonic())
        if not eof:
            self._drain(out, EOF_WAIT)
        self._log.sync()
        last = ExitRecord(**{**vars(first), "log_bytes": self._log.kept_bytes, "log_lost_bytes": self._log.lost_bytes})
        if not written or last != first:
            self._exit_file.write(last, until=time.monotonic() + EXIT_WAIT)
        self._mirror.write(f"==== dflash-ops attempt {self._attempt}: {last.describe()} ====\n".encode())
        end = time.monotonic() + 1.0
        while self._mirror.waiting and time.monotonic() < end:
            time.sleep(0.02)
            self._mirror.flush()
        return rc if rc is not None else 128 + os.WTERMSIG(status)

    _launcher: Process


def _tell(channel: socket.socket, message: dict[str, Any]) -> None:
    # `start` may have been killed meanwhile; the records on the disk say all the same.
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def _become_launcher(order: Order, out_w: int, gate_r: int, gate_w: int, fail_w: int) -> None:
    """In the child: a session of its own, our pipe as output, default signals, then exec. Never returns."""
    code = 126
    try:
        os.setsid()
        os.close(gate_w)  # else we would hold our own gate open when the wrapper dies
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(out_w, 1)
        os.dup2(out_w, 2)
        signal.set_wakeup_fd(-1)
        # SIGPIPE and SIGXFSZ are ignored by every Python; an ignored signal would stay ignored after exec.
        others = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
        for number in (*IGNORED, *others):
            signal.signal(number, signal.SIG_DFL)
        if order.nofile is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = order.nofile if hard == resource.RLIM_INFINITY else min(order.nofile, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if os.read(gate_r, 1) == b"g":
            code = 127
            name = order.cwd
            try:
                os.chdir(order.cwd)
                name = order.argv[0]
                os.execvpe(name, list(order.argv), order.env)
            except (OSError, ValueError) as error:
                reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
                if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
                    reason = "no program (a script without a #! line?)"
                os.write(fail_w, f"{name}: {reason}".encode())
    finally:
        os._exit(code)
