"""The job's checkpoints as folders: what is there, what is whole, what was set aside, and how it comes back.

The rules here: nothing is deleted and nothing overwritten, a move is a rename; a checkpoint is believed only after size
and hash of every file were compared with its manifest, and what has no manifest is neither good nor bad (`null`). What
was hashed once is not hashed again while its files are the same (name, size, time of change): run/verified.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Layout
from dflash_ops.errors import DflashError, StateError, UsageError
from dflash_ops.resident import journal
from dflash_ops.resident.answer import say
from dflash_ops.resident.aside import MANIFEST, aside, folder_of, move_some, refuse_if_alive
from dflash_ops.resident.files import read_json, run_lock, sync_folder, write_atomic

#: The last number in a name is its step: step-00000100, checkpoint-500, epoch1-step20.pt.
_STEP = re.compile(r"(\d+)(?!.*\d)")
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Found:
    """One checkpoint. `verified` None: nobody looked, or it has no manifest; `fault` says what is wrong with it."""

    step: int
    path: Path
    bytes: int
    t: float
    verified: bool | None = None
    fault: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "path": str(self.path), "bytes": self.bytes, "t": self.t,
                "verified": self.verified, "fault": self.fault}  # fmt: skip


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="checkpoints")
    parser.add_argument("what", choices=("list", "verify", "aside", "restore"))
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--checkpoints", type=Path, default=None, help="the folder; default: of the job last started")
    parser.add_argument("--step", type=int, action="append", default=[], help="verify, aside: only these")
    parser.add_argument("--newer-than", type=int, default=None, metavar="STEP", help="aside: those of later steps")
    parser.add_argument("--stamp", default="", help="restore: which of those that were set aside")
    parser.add_argument("--reason", default="")
    parser.add_argument("--actor", default="operator")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    layout.run.mkdir(parents=True, exist_ok=True)
    folder = folder_of(layout, options.checkpoints)
    if options.what in ("list", "verify"):
        found = listing(folder, verify=options.what == "verify", layout=layout, steps=options.step)
        say(
            {
                "schema": 1,
                "folder": str(folder),
                "checkpoints": [f.to_json() for f in found],
                "aside": set_aside(layout, folder),
            }
        )
        return 0
    with run_lock(layout.lock, f"checkpoints {options.what}"):
        refuse_if_alive(layout)
        if options.what == "restore":
            say(restore(layout, folder, options.stamp, options.actor))
        elif options.step or options.newer_than is not None:
            say(aside_some(layout, folder, options.step, options.newer_than, options.reason, options.actor))
        else:
            say(aside(layout, options.reason, options.actor, folder))
    return 0


def step_of(name: str) -> int | None:
    found = None if name.startswith(".") else _STEP.search(name)
    return int(found[1]) if found else None


def listing(
    folder: Path, *, verify: bool = False, layout: Layout | None = None, steps: Iterable[int] = ()
) -> list[Found]:
    """Checkpoints, newest first; with `verify` each is checked (of `steps` only, if any are named).

    Raises:
        UsageError: a named step is not there.
        OSError: the folder cannot be read.
    """
    wanted = set(steps)
    found = []
    if folder.is_dir():
        for entry in os.scandir(folder):
            step = step_of(entry.name)
            if step is not None and (not wanted or step in wanted):
                found.append(Found(step, Path(entry.path), _size(Path(entry.path)), entry.stat().st_mtime))
    if missing := wanted - {f.step for f in found}:
        there = ", ".join(str(f.step) for f in listing(folder)[:10]) or "none"
        raise UsageError(f"there is no checkpoint of step {min(missing)}", str(folder), f"there are: {there}")
    found.sort(key=lambda f: (f.step, f.t), reverse=True)
    if not verify:
        return found
    return _verified(found, folder, layout, lambda one, good: True)


def down_to_whole(folder: Path, layout: Layout, until: float = math.inf) -> list[Found]:
    """All of them, newest first; those from step `until` on are checked, down to the first that is whole."""
    return _verified(listing(folder), folder, layout, lambda one, good: not good and one.step <= until)


def _verified(
    found: Sequence[Found], folder: Path, layout: Layout | None, wanted: Callable[[Found, bool], bool]
) -> list[Found]:
    """With those checked that are `wanted` (asked with: was one whole already?); what was learned is kept."""
    known = _known(layout)
    good = False
    checked = []
    for one in found:
        checked.append(_checked(one, known) if wanted(one, good) else one)
        good = good or bool(checked[-1].verified)
    if layout is not None:
        there = {str(entry) for entry in folder.iterdir()} if folder.is_dir() else set()
        kept = {path: entry for path, entry in known.items() if path in there}
        with contextlib.suppress(OSError):  # it only saves time
            write_atomic(layout.run / "verified.json", json.dumps(kept).encode(), sync=False)
    return checked


def check(path: Path) -> tuple[bool | None, str]:
    """(True, "") whole; (False, what is wrong); (None, why) where there is no manifest to hold it against."""
    if not path.is_dir():
        return None, "a single file, which has no manifest"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = {str(name): (int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
    except FileNotFoundError:
        return None, "it has no manifest.json"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return False, f"manifest.json cannot be read: {error}"
    for name, (size, digest) in sorted(files.items()):
        file = path / name
        try:
            real = file.stat().st_size
            if real != size:
                return False, f"{name} has {real} bytes, the manifest says {size}"
            if _sha256(file) != digest:
                return False, f"{name} does not have the hash that the manifest says"
        except OSError as error:
            return False, f"{name} cannot be read: {error.strerror}"
    return True, ""


def _checked(found: Found, known: dict[str, Any]) -> Found:
    stamp = _stamp(found.path)
    entry = known.get(str(found.path))
    if isinstance(entry, dict) and entry.get("stamp") == stamp:
        good, fault = entry.get("verified"), str(entry.get("fault", ""))
    else:
        good, fault = check(found.path)
        known[str(found.path)] = {"stamp": stamp, "verified": good, "fault": fault}
    return Found(found.step, found.path, found.bytes, found.t, good, fault)


def _known(layout: Layout | None) -> dict[str, Any]:
    if layout is None:
        return {}
    try:
        known = read_json(layout.run / "verified.json")
    except StateError:
        return {}
    return dict(known) if isinstance(known, dict) else {}


def _stamp(path: Path) -> str:
    entries = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            info = file.stat()
            entries.append((file.name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino))
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(f.lstat().st_size for f in path.rglob("*") if not f.is_dir())


# ---- aside and back


def aside_some(
    layout: Layout, folder: Path, steps: Iterable[int], newer_than: int | None, reason: str, actor: str
) -> dict[str, Any]:
    """Set single checkpoints aside: of these steps, and of all later than `newer_than`.

    Raises:
        UsageError: a named step is not there.
    """
    named = set(steps)
    if named:
        listing(folder, steps=named)
    names = [
        f.path.name for f in listing(folder) if f.step in named or (newer_than is not None and f.step > newer_than)
    ]
    return move_some(layout, folder, names, reason, actor)


def set_aside(layout: Layout, folder: Path) -> list[dict[str, Any]]:
    """What was set aside and can be brought back, newest first: `{stamp, path, t, reason, files, bytes}`."""
    found = []
    for base in {layout.aside, folder.with_name(f"{folder.name}.aside")}:
        for path in base.glob(f"*/{MANIFEST}") if base.is_dir() else ():
            try:
                said = read_json(path)
            except StateError:
                continue  # a damaged manifest hides only its own folder, which stays where it is
            if isinstance(said, dict) and Path(str(said.get("to", ""))).is_dir():
                found.append({"stamp": path.parent.name, "path": str(said["to"]), "t": said.get("t"),
                              "reason": said.get("reason", ""), "files": len(said.get("files", ())),
                              "bytes": said.get("bytes", 0)})  # fmt: skip
    return sorted(found, key=lambda f: str(f["stamp"]), reverse=True)


def restore(layout: Layout, folder: Path, stamp: str, actor: str) -> dict[str, Any]:
    """Bring back what was set aside (the newest, or `stamp`); each checkpoint by a rename.

    Raises:
        UsageError: nothing of that name was set aside.
        DflashError: a checkpoint of the same name is there now; nothing was moved.
    """
    there = set_aside(layout, folder)
    chosen = next((a for a in there if not stamp or a["stamp"] == stamp), None)
    if chosen is None:
        known = ", ".join(str(a["stamp"]) for a in there[:10]) or "nothing was set aside"
        raise UsageError(f"there is no {stamp or 'folder'} to bring back", str(layout.aside), f"there are: {known}")
    source = Path(str(chosen["path"]))
    names = sorted(entry.name for entry in os.scandir(source))
    folder.mkdir(parents=True, exist_ok=True)
    if taken := [name for name in names if not name.startswith(".") and os.path.lexists(folder / name)]:
        raise DflashError(
            f"a checkpoint {taken[0]} is there now, so the one that was set aside cannot come back",
            str(folder),
            "set the present ones aside first: dflash-ops checkpoints aside",
        )
    names = [name for name in names if not os.path.lexists(folder / name)]
    data = {"from": str(source), "to": str(folder), "names": names}
    journal.append(layout.journal, "checkpoints_restored", actor=actor, data=data)
    for name in names:
        (source / name).rename(folder / name)
    sync_folder(folder)
    done = source.parent / MANIFEST
    with contextlib.suppress(OSError):
        done.rename(done.with_name(f"restored-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"))
    return {"schema": 1, "restored": len(names), "stamp": chosen["stamp"], "from": str(source), "to": str(folder)}
