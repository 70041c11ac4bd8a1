"""Files of the run folder: written whole or not at all, read without trusting them.

The rule here: what a reader finds under a name is always one whole version of it (write beside, fsync, rename), and
a file that cannot be understood is a named error, never an empty answer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from dflash_ops.contracts import from_dict
from dflash_ops.errors import JobBusy, StateError

T = TypeVar("T")


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_atomic(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o644) -> None:
    """Replace `path` by `data`. `sync=False` is for what can be computed anew after a power cut.

    Raises:
        OSError: nothing was changed, and nothing is left beside it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    if sync:
        sync_folder(path.parent)


def may_replace(path: Path) -> bool:
    """Whether `write_atomic` there would replace an ordinary file, or nothing: a device, a pipe or a folder it would
    take away from everybody.

    Raises:
        OSError: it cannot be told, as of a name that is too long.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def sync_folder(path: Path) -> None:
    """Make a rename in this folder last through a power cut, where the file system lets us ask for it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def read_json(path: Path) -> Any:
    """Decoded JSON, or None where there is no such file.

    Raises:
        StateError: it is there and no JSON.
    """
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path.name} is damaged: {error}", str(path), f"look at it, then remove {path}") from None


def load(cls: type[T], path: Path) -> T | None:
    """A record from its file, None where there is none.

    Raises:
        StateError: no JSON.
        ContractError: JSON of another form, or of a newer schema.
    """
    data = read_json(path)
    return None if data is None else from_dict(cls, data, str(path))


def read_tail(path: Path, limit: int) -> tuple[bytes, int]:
    """The last `limit` bytes at most, and the offset at which they begin; nothing of a file that is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - limit)
            file.seek(begin)
            return file.read(limit), begin
    except (FileNotFoundError, NotADirectoryError):
        return b"", 0


def flock(fd: int, seconds: float, *, shared: bool = False) -> bool:
    """Take the lock within `seconds`; False: somebody else holds it."""
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, how)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)


@contextlib.contextmanager
def run_lock(path: Path, command: str, seconds: float = 10.0) -> Iterator[None]:
    """Be the only one who changes things in this run folder.

    Raises:
        JobBusy: another command holds the lock for longer than `seconds`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not flock(fd, seconds):
            holder = os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "another command"
            raise JobBusy(f"{holder} is at work on this job", str(path), "wait for it, then try again")
        # For the message above only: a disk too full for it must not stop us.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"`{command}` (pid {os.getpid()})\n".encode(), 0)
        yield
    finally:
        os.close(fd)  # the lock goes with it


def lock_held(path: Path) -> bool:
    """Whether somebody is changing things at this moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not flock(fd, 0.0, shared=True)
    finally:
        os.close(fd)
