"""`aside`: move the checkpoints away, whole, so that one rename brings them back. Nothing is ever deleted."""

from __future__ import annotations

import argparse
import errno
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_ops.contracts import JobSpec, Layout
from dflash_ops.errors import DflashError, JobBusy
from dflash_ops.resident import attempts, journal, spec
from dflash_ops.resident.answer import say
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import load, run_lock, sync_folder, write_atomic

#: Beside each folder that was set aside.
MANIFEST = "manifest.json"


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="aside")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--reason", required=True)
    parser.add_argument("--actor", default="operator")
    parser.add_argument("--checkpoints", type=Path, default=None, help="the folder; default: of the job last started")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    layout.run.mkdir(parents=True, exist_ok=True)
    with run_lock(layout.lock, "aside"):
        say(aside(layout, options.reason, options.actor, options.checkpoints))
    return 0


def aside(layout: Layout, reason: str, actor: str = "operator", checkpoints: Path | None = None) -> dict[str, Any]:
    """Move the checkpoints folder to `checkpoints.aside/<UTC time>/checkpoints`, with a manifest beside it.

    A folder on another file system is moved beside itself instead: only a rename is whole or not at all.

    Raises:
        JobBusy: the job lives.
        DflashError: the folder cannot be renamed.
    """
    last = refuse_if_alive(layout)
    folder = folder_of(layout, checkpoints)
    if not folder.is_dir() or not any(folder.iterdir()):
        return _answer(folder, None, [])
    files = _listing(folder)
    place = _place(layout, folder)
    moved = place / folder.name
    mode = stat.S_IMODE(folder.stat().st_mode)
    more = {"attempt": last.number if last is not None else None, "restore": f"mv -T {moved} {folder}"}
    _write_down(layout, folder, moved, files, reason, actor, more, {"files": len(files)})
    try:
        folder.rename(moved)
    except OSError as error:
        (place / MANIFEST).unlink()
        place.rmdir()
        why = "it is a mount point" if error.errno in (errno.EBUSY, errno.EXDEV) else str(error.strerror)
        raise DflashError(
            f"the checkpoints folder cannot be moved: {why}", str(folder), "let the job write into a folder below it"
        ) from error
    folder.mkdir(mode=mode)
    sync_folder(folder.parent)
    return _answer(folder, moved, files)


def move_some(layout: Layout, folder: Path, names: Sequence[str], reason: str, actor: str) -> dict[str, Any]:
    """Single entries of the checkpoints folder set aside, each by a rename, with a manifest as `aside` writes it.

    Returns:
        `aside`'s answer; `moved` false where there is nothing to move.
    """
    if not names:
        return _answer(folder, None, [])
    chosen = set(names)
    files = [f for f in _listing(folder) if Path(str(f["path"])).parts[0] in chosen]
    moved = _place(layout, folder) / folder.name
    moved.mkdir()
    known = {"names": sorted(names)}
    _write_down(layout, folder, moved, files, reason, actor, {**known, "restore": f"mv -n {moved}/* {folder}"}, known)
    for name in names:
        (folder / name).rename(moved / name)
    sync_folder(moved)
    sync_folder(folder)
    return _answer(folder, moved, files)


def folder_of(layout: Layout, named: Path | None = None) -> Path:
    """The checkpoints folder (`named`, else that of the job last started), its links followed."""
    job = load(JobSpec, layout.job)
    folder = spec.checkpoints_folder(job, layout.root) if job is not None else layout.root / "checkpoints"
    return Path(os.path.realpath(layout.root / named if named is not None else folder))


def refuse_if_alive(layout: Layout) -> Attempt | None:
    """The newest attempt, if there is one.

    Raises:
        JobBusy: it lives, and writes its checkpoints.
    """
    last = attempts.last(layout)
    if last is not None and (last.launcher_alive or last.wrapper_alive):
        raise JobBusy("the job lives and writes there", str(last.layout.path), "stop it first")
    return last


def _answer(folder: Path, moved: Path | None, files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    to = str(moved) if moved is not None else None
    return {"schema": 1, "moved": to is not None, "from": str(folder), "to": to, "files": len(files),
            "bytes": _bytes(files)}  # fmt: skip


def _bytes(files: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(f["size"]) for f in files)


def _write_down(
    layout: Layout,
    folder: Path,
    moved: Path,
    files: Sequence[Mapping[str, Any]],
    reason: str,
    actor: str,
    manifest: Mapping[str, Any],
    event: Mapping[str, Any],
) -> None:
    """Manifest and journal, before anything is moved; `manifest` and `event` are what each says besides."""
    said = {"from": str(folder), "to": str(moved), "reason": reason, "bytes": _bytes(files)}
    whole = {"schema": 1, "t": time.time(), "actor": actor, **said, **manifest, "files": list(files)}
    write_atomic(moved.parent / MANIFEST, json.dumps(whole, ensure_ascii=False, indent=1).encode() + b"\n")
    journal.append(layout.journal, "checkpoints_aside", actor=actor, data={**said, **event})


def _place(layout: Layout, folder: Path) -> Path:
    """A new folder on the file system of the checkpoints: only there is a move a rename."""
    same = folder.stat().st_dev == layout.root.stat().st_dev
    base = layout.aside if same else folder.with_name(f"{folder.name}.aside")
    return _new_folder(base, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))


def _new_folder(base: Path, stamp: str) -> Path:
    """A folder that was not there; two moves in one second get two folders."""
    base.mkdir(parents=True, exist_ok=True)
    for number in range(1000):
        place = base / (stamp if number == 0 else f"{stamp}-{number}")
        try:
            place.mkdir()
            return place
        except FileExistsError:
            continue
    raise DflashError("no free name for the folder", str(base / stamp), "try again in a second")


def _listing(folder: Path) -> list[dict[str, Any]]:
    files = []
    for base, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(base) / name).is_symlink()]  # not walked into, but moved as well
        for name in (*names, *links):
            path = Path(base) / name
            info = path.lstat()
            files.append({"path": str(path.relative_to(folder)), "size": info.st_size, "mtime": info.st_mtime})
    return sorted(files, key=lambda f: str(f["path"]))
