"""exit.json, which must be written even when the disk is full.

The rule here: room is reserved while there is some (a file of spaces beside it, overwritten in place at the end), and
where that does not help (copy-on-write file systems) the write is tried again and again.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from dflash_ops.contracts import ExitRecord, dumps
from dflash_ops.resident.files import sync_folder, write_all, write_atomic

RESERVE = 4096


class ExitFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = path.with_name(".exit.json.reserve")

    def reserve(self) -> None:
        """Keep a block for the record. A disk that is full already: nothing kept, and the end will try again."""
        with contextlib.suppress(OSError):
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                write_all(fd, b" " * RESERVE)
                os.fsync(fd)
            finally:
                os.close(fd)

    def write(self, record: ExitRecord, until: float) -> bool:
        """Put the record in place, trying once a second until `until` (monotonic); False: it is not written."""
        data = dumps(record).encode() + b"\n"
        while True:
            try:
                write_atomic(self._path, data)
                with contextlib.suppress(OSError):
                    self._reserve.unlink()
                return True
            except OSError:
                if self._use_reserve(data):
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(1.0)

    def _use_reserve(self, data: bytes) -> bool:
        try:
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if os.fstat(fd).st_size < len(data):
                return False
            write_all(fd, data)
            os.fsync(fd)
            os.ftruncate(fd, len(data))
            self._reserve.replace(self._path)
            sync_folder(self._path.parent)
            return True
        except OSError:
            return False
        finally:
            os.close(fd)
