"""Faults that a test (or a person) can put into a lab, and take out again.

Each method that begins a fault is a context manager: `with lab.faults.link_down("pve1"): ...`. `begin`/`end` do the
same by hand for a fault of unknown length.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lab import net
from lab.clock import build as build_clock
from lab.machine import pids_inside
from lab.shell import sh

if TYPE_CHECKING:
    from lab.build import Lab
    from lab.container import Container
    from lab.machine import Machine


class Faults:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def _machine(self, name: str) -> Machine:
        return self._lab.machines[name]

    def _container(self, number: int) -> Container:
        return self._lab.containers[number]

    # -- the wire

    @contextlib.contextmanager
    def link_down(self, machine: str, there: str = "op") -> Iterator[None]:
        """The wire between `machine` and the operator (or `there`) is cut at its far end: packets go and none come."""
        end = ["ip", "-n", self._machine(machine).namespace, "link", "set", net.wire_end(machine, there)]
        sh([*end, "down"])
        try:
            yield
        finally:
            sh([*end, "up"])
            # addresses that could not be resolved in the meantime are asked for again at once
            for here, other in ((machine, there), (there, machine)):
                space = self._lab.namespace(here)
                sh(["ip", "-n", space, "neigh", "flush", "dev", net.wire_end(here, other)], ok=None)

    @contextlib.contextmanager
    def _rule(self, namespace: str, *rule: str) -> Iterator[None]:
        table = ["nsenter", f"--net={net.RUN / namespace}", "iptables", "-w", "5"]
        sh([*table, "-I", *rule])
        try:
            yield
        finally:
            sh([*table, "-D", *rule])

    def drop(self, machine: str) -> contextlib.AbstractContextManager[None]:
        """Packets that come to `machine` on port 22 are dropped without a word."""
        return self._rule(self._machine(machine).namespace, "INPUT", "-p", "tcp", "--dport", "22", "-j", "DROP")

    def reset(self, machine: str) -> contextlib.AbstractContextManager[None]:
        """Every packet to port 22 of `machine` is answered with a TCP reset."""
        rule = ("INPUT", "-p", "tcp", "--dport", "22", "-j", "REJECT", "--reject-with", "tcp-reset")
        return self._rule(self._machine(machine).namespace, *rule)

    def loss(self, machine: str, share: float) -> contextlib.AbstractContextManager[None]:
        """A random share (0 to 1) of what comes to `machine` is lost."""
        rule = ("INPUT", "-m", "statistic", "--mode", "random", "--probability", f"{share:g}", "-j", "DROP")
        return self._rule(self._machine(machine).namespace, *rule)

    @contextlib.contextmanager
    def rate(self, machine: str, rate: str = "10mbit") -> Iterator[None]:
        """What the operator sends to `machine` is slowed down to `rate` (tc's words)."""
        device = ["dev", net.wire_end("op", machine), "root"]
        tc = ["tc", "-n", self._lab.operator_home.namespace, "qdisc"]
        sh([*tc, "replace", *device, "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"])
        try:
            yield
        finally:
            sh([*tc, "del", *device])

    # -- sshd

    @contextlib.contextmanager
    def sshd_stopped(self, machine: str) -> Iterator[None]:
        """Every sshd of `machine` is frozen (SIGSTOP): the kernel still acknowledges, nobody answers."""
        here = self._machine(machine)
        here.signal_sshd(signal.SIGSTOP)
        try:
            yield
        finally:
            here.signal_sshd(signal.SIGCONT)

    @contextlib.contextmanager
    def sshd_killed(self, machine: str) -> Iterator[None]:
        """Every sshd of `machine` is gone, open connections too; started again at the end."""
        here = self._machine(machine)
        here.signal_sshd(signal.SIGKILL)
        try:
            yield
        finally:
            here.start_sshd()

    def cut_connections(self, machine: str) -> None:
        """The sshd of each open connection is killed; new ones are taken as before."""
        self._machine(machine).signal_sshd(signal.SIGKILL, listener=False)

    @contextlib.contextmanager
    def max_sessions(self, machine: str, number: int) -> Iterator[None]:
        """sshd allows `number` sessions on one connection (for connections made from now on)."""
        here = self._machine(machine)
        before, here.max_sessions = here.max_sessions, number
        here.stop_sshd()
        here.start_sshd()
        try:
            yield
        finally:
            here.max_sessions = before
            here.stop_sshd()
            here.start_sshd()

    @contextlib.contextmanager
    def changed_host_key(self, machine: str) -> Iterator[None]:
        """The machine answers with another host key, as after a reinstallation (or another machine in its place)."""
        here = self._machine(machine)
        files = [here.host_key, here.host_key.with_suffix(".pub")]
        before = [(f, f.read_bytes()) for f in files]
        for file in files:
            file.unlink()
        sh(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "changed", "-f", str(here.host_key)])
        here.stop_sshd()
        here.start_sshd()
        try:
            yield
        finally:
            for file, content in before:
                file.write_bytes(content)
            here.stop_sshd()
            here.start_sshd()

    # -- pct

    @contextlib.contextmanager
    def _knob(self, machine: str, name: str, value: str) -> Iterator[None]:
        path = self._machine(machine).folder / "knobs" / name
        path.write_text(value)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def pct_delay(self, machine: str, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Each pct call takes this much longer."""
        return self._knob(machine, "delay", str(seconds))

    def locale_noise(self, machine: str, *, always: bool = False) -> contextlib.AbstractContextManager[None]:
        """perl's words about locales on standard error of every pct call (`always`: whatever LC_ALL says)."""
        return self._knob(machine, "noise", "always" if always else "auto")

    def lock_timeout(self, machine: str, seconds: float = 10.0) -> contextlib.AbstractContextManager[None]:
        """start, stop and shutdown cannot have the lock file and give up after `seconds`."""
        return self._knob(machine, "locked", str(seconds))

    def race(self, machine: str) -> contextlib.AbstractContextManager[None]:
        """exec finds the container running but no init in it, as while it shuts down."""
        return self._knob(machine, "race", "1")

    def no_pct(self, machine: str) -> contextlib.AbstractContextManager[None]:
        """The machine has no pct at all."""
        return _moved(self._machine(machine).folder / "sbin/pct")

    # -- containers

    def stop_container(self, number: int) -> None:
        """Killed at once, whatever runs in it. `start_container` brings it back."""
        self._container(number).stop(kill=True)

    def start_container(self, number: int) -> None:
        if not self._container(number).running:
            self._container(number).start()

    @contextlib.contextmanager
    def locked(self, number: int, lock: str = "backup") -> Iterator[None]:
        """The container is locked, as during a backup: exec goes on, start, stop and shutdown refuse."""
        conf = self._container(number).conf
        before = conf.read_text()
        conf.write_text(before + f"lock: {lock}\n")
        try:
            yield
        finally:
            conf.write_text(before)

    @contextlib.contextmanager
    def disk_full(self, number: int, folder: str = "/srv/small", *, leave: int = 0) -> Iterator[None]:
        """The file system of `folder` (a small tmpfs) has `leave` bytes left."""
        here = self._container(number)
        file = f"{folder}/.filled-by-the-lab"
        free = int(here.exec(["stat", "-f", "-c", "%a", folder])) * int(here.exec(["stat", "-f", "-c", "%S", folder]))
        here.exec(["fallocate", "-l", str(max(free - leave, 1)), file])
        try:
            yield
        finally:
            here.exec(["rm", "-f", file])

    @contextlib.contextmanager
    def read_only_root(self, number: int) -> Iterator[None]:
        """/ of the container is read-only (its tmpfs mounts are not), as after an error of the disk."""
        remount = [
            "nsenter",
            "-t",
            str(self._container(number).init_pid),
            "-m",
            "-U",
            "-S",
            "0",
            "-G",
            "0",
            "mount",
            "-o",
        ]
        sh([*remount, "remount,bind,ro,relatime", "/"])
        try:
            yield
        finally:
            sh([*remount, "remount,bind,rw,relatime", "/"])

    @contextlib.contextmanager
    def clock_off(self, number: int, seconds: int = 600) -> Iterator[None]:
        """Programs of the container started from now on see a wall clock that is `seconds` ahead, and file times to
        match: a library of the lab is preloaded into each of them (clock.c). Durations stay right."""
        etc = self._container(number).rootfs / "etc"
        library = etc / "lab-clock.so"
        build_clock(library, seconds)
        (etc / "ld.so.preload").write_text("/etc/lab-clock.so\n")
        try:
            yield
        finally:
            (etc / "ld.so.preload").unlink()
            library.unlink()

    # -- looking

    def processes(self, machine: str) -> dict[int, bytes]:
        """Processes of a machine and its containers: pid -> command line, NUL between arguments."""
        found = {}
        for pid in pids_inside(self._machine(machine).namespace):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
        return found


@contextlib.contextmanager
def _moved(path: Path) -> Iterator[None]:
    aside = path.with_name(path.name + ".aside")
    path.rename(aside)
    try:
        yield
    finally:
        aside.rename(path)
