"""Files that grow while they are read: a log, metrics.jsonl, error files of workers.

The rule here: a look reads only what is new, at most PIECE bytes, and what cannot be understood is told, never guessed.
"""

from __future__ import annotations

import json
from pathlib import Path

from dflash_ops.contracts import ErrorInfo

#: Bytes of a file that one look reads at most; what is older is skipped.
PIECE = 1 << 22


class Tail:
    """New bytes of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self.mtime = 0.0

    def read(self) -> bytes:
        """What is new, the last PIECE bytes of it at most; a file that shrank is read anew."""
        try:
            info = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return b""
        if info.st_size == self._at:
            return b""
        self.mtime = info.st_mtime
        begin = self._at if self._at <= info.st_size else 0
        skip = info.st_size - begin > PIECE
        if skip:
            begin = info.st_size - PIECE
        with self._path.open("rb") as file:
            file.seek(begin)
            data = file.read(info.st_size - begin)
        self._at = begin + len(data)
        # What was skipped ends in the middle of a line, and what came before it has no end.
        return data[max(0, data.find(b"\n")) :] if skip else data


class Errors:
    """errors/<worker>/error.json: the earliest is the first cause."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, tuple[int, int]] = {}
        self._found: dict[Path, ErrorInfo] = {}

    def first(self) -> ErrorInfo | None:
        try:
            workers = list(self._folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return None
        for worker in workers:
            path = worker / "error.json"
            try:
                info = path.stat()
                stamp = (info.st_mtime_ns, info.st_size)
                if self._seen.get(path) != stamp:
                    self._found[path] = error_of(worker.name, path.read_bytes(), info.st_mtime)
                    self._seen[path] = stamp
            except (FileNotFoundError, NotADirectoryError):
                continue
        known = sorted(self._found.values(), key=lambda e: (e.t is None, e.t or 0.0, e.worker))
        return known[0] if known else None


def error_of(worker: str, raw: bytes, mtime: float) -> ErrorInfo:
    """torch's form; its message may be a plain string, and a file cut short is told as such."""
    try:
        message = json.loads(raw)["message"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return ErrorInfo(worker, f"error.json is damaged ({len(raw)} bytes)", mtime)
    if not isinstance(message, dict):
        return ErrorInfo(worker, str(message)[:4000], mtime)
    t = mtime
    extra = message.get("extraInfo")
    if isinstance(extra, dict):
        try:
            t = float(extra["timestamp"])
        except (KeyError, ValueError, TypeError):
            t = mtime
    return ErrorInfo(worker, str(message.get("message", ""))[:4000], t)
