"""Releases: a folder of code becomes a manifest (whose hash is the release's name) and one tar stream.

The rule here: the same content is the same release, on every machine and under every umask. So modes are kept only as
"may be run" (755) or "may not" (644), and times and owners are left out.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_ops.contracts import FileEntry, Release, release_id, to_dict
from dflash_ops.deploy.ignore import Ignores, walk
from dflash_ops.errors import ReleaseError

#: Names that are never part of a release: what Python and git leave behind.
IGNORED = frozenset({"__pycache__", ".git", ".release.json"})
IGNORED_SUFFIXES = (".pyc", ".pyo")

#: Largest release, bytes: code is small; a folder with weights or a virtual environment in it is a mistake.
MAX_BYTES = 1 << 30

#: Largest piece handed to the host at once, bytes (one huge write is quadratic in paramiko).
PIECE = 1 << 18

_BLOCK = 512

#: Longest name that a ustar header holds in one field.
_NAME = 100


@dataclass(frozen=True)
class Built:
    """A release and where its files lie here: `paths[i]` is the local file of `release.files[i]`."""

    release: Release
    paths: tuple[Path, ...]

    @cached_property
    def bytes(self) -> int:
        return sum(f.size for f in self.release.files)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The release as JSON values, as it is sent."""
        return dict(to_dict(self.release))

    def stream_bytes(self, only: Iterable[int] | None = None) -> int:
        """Bytes of file content and padding in the tar stream, for a progress bar (headers are not counted)."""
        files = self.release.files
        return sum(f.size + -f.size % _BLOCK for f in (files if only is None else (files[i] for i in only)))


def build(
    folder: Path,
    *,
    prefix: str = "",
    source: str = "",
    version: str = "",
    ignores: bool = False,
    max_bytes: int = MAX_BYTES,
) -> Built:
    """Read `folder` into a release; its files lie under `prefix` in it.

    `ignores`: `.gitignore` and `.dflashignore` say what stays behind.

    Raises:
        ReleaseError: not a folder, unreadable, empty, too large, a link that leads out of it, or a file that is
            neither a file nor a link (socket, device).
    """
    if not folder.is_dir():
        raise ReleaseError("the source of the release is no folder", str(folder), "correct `source` in the inventory")
    entries: list[tuple[FileEntry, Path]] = []
    total, cut = 0, len(str(folder / "x")) - 1
    for path in walk(folder, Ignores.around(folder) if ignores else None, IGNORED, IGNORED_SUFFIXES):
        info = path.lstat()
        total += info.st_size  # before it is read: weights would be hashed for minutes first
        if total > max_bytes:
            raise ReleaseError(
                f"the source holds more than {max_bytes >> 20} MiB; a release is code, not weights or environments",
                f"{folder} (reached at {path.relative_to(folder)})",
                "point `source` at the code alone (.dflashignore names what stays behind, as .gitignore does), and "
                "name data and weights by their path in the container",
            )
        entries.append((_entry(path, folder, str(path)[cut:], prefix, info), path))
    if not entries:
        raise ReleaseError("the source of the release holds no file", str(folder), "correct `source` in the inventory")
    entries.sort(key=lambda e: e[0].path)
    files = tuple(e for e, _ in entries)
    release = Release(id=release_id(files), files=files, source=source or str(folder), version=version)
    return Built(release, tuple(p for _, p in entries))


def _entry(path: Path, folder: Path, relative: str, prefix: str, info: os.stat_result) -> FileEntry:
    try:
        relative.encode()
    except UnicodeEncodeError:
        raise ReleaseError("a file name in the release is not UTF-8", repr(str(path)), "rename the file") from None
    name = f"{prefix}/{relative}" if prefix else relative
    try:
        if stat.S_ISLNK(info.st_mode):
            target = str(path.readlink())
            _refuse_outside(path, target, folder)
            return FileEntry(name, 0o777, 0, "", target)
        if not stat.S_ISREG(info.st_mode):
            raise ReleaseError(
                "the release holds something that is neither a file nor a link", str(path), "remove it from the source"
            )
        digest, size = _hash(path, info.st_size)
    except OSError as error:
        raise ReleaseError(f"a file of the release cannot be read: {error.strerror}", str(path)) from error
    return FileEntry(name, 0o755 if info.st_mode & 0o111 else 0o644, size, digest)


def _refuse_outside(path: Path, target: str, folder: Path) -> None:
    """A link may only lead to a place inside the folder: outside it would mean another file on the other machine."""
    base = Path(os.path.realpath(folder))
    # The link's own folder is resolved, then the target is followed by name, so that a dangling link is judged too.
    place = Path(os.path.normpath(Path(os.path.realpath(path.parent)) / target))
    if PurePosixPath(target).is_absolute() or not place.is_relative_to(base):
        raise ReleaseError(
            f"a link of the release leads outside of it: -> {target}",
            str(path),
            "replace the link by the file itself, or leave it out",
        )


def _hash(path: Path, size: int) -> tuple[str, int]:
    """`size`: what it is expected to be; no more room is taken for reading."""
    room = min(size + 1, 1 << 20)
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(room):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size


def tar_stream(built: Built, prefix: str, only: Iterable[int] | None = None) -> Iterator[bytes]:
    """The release as tar, in pieces of at most 256 KiB, names under `prefix`; without the closing blocks.

    `only`: indices of the files that travel, None for all.

    Raises:
        ReleaseError: a file has changed since it was hashed.
    """
    for index in range(len(built.paths)) if only is None else only:
        entry, path = built.release.files[index], built.paths[index]
        yield tar_header(f"{prefix}/{entry.path}", entry.size, mode=entry.mode, link=entry.link)
        if entry.link is not None:
            continue
        sent = 0
        try:
            with open(path, "rb", buffering=0) as file:
                while piece := file.read(min(PIECE, entry.size - sent + 1)):
                    sent += len(piece)
                    if sent > entry.size:
                        break
                    yield piece
        except OSError as error:
            raise ReleaseError(f"a file of the release cannot be read: {error.strerror}", str(path)) from error
        if sent != entry.size:
            raise ReleaseError("a file changed while it was being sent", str(path), "deploy again")
        yield b"\0" * (-entry.size % _BLOCK)


def tar_end() -> bytes:
    return b"\0" * (2 * _BLOCK)


def tar_header(name: str, size: int, *, mode: int = 0o644, link: str | None = None) -> bytes:
    """A ustar header; in front of it a pax header where name or link is long or not ASCII."""
    if link is None and len(name) <= _NAME and name.isascii() and "\0" not in name and size < 8**11:
        head = b"%s%07o\0" % (name.encode().ljust(_NAME, b"\0"), mode) + b"0000000\0" * 2 + b"%011o\0" % size
        tail = (b"0" + b"\0" * 100 + b"ustar\x0000").ljust(_BLOCK - len(head) - 20, b"\0")
        stamp = b"%011o\0" % 0
        total = sum(head) + sum(stamp) + 8 * 32 + sum(tail)
        return head + stamp + b"%06o\0 " % total + tail
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, mode
    if link is not None:
        info.type, info.linkname, info.size = tarfile.SYMTYPE, link, 0
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
