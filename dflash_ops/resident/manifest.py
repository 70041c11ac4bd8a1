"""A release's manifest as the receiving side reads it: without the import of all contracts, and without trust.

The rule here: whatever the sender says, no name leaves the release, none goes through a link, no link leads outside.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple, Protocol

from dflash_ops.errors import TransferError

MANIFEST = ".release.json"


class FileLike(Protocol):
    """`contracts.FileEntry`, or `Entry`."""

    @property
    def path(self) -> str: ...
    @property
    def mode(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    @property
    def link(self) -> str | None: ...


class Entry(NamedTuple):
    """`contracts.FileEntry`, without the import of all contracts."""

    path: str
    mode: int
    size: int
    sha256: str
    link: str | None = None


class Manifest(NamedTuple):
    id: str
    files: tuple[Entry, ...]
    raw: dict[str, Any]


def manifest(raw: dict[str, Any]) -> Manifest:
    """A release from its JSON.

    Raises:
        TransferError: it is in another form, its name is not the hash of its content, or a path in it leads elsewhere.
    """
    try:
        files = tuple(
            Entry(str(f["path"]), int(f["mode"]), int(f["size"]), str(f["sha256"]), f.get("link")) for f in raw["files"]
        )
        id = str(raw["id"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"the manifest is not in the agreed form: {error!r}", MANIFEST, "deploy again") from None
    whole = json.dumps(sorted(files), separators=(",", ":")).encode()
    if hashlib.sha256(whole).hexdigest()[:12] != id:
        raise TransferError(f"release {id!r} is not the hash of its manifest", MANIFEST, "deploy again")
    _refuse_tricks(files)
    return Manifest(id, files, raw)


def _refuse_tricks(files: tuple[Entry, ...]) -> None:
    """Whatever the sender says: no name leaves the release, none goes through a link, no link leads outside.

    Raises:
        TransferError: names the first one.
    """
    links = {f.path for f in files if f.link is not None}
    names = {f.path for f in files}
    if len(names) != len(files):
        raise TransferError("the manifest names a file twice", MANIFEST)
    for file in files:
        parts = file.path.split("/")
        wrong = not file.path or "\0" in file.path or file.path == MANIFEST or not {"", ".", ".."}.isdisjoint(parts)
        above = ["/".join(parts[:n]) for n in range(1, len(parts))]
        if wrong or not names.isdisjoint(above) or not links.isdisjoint(above):
            raise TransferError(f"a name leads out of the release: {file.path!r}", MANIFEST)
        if file.mode not in (0o644, 0o755, 0o777):
            raise TransferError(f"a mode is none of a release: {file.path!r} has {file.mode:o}", MANIFEST)
        if file.link is not None and (not file.link or file.link.startswith("/") or _leaves(parts[:-1], file.link)):
            raise TransferError(f"a link leads out of the release: {file.path!r} -> {file.link!r}", MANIFEST)


def _leaves(folder: list[str], target: str) -> bool:
    depth = len(folder)
    for part in target.split("/"):
        depth += 0 if part in ("", ".") else -1 if part == ".." else 1
        if depth < 0:
            return True
    return False
