"""Content of files: checked by hash while it is written, found in releases that are there, flushed all at once."""

from __future__ import annotations

import errno
import hashlib
import os
import stat

from dflash_ops.errors import TransferError
from dflash_ops.resident import plain
from dflash_ops.resident.manifest import MANIFEST, plain_name

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` and `pathlib` take a while to import
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dflash_ops.resident.manifest import FileLike

#: Files that are flushed at one time: the disk joins them into one write (300 files: 0.15 s instead of 1.7 s).
FLUSHERS = 16

#: Bytes that are taken from a stream, or copied, at one time.
PIECE = 1 << 20

#: What says that a copy cannot be written, whoever has the content.
NO_PLACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def damaged_files(folder: str | Path, files: Iterable[FileLike]) -> list[str]:
    """Paths of a release that are missing or are not what the manifest says."""
    return [f.path for f in files if not _intact(os.path.join(folder, f.path), f)]  # noqa: PTH118


def _intact(path: str, entry: FileLike) -> bool:
    try:
        if entry.link is not None:
            return os.readlink(path) == entry.link  # noqa: PTH115
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size != entry.size:
                return False
            digest = hashlib.sha256()
            for piece in pieces(fd, entry.size):
                digest.update(piece)
        finally:
            os.close(fd)
    except OSError:
        return False
    return digest.hexdigest() == entry.sha256


def pieces(fd: int, size: int) -> Iterator[bytes]:
    """The first `size` bytes of what a file holds from here on."""
    while size > 0 and (piece := os.read(fd, min(PIECE, size))):
        size -= len(piece)
        yield piece


def write_checked(source: Iterable[bytes | memoryview], path: str, entry: FileLike) -> None:
    """Write a new file and check it against its entry; it is flushed later, together with all others.

    The process's umask must be 022: then the file's mode is its entry's.

    Raises:
        TransferError: it is something else. OSError.
    """
    digest, size = hashlib.sha256(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, entry.mode)
    try:
        for piece in source:
            digest.update(piece)
            size += len(piece)
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view) :]
    except OSError as error:
        error.filename = error.filename or path
        raise
    finally:
        os.close(fd)
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise TransferError(
            f"{entry.path} arrived with {size} bytes and hash {digest.hexdigest()[:12]}, "
            f"sent were {entry.size} bytes and {entry.sha256[:12]}",
            path,
            "deploy again",
        )


class Stock:
    """Files of the releases that are there, by content. Only sizes are looked at: a copy checks the hash itself."""

    def __init__(self, releases: str | Path) -> None:
        self._places: dict[tuple[str, int], list[str]] = {}
        try:
            names = sorted(name for name in os.listdir(releases) if not name.startswith("."))  # noqa: PTH208
        except OSError:
            return
        for name in names:
            folder = os.path.join(releases, name)  # noqa: PTH118
            try:
                with open(os.path.join(folder, MANIFEST), "rb") as file:  # noqa: PTH118
                    rows = plain.loads(file.read())["files"]
                for row in rows:
                    if row.get("link") is None and plain_name(row["path"]):
                        key = (str(row["sha256"]), int(row["size"]))
                        self._places.setdefault(key, []).append(f"{folder}/{row['path']}")
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # one that is damaged only has nothing to give

    def __contains__(self, entry: FileLike) -> bool:
        return any(_plain(path, entry.size) for path in self._places.get((entry.sha256, entry.size), ()))

    def copy(self, entry: FileLike, place: str) -> bool:
        """Copy the content of `entry` to `place`; False if nobody has it (any more), or only damaged.

        Raises:
            OSError: the copy cannot be written.
        """
        for path in self._places.get((entry.sha256, entry.size), ()):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode) or info.st_size != entry.size:
                    continue
                write_checked(pieces(fd, entry.size), place, entry)
                return True
            except TransferError:  # edited there
                os.unlink(place)  # noqa: PTH108
            except OSError as error:
                if error.errno in NO_PLACE:
                    raise
                if os.path.lexists(place):
                    os.unlink(place)  # noqa: PTH108
            finally:
                os.close(fd)
        return False


def _plain(path: str, size: int) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size == size


def lacking(root: str | Path, files: Sequence[FileLike]) -> list[int]:
    """Indices of the files that must travel: no release there has their content. Links never travel."""
    stock = Stock(os.path.join(root, "releases"))  # noqa: PTH118
    return [i for i, f in enumerate(files) if f.link is None and f not in stock]


def sync_tree(folder: str | Path) -> None:
    """All files and folders onto the disk.

    Raises:
        OSError: the disk says no.
    """
    from concurrent.futures import ThreadPoolExecutor

    files: list[str] = []
    folders: list[str] = []
    for path, _, names in os.walk(folder):
        folders.append(path)
        files += [f"{path}/{name}" for name in names]
    with ThreadPoolExecutor(FLUSHERS) as pool:
        list(pool.map(_sync_file, files))
    for one in folders:
        sync_folder(one)


def _sync_file(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link has nothing to flush but its folder
            return
        raise
    _sync(fd)


def sync_folder(folder: str | Path) -> None:
    _sync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def _sync(fd: int, how: Callable[[int], None] = os.fsync) -> None:
    try:
        how(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot be asked for it
            raise
    finally:
        os.close(fd)
