"""Take a release and the resident from a tar stream: run through deploy/boot.py (docs/deploy.md).

Standard input: one line of JSON `{root, token, release, resident}`, then tar with members `release/<path>` and
`resident`; or `{root, token, use}`, which makes a resident that is there the current one.

The rule here: nothing that looks complete exists before it is complete. Everything is unpacked beside its place,
checked against the manifest, flushed, and renamed; an upload that was cut leaves only a folder whose name says so, and
the next one removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dflash_ops.contracts import FileEntry, Layout, Release, dumps, from_dict
from dflash_ops.errors import DflashError, PreflightError, TransferError

INCOMING = ".incoming-"
MANIFEST = ".release.json"


def damaged_files(folder: Path, files: tuple[FileEntry, ...]) -> list[str]:
    """Paths of a release that are missing or are not what the manifest says."""
    return [f.path for f in files if not _intact(folder / f.path, f)]


def _intact(path: Path, entry: FileEntry) -> bool:
    try:
        if entry.link is not None:
            return path.is_symlink() and str(path.readlink()) == entry.link
        if path.is_symlink() or path.stat().st_size != entry.size:
            return False
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError:
        return False
    return digest.hexdigest() == entry.sha256


@contextmanager
def incoming(parent: Path, id: str, token: str) -> Iterator[Path]:
    """A folder of our own beside the final place, held by a lock as long as we live; removed if it was not renamed.

    A cut upload cannot clean up after itself: the next call finds the folder without its lock and removes it.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(f"{INCOMING}*"):
        _remove_if_dead(stale)
    path = parent / f"{INCOMING}{id}-{token}"
    path.mkdir(mode=0o755)
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.is_dir():
            raise TransferError("another deploy removed this upload's folder", str(path), "deploy again")
        yield path
    finally:
        os.close(held)
        shutil.rmtree(path, ignore_errors=True)


def _remove_if_dead(path: Path) -> None:
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # its owner lives
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)


def receive(stream: IO[bytes], request: dict[str, Any]) -> dict[str, Any]:
    """Unpack what `request` announces; `{"schema": 1, "release": id|null, "resident": id|null, "damaged_kept": ...}`.

    Raises:
        TransferError: the stream ended early, or what arrived is not what the manifest says.
        PreflightError: the place cannot be written (read-only, no room, no permission).
        OSError: as `main` translates it.
    """
    layout = Layout(Path(request["root"]))
    token = str(request["token"])
    if request.get("use"):
        return _use(layout, str(request["use"]), token)
    release = from_dict(Release, request["release"], "manifest") if request.get("release") else None
    resident = request.get("resident")
    kept: str | None = None
    layout.run.mkdir(parents=True, exist_ok=True)
    layout.resident.mkdir(parents=True, exist_ok=True)
    with incoming(layout.releases, release.id if release else "resident", token) as folder:
        wanted = {f"release/{f.path}": f for f in release.files} if release else {}
        if resident:
            wanted["resident"] = FileEntry("resident", 0o644, int(resident["size"]), str(resident["sha256"]))
        _unpack(stream, folder, wanted)
        if resident:
            pyz = layout.resident / f"{resident['id']}.pyz"
            (folder / "resident").replace(pyz)
            _sync_folder(layout.resident)
        if release:
            manifest = folder / "release" / MANIFEST
            _write(manifest, dumps(release).encode() + b"\n", 0o644)
            _sync_tree(folder / "release")
            kept = _settle(folder / "release", layout, release, token)
    return {
        "schema": 1,
        "release": release.id if release else None,
        "resident": resident["id"] if resident else None,
        "damaged_kept": kept,
    }


def _use(layout: Layout, id: str, token: str) -> dict[str, Any]:
    """`resident/current.pyz` -> `<id>.pyz`, by rename."""
    if not (layout.resident / f"{id}.pyz").is_file():
        raise TransferError("the resident that was sent is not there any more", str(layout.resident), "deploy again")
    beside = layout.resident / f".current-{token}"
    beside.symlink_to(f"{id}.pyz")
    beside.replace(layout.resident_current)
    _sync_folder(layout.resident)
    return {"schema": 1, "resident": id}


