"""The lease: who may act on this job, and a token that tells an earlier holder that his time is over.

The rule here: nothing is started or ended by a supervisor that cannot show the newest token. A token is a number that
only grows; whoever takes the lease takes the next one, so a holder that was asleep (SIGSTOP, a frozen container, a
clock that jumped) finds a larger one and does nothing. The file is changed under a lock of its own; its holder is
named by pid and start time, so a dead one's lease is free at once, and not only when its time has run out.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dflash_ops.contracts import Layout, Process, dumps
from dflash_ops.errors import ContractError, LeaseLost, StateError
from dflash_ops.resident import proc
from dflash_ops.resident.files import flock, load, write_atomic

#: Seconds for which a lease holds without being renewed: longer than any single step between two renewals.
TTL_S = 120.0
_LOCK_S = 5.0
#: Seconds between two tries to take it from who holds it.
_PAUSE_S = 0.1


@dataclass(frozen=True)
class LeaseRecord:
    """run/lease.

    Attributes:
        token: only grows. owner: who holds it, for people. pid, start, boot_id: that process.
        t: when it was taken or renewed. expires: when it ends by itself (seconds since the epoch).
    """

    SCHEMA: ClassVar[int] = 1

    token: int
    owner: str
    t: float
    expires: float
    pid: int = 0
    start: int = 0
    boot_id: str = ""
    schema: int = 1

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start)


def read(layout: Layout) -> LeaseRecord | None:
    """The record as it is; None where nobody ever held it.

    Raises:
        StateError, ContractError: it is there and damaged; nobody may act until it is looked at.
    """
    return load(LeaseRecord, layout.lease)


def holder(layout: Layout, now: float | None = None) -> LeaseRecord | None:
    """Who holds it at this moment: the process lives on this boot, and its time has not run out.

    A clock that jumped back makes `expires` lie far ahead: more than twice the TTL is not believed.
    """
    now = time.time() if now is None else now
    record = read(layout)
    if record is None or record.expires <= now or record.expires - now > 2 * TTL_S:
        return None
    if record.boot_id and record.boot_id != proc.boot_id():
        return None
    return record if proc.alive(record.process) else None


class Lease:
    """A lease that this process holds. Made by `take`."""

    def __init__(self, layout: Layout, record: LeaseRecord) -> None:
        self._layout = layout
        self._record = record

    @property
    def token(self) -> int:
        return self._record.token

    def check(self) -> None:
        """Before every single deed: is it still ours?

        Raises:
            LeaseLost: somebody else has taken it since, or its file is gone or damaged.
        """
        try:
            now = read(self._layout)
        except (StateError, ContractError) as error:
            raise LeaseLost(f"the lease cannot be read: {error}", str(self._layout.lease), "") from None
        if now is None or now.token != self._record.token:
            who = "its file is gone" if now is None else f"{now.owner} (pid {now.pid}) has token {now.token}"
            raise LeaseLost(
                f"the lease with token {self._record.token} is not ours any more: {who}",
                str(self._layout.lease),
                "nothing was done; the newest holder goes on",
            )

    def renew(self) -> None:
        """More time, under the same token.

        Raises:
            LeaseLost: as `check`.
        """
        with _locked(self._layout):
            self.check()
            now = time.time()
            self._record = LeaseRecord(
                self._record.token, self._record.owner, now, now + TTL_S, self._record.pid, self._record.start,
                self._record.boot_id,
            )  # fmt: skip
            write_atomic(self._layout.lease, dumps(self._record).encode() + b"\n")

    def release(self) -> None:
        """Free for the next one; the token stays, so that it goes on growing. Losing it before is no fault."""
        with contextlib.suppress(LeaseLost, OSError, StateError), _locked(self._layout):
            self.check()
            r = self._record
            ended = LeaseRecord(r.token, r.owner, r.t, 0.0, r.pid, r.start, r.boot_id)
            write_atomic(self._layout.lease, dumps(ended).encode() + b"\n")


def take_within(layout: Layout, owner: str, seconds: float) -> Lease | None:
    """As `take`; another one's end is waited for."""
    end = time.monotonic() + seconds
    while (held := take(layout, owner)) is None and time.monotonic() <= end:
        time.sleep(_PAUSE_S)
    return held


def take(layout: Layout, owner: str) -> Lease | None:
    """The lease, or None while another living process holds it.

    Raises:
        StateError, ContractError: run/lease is damaged: who holds it is not known, so nobody takes it.
        OSError: it cannot be written (a full or read-only disk): then nobody acts.
    """
    with _locked(layout):
        if holder(layout) is not None:
            return None
        before = read(layout)
        me, now = proc.me(), time.time()
        token = (before.token if before is not None else 0) + 1
        record = LeaseRecord(token, owner, now, now + TTL_S, me.pid, me.start, proc.boot_id())
        write_atomic(layout.lease, dumps(record).encode() + b"\n")
        return Lease(layout, record)


@contextlib.contextmanager
def _locked(layout: Layout) -> Iterator[None]:
    path = layout.lease.with_name("lease.lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not flock(fd, _LOCK_S):
            raise StateError(
                f"the lease's lock was held for {_LOCK_S:g} s", str(path), f"see who holds it: fuser {path}"
            )
        yield
    finally:
        os.close(fd)
