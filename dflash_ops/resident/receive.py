"""Take a release and the resident from a tar stream: run through deploy/boot.py (docs/deploy.md).

Standard input: one line of JSON `{root, token, release, resident, take}`, then tar with members `release/<path>` and
`resident`; or `{root, token, use}`, which makes a resident that is there the current one; or `{root, ask}` with a
manifest, which asks what of it would have to travel. With `take` a file that does not come is copied from another
release that holds the same content.

The rules here: nothing that looks complete exists before it is complete. Everything is unpacked beside its place,
checked against the manifest, flushed, and renamed; an upload that was cut leaves only a folder whose name says so, and
the next one removes it. And what is imported is little: this runs while somebody waits for an upload of some files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dflash_ops.errors import DflashError, PreflightError, TransferError
from dflash_ops.resident.content import (
    PIECE,
    Stock,
    copy_checked,
    damaged_files,
    flush_files,
    lacking,
    sync_folder,
    sync_tree,
)
from dflash_ops.resident.manifest import MANIFEST, Entry, Manifest, manifest

INCOMING = ".incoming-"


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
    """Do what `request` announces (see the top of this file).

    The answer to an upload is `{schema, release, resident, damaged_kept, lacking}`; with `lacking` (indices of files
    that were to be taken from other releases and are not there any more) nothing was made.

    Raises:
        TransferError: the stream ended early, or what arrived is not what the manifest says.
        PreflightError: the place cannot be written (read-only, no room, no permission).
        OSError: as `main` translates it.
    """
    root = Path(request["root"])
    if request.get("ask"):
        return {"schema": 1, "lacking": lacking(root, manifest(request["ask"]).files)}
    token = str(request["token"])
    if request.get("use"):
        return use(root, str(request["use"]), token)
    release = manifest(request["release"]) if request.get("release") else None
    resident = request.get("resident")
    kept: str | None = None
    (root / "run").mkdir(parents=True, exist_ok=True)
    (root / "resident").mkdir(parents=True, exist_ok=True)
    releases = root / "releases"
    with incoming(releases, release.id if release else "resident", token) as folder:
        wanted = {f"release/{f.path}": f for f in release.files} if release else {}
        if resident:
            wanted["resident"] = Entry("resident", 0o644, int(resident["size"]), str(resident["sha256"]))
        left = _unpack(stream, folder, wanted, links=bool(request.get("take")))
        if left and not request.get("take"):
            raise TransferError(
                f"{len(left)} of {len(wanted)} files did not arrive, the first is {next(iter(left))}",
                "tar stream",
                "deploy again",
            )
        gone = _take(Stock(releases), folder, left) if left else set()
        if gone and release:
            missing = [i for i, f in enumerate(release.files) if f"release/{f.path}" in gone]
            return {"schema": 1, "release": None, "resident": None, "damaged_kept": None, "lacking": missing}
        if resident:
            pyz = root / "resident" / f"{resident['id']}.pyz"
            flush_files([folder / "resident"])
            (folder / "resident").replace(pyz)
            sync_folder(pyz.parent)
        if release:
            (folder / "release").mkdir(exist_ok=True)
            _write(folder / "release" / MANIFEST, json.dumps(release.raw, ensure_ascii=False).encode() + b"\n")
            sync_tree(folder / "release")
            kept = _settle(folder / "release", releases, release, token)
    return {
        "schema": 1,
        "release": release.id if release else None,
        "resident": resident["id"] if resident else None,
        "damaged_kept": kept,
        "lacking": [],
    }


def use(root: Path, id: str, token: str) -> dict[str, Any]:
    """`resident/current.pyz` -> `<id>.pyz`, by rename."""
    folder = root / "resident"
    if not (folder / f"{id}.pyz").is_file():
        raise TransferError("the resident that was sent is not there any more", str(folder), "deploy again")
    beside = folder / f".current-{token}"
    beside.symlink_to(f"{id}.pyz")
    beside.replace(folder / "current.pyz")
    sync_folder(folder)
    return {"schema": 1, "resident": id}


class _Arriving:
    """What has arrived, without waiting for a whole piece of it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)


def _unpack(stream: IO[bytes], folder: Path, wanted: dict[str, Entry], *, links: bool) -> dict[str, Entry]:
    """What comes, in its place; gives what did not come. `links`: they are made from the manifest."""
    left = dict(wanted)
    made = {folder}
    try:
        with tarfile.open(fileobj=_Arriving(stream), mode="r|", bufsize=PIECE // 4) as tar:  # type: ignore[call-overload]
            for member in tar:
                entry = left.pop(member.name, None)
                if entry is None:
                    raise TransferError(
                        f"the stream holds something that was not announced: {member.name!r}", "tar stream"
                    )
                path = _inside(folder, member.name)
                _make_parent(path, made)
                if entry.link is not None and member.issym():
                    path.symlink_to(entry.link)
                    continue
                source = tar.extractfile(member) if member.isreg() else None
                if source is None or entry.link is not None:
                    raise TransferError(f"{member.name!r} arrived as something else than a file", "tar stream")
                copy_checked(source, path, entry)
    except tarfile.TarError as error:
        raise TransferError(f"the stream ended early or is damaged: {error}", "tar stream", "deploy again") from error
    for name in [n for n, e in left.items() if e.link is not None] if links else ():
        path = _inside(folder, name)
        _make_parent(path, made)
        path.symlink_to(str(left.pop(name).link))
    return left


def _take(stock: Stock, folder: Path, left: dict[str, Entry]) -> set[str]:
    """Copy what did not come from other releases; gives the names that nobody has."""
    made: set[Path] = set()
    gone = set()
    for name, entry in left.items():
        path = _inside(folder, name)
        _make_parent(path, made)
        if not stock.copy(entry, path):
            gone.add(name)
    return gone


def _make_parent(path: Path, made: set[Path]) -> None:
    if path.parent not in made:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.add(path.parent)


def _inside(folder: Path, name: str) -> Path:
    """A member's place; names that would leave the folder are refused whatever the manifest says."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise TransferError(f"a name leads out of the release: {name!r}", "tar stream")
    return folder / pure


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def _settle(new: Path, releases: Path, release: Manifest, token: str) -> str | None:
    """Rename the whole release into place; a damaged one of the same name is kept aside. Its name, or None."""
    place = releases / release.id
    kept: str | None = None
    if os.path.lexists(place):
        if not damaged_files(place, release.files):
            return None  # somebody else was faster with the same content
        kept = f".damaged-{release.id}-{token}"
        place.rename(releases / kept)
    new.rename(place)
    sync_folder(releases)
    return kept


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
