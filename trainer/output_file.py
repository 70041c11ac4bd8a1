"""An output that grows line by line over many calls: one writer, no torn line, nothing of another origin."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import ConfigError


def lock(file: BinaryIO, out: Path) -> None:
    """
    Raises:
        ConfigError: another process writes it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            "another regenerate is writing this file", str(out), "wait for it, stop it, or name another --out"
        ) from None


def heal(file: BinaryIO, out: Path, origin: dict[str, Any], anew: bool) -> tuple[int, bool]:
    """Whole lines in the file, after a torn last one has been cut off; makes sure that they come from `origin`.

    Returns:
        How many, and whether lines of another origin were dropped.

    Raises:
        ConfigError: lines of another origin, and not `anew`.
    """
    stamp = out.with_name(out.name + ".from.json")
    file.seek(0)
    raw = file.read()
    other = False
    if raw:
        known = _read_stamp(stamp)
        changed = sorted(k for k in known.keys() | origin.keys() if known.get(k) != origin.get(k))
        other = bool(changed)
        if changed and not anew:
            raise ConfigError(
                f"the output exists and was made from something else ({', '.join(changed)} differ)",
                str(out),
                "name another --out, or make it anew with --anew",
            )
    if raw and not other:
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):
            file.truncate(whole)
            os.fsync(file.fileno())
        return raw.count(b"\n"), False
    file.truncate(0)
    os.fsync(file.fileno())
    beside = stamp.with_name(f".{stamp.name}.{os.getpid()}")
    beside.write_text(json.dumps(origin, indent=1) + "\n")
    beside.rename(stamp)
    return 0, other


def _read_stamp(stamp: Path) -> dict[str, Any]:
    try:
        value = json.loads(stamp.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
