"""Processes as /proc shows them, always named by pid and start time.

The rule here: a pid alone names nobody. A signal is sent only while pid and start time both match the record, through
a pidfd where the kernel has one, so that not even a pid reused in between is hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.contracts import Process


@dataclass(frozen=True)
class Stat:
    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    start: int

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start)

    @property
    def dead(self) -> bool:
        """A zombie has ended; only its parent has not looked yet."""
        return self.state in "ZXx"


def stat(pid: int) -> Stat | None:
    """Fields of /proc/<pid>/stat; None: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command may hold spaces and brackets of its own: what follows the LAST bracket is fixed.
    head, _, tail = raw.rpartition(b")")
    fields = tail.split()
    comm = head.partition(b"(")[2].decode("utf-8", "replace")
    return Stat(pid, comm, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def me() -> Process:
    return of(os.getpid())


def of(pid: int) -> Process:
    """The process that has this pid now.

    Raises:
        ProcessLookupError: there is none.
    """
    found = stat(pid)
    if found is None:
        raise ProcessLookupError(f"no process {pid}")
    return found.process


def alive(process: Process | None) -> bool:
    """Whether this very process lives (a zombie does not)."""
    if process is None:
        return False
    found = stat(process.pid)
    return found is not None and found.start == process.start and not found.dead


def send(process: Process, number: int) -> bool:
    """Signal this very process; False: it is gone, or its pid is somebody else's now, and nothing was sent."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel or sandbox without pidfd: the check and the signal are two steps
        fd = -1
    try:
        if not alive(process):
            return False
        if fd >= 0:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(process.pid, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)


def every() -> list[Stat]:
    """Every process that can be seen here."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    return [one for one in map(stat, pids) if one is not None]


def family(launcher: Process, known: Iterable[Process] = ()) -> set[Process]:
    """The launcher's living descendants, its session's members, and those of `known` that still live.

    Not the launcher itself. A session id stays taken while the session has a member, so members that are not older
    than the launcher are its own, unless another process has its pid by now.
    """
    stats = every()
    by_pid = {s.pid: s for s in stats}
    now = by_pid.get(launcher.pid)
    ours: set[Process] = {p for p in known if p.pid in by_pid and by_pid[p.pid].start == p.start}
    if now is None or now.start == launcher.start:
        ours.update(s.process for s in stats if s.session == launcher.pid and s.start >= launcher.start)
    roots = {p.pid for p in ours}
    if now is not None and now.start == launcher.start:
        roots.add(launcher.pid)
    children: dict[int, list[Stat]] = {}
    for s in stats:
        children.setdefault(s.ppid, []).append(s)
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child.process not in ours:
                ours.add(child.process)
                todo.append(child.pid)
    ours.discard(launcher)
    return {p for p in ours if not by_pid[p.pid].dead}


def boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""
