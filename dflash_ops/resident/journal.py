"""The journal on disk: one write() and one fsync an event, under a lock of its own, healed by the next writer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Event, decode_journal, encode_event
from dflash_ops.errors import StateError
from dflash_ops.resident.files import flock, write_all

#: Enough for some hundred events; the last one is nearly always in here.
TAIL = 1 << 16


def append(
    path: Path, event: str, *, actor: str = "resident", attempt: int | None = None, data: dict[str, Any] | None = None
) -> Event:
    """Write one event down; it is on the disk when this returns.

    Raises:
        OSError: it is not written (full or read-only disk). A torn line is closed by the next writer.
        StateError: another writer holds the journal for 10 s.
    """
    done = append_unless(path, None, event, actor=actor, attempt=attempt, data=data)
    assert done is not None
    return done


def append_unless(
    path: Path,
    known: Callable[[Event], bool] | None,
    event: str,
    *,
    actor: str = "resident",
    attempt: int | None = None,
    data: dict[str, Any] | None = None,
) -> Event | None:
    """As `append`, but None, and nothing written, if an event of the journal is the one in question by `known`.

    Asked under the lock: two writers that saw the same thing write it once.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        if not flock(fd, 10.0):
            raise StateError("the journal is locked by another process", str(path), f"see who holds it: fuser {path}")
        size = os.fstat(fd).st_size
        if known is not None and any(map(known, decode_journal(os.pread(fd, size, 0))[0])):
            return None
        seq = _last_seq(fd, size)
        if size and os.pread(fd, 1, size - 1) != b"\n":
            seq += 1
            torn = Event(seq, time.time(), "torn_line", data={"at": size})
            write_all(fd, b"\n" + encode_event(torn))
        done = Event(seq + 1, time.time(), event, actor, attempt, data or {})
        write_all(fd, encode_event(done))
        os.fsync(fd)
        return done
    finally:
        os.close(fd)


def _last_seq(fd: int, size: int) -> int:
    """The largest number in the tail; the whole file is read only where the tail holds no whole event."""
    for length in (TAIL, size):
        events, _ = decode_journal(os.pread(fd, length, max(0, size - length)))
        if events:
            return max(e.seq for e in events)
    return 0


def read(path: Path) -> tuple[list[Event], int]:
    """All events, and how many lines could not be understood (torn by a kill)."""
    try:
        return decode_journal(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