def _unpack(stream: IO[bytes], folder: Path, wanted: dict[str, FileEntry]) -> None:
    left = dict(wanted)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                entry = left.pop(member.name, None)
                if entry is None:
                    raise TransferError(
                        f"the stream holds something that was not announced: {member.name!r}", "tar stream"
                    )
                path = _inside(folder, member.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                if entry.link is not None:
                    path.symlink_to(entry.link)
                    continue
                source = tar.extractfile(member)
                if source is None:
                    raise TransferError(f"{member.name!r} arrived as something else than a file", "tar stream")
                _copy(source, path, entry)
    except tarfile.TarError as error:
        raise TransferError(f"the stream ended early or is damaged: {error}", "tar stream", "deploy again") from error
    if left:
        raise TransferError(
            f"{len(left)} of {len(wanted)} files did not arrive, the first is {next(iter(left))}",
            "tar stream",
            "deploy again",
        )


def _inside(folder: Path, name: str) -> Path:
    """A member's place; names that would leave the folder are refused whatever the manifest says."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise TransferError(f"a name leads out of the release: {name!r}", "tar stream")
    return folder / pure


def _copy(source: IO[bytes], path: Path, entry: FileEntry) -> None:
    digest, size = hashlib.sha256(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(fd, "wb") as file:
        while piece := source.read(1 << 20):
            digest.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), entry.mode)  # not left to the umask
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise TransferError(
            f"{entry.path} arrived with {size} bytes and hash {digest.hexdigest()[:12]}, "
            f"sent were {entry.size} bytes and {entry.sha256[:12]}",
            str(path),
            "deploy again",
        )


def _write(path: Path, content: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _settle(new: Path, layout: Layout, release: Release, token: str) -> str | None:
    """Rename the whole release into place; a damaged one of the same name is kept aside. Its name, or None."""
    place = layout.release(release.id)
    kept: str | None = None
    if place.exists():
        if not damaged_files(place, release.files):
            return None  # somebody else was faster with the same content
        kept = f".damaged-{release.id}-{token}"
        place.rename(layout.releases / kept)
    new.rename(place)
    _sync_folder(layout.releases)
    return kept


def _sync_tree(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        _sync_folder(Path(path))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_REASONS = {
    errno.ENOSPC: ("there is no room left for the release", "free some space there, or choose another `root`"),
    errno.EDQUOT: ("the disk quota is used up", "free some space there, or choose another `root`"),
    errno.EROFS: ("the file system is read-only", "mount it writable, or choose another `root` in the inventory"),
    errno.EACCES: ("this user may not write there", "choose another `root`, or give this user the folder"),
    errno.EPERM: ("this user may not write there", "choose another `root`, or give this user the folder"),
    errno.ENOTDIR: ("a part of this path is a file", "correct `root` in the inventory"),
    errno.EEXIST: ("a file is in the way of a folder", "correct `root` in the inventory, or move that file"),
    errno.ENAMETOOLONG: ("the path is too long", "choose a shorter `root` in the inventory"),
}


def explain(error: OSError) -> DflashError:
    """An OSError as a sentence with its next step; what cannot be written is a matter of preflight."""
    where = str(error.filename or "")
    if error.errno in _REASONS:
        what, next = _REASONS[error.errno]
        return PreflightError(what, where, next)
    return TransferError(f"the release could not be written: {error.strerror or error}", where, "look at that place")


def say(work: Callable[[], dict[str, Any]]) -> int:
    """Print what `work` answers, or its error, as one line of JSON; the exit code."""
    try:
        result = work()
    except OSError as error:
        return _say_error(explain(error))
    except DflashError as error:
        return _say_error(error)
    print(json.dumps(result), flush=True)
    return 0


def _say_error(error: DflashError) -> int:
    said = {"type": type(error).__name__, "what": error.what, "where": error.where, "next": error.next}
    with suppress(BrokenPipeError):
        print(json.dumps({"schema": 1, "error": said}), flush=True)
    return error.exit_code


def main(args: list[str]) -> int:
    request = json.loads(sys.stdin.buffer.readline())
    return say(lambda: receive(sys.stdin.buffer, request))
