"""A release's manifest as the receiving side reads it: without the import of all contracts, and without trust.

The rule here: whatever the sender says, no name leaves the release, none goes through a link, no link leads outside.
And little is imported: this runs while somebody waits for an upload of some files.
"""

from __future__ import annotations

import hashlib

from dflash_ops.errors import TransferError
from dflash_ops.resident import plain

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes a while to import
    from typing import Any, Protocol

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


MANIFEST = ".release.json"


class Entry:
    """`contracts.FileEntry`, without the import of all contracts."""

    __slots__ = ("link", "mode", "path", "sha256", "size")

    def __init__(self, path: str, mode: int, size: int, sha256: str, link: str | None = None) -> None:
        self.path, self.mode, self.size, self.sha256, self.link = path, mode, size, sha256, link


class Manifest:
    """A release: its id, its files, and its JSON as it came."""

    __slots__ = ("files", "id", "raw")

    def __init__(self, id: str, files: list[Entry], raw: dict[str, Any]) -> None:
        self.id, self.files, self.raw = id, files, raw


def manifest(raw: dict[str, Any]) -> Manifest:
    """A release from its JSON.

    Raises:
        TransferError: it is in another form, its name is not the hash of its content, or a path in it leads elsewhere.
    """
    try:
        rows = [(str(f["path"]), int(f["mode"]), int(f["size"]), str(f["sha256"]), f.get("link")) for f in raw["files"]]
        id = str(raw["id"])
        whole = plain.dumps(sorted(rows)).encode()
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"the manifest is not in the agreed form: {error!r}", MANIFEST, "deploy again") from None
    if hashlib.sha256(whole).hexdigest()[:12] != id:
        raise TransferError(f"release {id!r} is not the hash of its manifest", MANIFEST, "deploy again")
    files = [Entry(*row) for row in rows]
    _refuse_tricks(files)
    return Manifest(id, files, raw)


def plain_name(path: str) -> bool:
    """Whether a relative name stays where it is put."""
    return bool(path) and "\0" not in path and {"", ".", ".."}.isdisjoint(path.split("/"))


def _refuse_tricks(files: list[Entry]) -> None:
    """Whatever the sender says: no name leaves the release, none goes through a link, no link leads outside.

    Raises:
        TransferError: names the first one.
    """
    names = {f.path for f in files}
    if len(names) != len(files):
        raise TransferError("the manifest names a file twice", MANIFEST)
    checked: set[str] = set()  # folders of which no part is a file or a link
    for file in files:
        folder = file.path.rpartition("/")[0]
        if not plain_name(file.path) or file.path == MANIFEST or not _is_folder(folder, names, checked):
            raise TransferError(f"a name leads out of the release: {file.path!r}", MANIFEST)
        if file.mode not in (0o644, 0o755, 0o777):
            raise TransferError(f"a mode is none of a release: {file.path!r} has {file.mode:o}", MANIFEST)
        if file.link is not None and (not file.link or file.link.startswith("/") or _leaves(folder, file.link)):
            raise TransferError(f"a link leads out of the release: {file.path!r} -> {file.link!r}", MANIFEST)


def _is_folder(folder: str, names: set[str], checked: set[str]) -> bool:
    while folder and folder not in checked:
        if folder in names:
            return False
        checked.add(folder)
        folder = folder.rpartition("/")[0]
    return True


def _leaves(folder: str, target: str) -> bool:
    depth = folder.count("/") + 1 if folder else 0
    for part in target.split("/"):
        depth += 0 if part in ("", ".") else -1 if part == ".." else 1
        if depth < 0:
            return True
    return False
