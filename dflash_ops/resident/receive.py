"""Take a release and the resident from a tar stream: run through deploy/boot.py (docs/deploy.md).

Standard input: one line of JSON `{root, token, release, resident, take}`, then tar with members `release/<path>`; or
`{root, token, use}`, which makes a resident that is there the current one; or `{root, ask}` with a manifest: what of it
would have to travel? With `then` an upload may follow on the same input. `resident` is the zipapp that this very code
runs from. With `take` a file that does not come is copied from another release that holds the same content.

The rules here: nothing that looks complete exists before it is complete. Everything is unpacked beside its place,
checked against the manifest, and renamed; an upload that was cut leaves only a folder whose name says so, and the next
one removes it. What a power cut takes is noticed by its hash: a release is flushed before it is switched to (`begin`).
And what is imported is little: this runs while somebody waits for an upload of some files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import sys

from dflash_ops.errors import DflashError, PreflightError, TransferError
from dflash_ops.resident import plain
from dflash_ops.resident.content import Stock, damaged_files, lacking, sync_folder, write_checked
from dflash_ops.resident.manifest import MANIFEST, Entry, Manifest, manifest
from dflash_ops.resident.tarstream import members

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` and `pathlib` take a while to import
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any, Protocol

    from dflash_ops.resident.tarstream import Stream

    class Input(Stream, Protocol):
        def readline(self) -> bytes: ...


INCOMING = ".incoming-"

#: Bytes that a pipe may hold where nobody is root (the kernel's usual limit).
PIPE = 1 << 20


class Incoming:
    """A folder of our own beside the final place, held by a lock as long as we live; removed if it was not renamed.

    A cut upload cannot clean up after itself: the next call finds the folder without its lock and removes it.
    """

    def __init__(self, parent: str, id: str, token: str) -> None:
        self._parent, self.path = parent, f"{parent}/{INCOMING}{id}-{token}"
        self._held = -1

    def __enter__(self) -> str:
        os.makedirs(self._parent, 0o755, exist_ok=True)  # noqa: PTH103
        for name in os.listdir(self._parent):  # noqa: PTH208
            if name.startswith(INCOMING):
                _remove_if_dead(f"{self._parent}/{name}")
        os.mkdir(self.path, 0o755)  # noqa: PTH102
        self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.isdir(self.path):  # noqa: PTH112
            raise TransferError("another deploy removed this upload's folder", self.path, "deploy again")
        return self.path

    def __exit__(self, *_: object) -> None:
        os.close(self._held)
        _remove(self.path)


def _remove(path: str) -> None:
    try:
        os.rmdir(path)  # noqa: PTH106  # empty, if all went well
    except FileNotFoundError:
        return
    except OSError:
        import shutil

        shutil.rmtree(path, ignore_errors=True)


def _remove_if_dead(path: str) -> None:
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # its owner lives
    else:
        _remove(path)
    finally:
        os.close(held)


def receive(stream: Stream, request: dict[str, Any]) -> dict[str, Any]:
    """Do what `request` announces (see the top of this file).

    The answer to an upload is `{schema, release, resident, damaged_kept, lacking}`; with `lacking` (indices of files
    that were to be taken from other releases and are not there any more) nothing was made.

    Raises:
        TransferError: the stream ended early, or what arrived is not what the manifest says.
        PreflightError: the place cannot be written (read-only, no room, no permission).
        OSError: as `main` translates it.
    """
    root = str(request["root"])
    if request.get("ask"):
        return {"schema": 1, "lacking": lacking(root, manifest(request["ask"]).files)}
    token = str(request["token"])
    if request.get("use"):
        return use(root, str(request["use"]), token)
    release = manifest(request["release"]) if request.get("release") else None
    resident = request.get("resident")
    kept: str | None = None
    for name in ("run", "resident"):
        os.makedirs(f"{root}/{name}", exist_ok=True)  # noqa: PTH103
    releases = f"{root}/releases"
    _widen_pipe()
    os.umask(0o022)  # modes are those of the manifest, 755 and 644, whoever calls
    with Incoming(releases, release.id if release else "resident", token) as folder:
        left = _unpack(stream, folder, release.files if release else [], take=bool(request.get("take")))
        gone = _take(Stock(releases), folder, left) if left else set()
        if gone and release:
            missing = [i for i, f in enumerate(release.files) if f.path in gone]
            return {"schema": 1, "release": None, "resident": None, "damaged_kept": None, "lacking": missing}
        if resident:
            _install(root, folder, resident)
        if release:
            os.makedirs(f"{folder}/release", 0o755, exist_ok=True)  # noqa: PTH103
            _write(f"{folder}/release/{MANIFEST}", plain.dumps(release.raw).encode() + b"\n")
            kept = _settle(f"{folder}/release", releases, release, token)
    return {
        "schema": 1,
        "release": release.id if release else None,
        "resident": resident["id"] if resident else None,
        "damaged_kept": kept,
        "lacking": [],
    }


def _widen_pipe() -> None:
    """Room in standard input, where it is a pipe: who fills it need not wait while a file is checked and written."""
    try:  # noqa: SIM105  # contextlib takes a while to import
        fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, PIPE)
    except OSError:
        pass  # no pipe, or no room: it only takes longer


def _install(root: str, folder: str, resident: dict[str, Any]) -> None:
    """The zipapp from which this code runs, as `resident/<id>.pyz`: it has come once already.

    Raises:
        TransferError: it is another one than the sender means.
    """
    with open(sys.path[0], "rb") as file:
        content = file.read()
    if len(content) != resident["size"] or hashlib.sha256(content).hexdigest() != resident["sha256"]:
        raise TransferError("the resident arrived damaged", "standard input", "deploy again")
    _write(f"{folder}/resident", content, flush=True)
    place = f"{root}/resident/{resident['id']}.pyz"
    os.replace(f"{folder}/resident", place)  # noqa: PTH105
    from dflash_ops.resident.compiled import place_beside, write_compiled

    write_compiled(f"{folder}/compiled", content)
    os.replace(f"{folder}/compiled", place_beside(place))  # noqa: PTH105
    sync_folder(f"{root}/resident")


def use(root: str | Path, id: str, token: str) -> dict[str, Any]:
    """`resident/current.pyz` -> `<id>.pyz`, by rename."""
    folder = f"{root}/resident"
    if not os.path.isfile(f"{folder}/{id}.pyz"):  # noqa: PTH113
        raise TransferError("the resident that was sent is not there any more", folder, "deploy again")
    beside = f"{folder}/.current-{token}"
    os.symlink(f"{id}.pyz", beside)  # noqa: PTH211
    os.replace(beside, f"{folder}/current.pyz")  # noqa: PTH105
    sync_folder(folder)
    return {"schema": 1, "resident": id}


def _unpack(stream: Stream, folder: str, files: list[Entry], *, take: bool) -> list[Entry]:
    """What comes, in its place; gives what did not come, which is an error without `take`."""
    left = {f"release/{f.path}": f for f in files}
    made: set[str] = set()
    for member in members(stream):
        entry = left.pop(member.name, None)
        if entry is None:
            raise TransferError(f"the stream holds something that was not announced: {member.name!r}", "tar stream")
        if (entry.link is None) != (member.link is None):
            raise TransferError(f"{member.name!r} arrived as something else than a file", "tar stream")
        path = f"{folder}/{member.name}"
        _make_parent(path, made)
        if entry.link is not None:
            os.symlink(entry.link, path)  # noqa: PTH211
        else:
            write_checked(member.pieces(), path, entry)
    if left and not take:
        raise TransferError(
            f"{len(left)} of {len(files)} files did not arrive, the first is {next(iter(left))}",
            "tar stream",
            "deploy again",
        )
    for name in [n for n, e in left.items() if e.link is not None]:
        _make_parent(f"{folder}/{name}", made)
        os.symlink(str(left.pop(name).link), f"{folder}/{name}")  # noqa: PTH211
    return list(left.values())


def _take(stock: Stock, folder: str, left: list[Entry]) -> set[str]:
    """Copy what did not come from other releases; gives the names that nobody has."""
    made: set[str] = set()
    gone = set()
    for entry in left:
        path = f"{folder}/release/{entry.path}"
        _make_parent(path, made)
        if not stock.copy(entry, path):
            gone.add(entry.path)
    return gone


def _make_parent(path: str, made: set[str]) -> None:
    parent = path.rpartition("/")[0]
    if parent not in made:
        os.makedirs(parent, 0o755, exist_ok=True)  # noqa: PTH103
        made.add(parent)


def _write(path: str, content: bytes, *, flush: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with open(fd, "wb") as file:
        file.write(content)
        if flush:
            file.flush()
            os.fsync(fd)


def _settle(new: str, releases: str, release: Manifest, token: str) -> str | None:
    """Rename the whole release into place; a damaged one of the same name is kept aside. Its name, or None."""
    place = f"{releases}/{release.id}"
    kept: str | None = None
    if os.path.lexists(place):
        if not damaged_files(place, release.files):
            return None  # somebody else was faster with the same content
        kept = f".damaged-{release.id}-{token}"
        os.rename(place, f"{releases}/{kept}")  # noqa: PTH104
    os.rename(new, place)  # noqa: PTH104
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
    print(plain.dumps(result), flush=True)
    return 0


def _say_error(error: DflashError) -> int:
    try:
        print(plain.dumps({"schema": 1, "error": error.to_json()}), flush=True)
    except BrokenPipeError:
        return 141  # nobody listens any more
    return error.exit_code


def main(args: list[str]) -> int:
    stream: Any = sys.stdin.buffer
    request = plain.loads(stream.readline())
    code = say(lambda: receive(stream, request))
    return after(stream, request["ask"]) if request.get("then") and code == 0 else code


def after(stream: Input, asked: dict[str, Any] | None) -> int:
    """The upload that follows a question on the same input, if one does: its request is the next line.

    `asked`: the manifest that the question was about; the request has `"release": "asked"` for it.
    """
    line = stream.readline()
    if not line:
        return 0  # nobody wants anything more

    def work() -> dict[str, Any]:
        if not line.endswith(b"\n"):
            raise TransferError("the stream ended early", "standard input", "deploy again")
        request = plain.loads(line)
        if request.get("release") == "asked":
            request["release"] = asked
        return receive(stream, request)

    return say(work)
