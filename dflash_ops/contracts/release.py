"""A release: code by content (docs/contracts.md, releases/<id>)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class FileEntry:
    """One file: `path` is relative with forward slashes; `link` is the target of a symlink, else null."""

    path: str
    mode: int
    size: int
    sha256: str
    link: str | None = None


def release_id(files: tuple[FileEntry, ...]) -> str:
    """First 12 hex digits of the hash over the sorted entries: the same content is the same release."""
    entries = sorted((f.path, f.mode, f.size, f.sha256, f.link) for f in files)
    return hashlib.sha256(json.dumps(entries, separators=(",", ":")).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Release:
    SCHEMA: ClassVar[int] = 1

    id: str
    files: tuple[FileEntry, ...]
    made_t: float = 0.0
    source: str = ""
    version: str = ""
    schema: int = 1
