"""`releases`: what is there, who uses it, and which old ones go.

The rule here: never the current one, never one that a living attempt runs from, never the one before it (what a
rollback would go to), and never one that is not ours to judge (its manifest is damaged).
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Layout, Release, from_dict
from dflash_ops.errors import ContractError, StateError
from dflash_ops.resident import attempts, journal
from dflash_ops.resident.answer import say
from dflash_ops.resident.files import read_json

#: How the folder of a release is called while it is being removed.
REMOVING = ".removing-"


@dataclass(frozen=True)
class Found:
    """One release that is there; `t` = when it came, `attempts` = those that ran from it, ascending."""

    id: str
    t: float
    files: int
    bytes: int
    source: str
    version: str
    attempts: tuple[int, ...]
    damaged: str = ""


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="releases")
    parser.add_argument("--root", required=True, type=Path)
    layout = Layout(parser.parse_args(args).root.absolute())
    say({"schema": 1, "kind": "releases", **listing(layout)})
    return 0


def listing(layout: Layout) -> dict[str, Any]:
    """`{current, running, previous, releases: [...]}`, the newest release first."""
    marks = used(layout)
    rows = [
        {
            "release": one.id,
            "t": one.t,
            "files": one.files,
            "bytes": one.bytes,
            "source": one.source,
            "version": one.version,
            "attempts": list(one.attempts),
            "damaged": one.damaged,
            "current": one.id == marks["current"],
            "running": one.id == marks["running"],
            "previous": one.id == marks["previous"],
        }
        for one in sorted(found(layout), key=lambda f: (f.t, f.id), reverse=True)
    ]
    return {**marks, "releases": rows}


def used(layout: Layout) -> dict[str, str | None]:
    """Ids of the release that `current` names, of the one that a living attempt runs from, and of the one before."""
    current: str | None = None
    with suppress(OSError):
        current = layout.current.readlink().name
    ran = [(n, release) for n in attempts.numbers(layout) if (release := _release_of(layout, n)) is not None]
    last = attempts.last(layout)
    alive = last is not None and (last.launcher_alive or last.wrapper_alive)
    running = ran[-1][1] if alive and last is not None and ran and ran[-1][0] == last.number else None
    newest = running or current
    before = [release for _, release in ran if release != newest]
    return {"current": current, "running": running, "previous": before[-1] if before else None}


def _release_of(layout: Layout, number: int) -> str | None:
    with suppress(StateError, OSError):
        said = read_json(layout.attempt(number).job)
        release = said.get("release") if isinstance(said, dict) else None
        return str(release) if release else None
    return None


def found(layout: Layout) -> Iterator[Found]:
    """Every release folder; of a damaged one only that."""
    by_release: dict[str, list[int]] = {}
    for number in attempts.numbers(layout):
        if (release := _release_of(layout, number)) is not None:
            by_release.setdefault(release, []).append(number)
    try:
        names = sorted(e.name for e in os.scandir(layout.releases) if not e.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        ran = tuple(by_release.get(name, ()))
        folder = layout.release(name)
        try:
            one = from_dict(Release, read_json(folder / ".release.json"), str(folder / ".release.json"))
            t = (folder / ".release.json").stat().st_mtime
            yield Found(name, t, len(one.files), sum(f.size for f in one.files), one.source, one.version, ran)
        except (StateError, ContractError, OSError) as error:
            yield Found(name, 0.0, 0, 0, "", "", ran, str(getattr(error, "what", error)))


def prune(layout: Layout, keep: int, actor: str) -> list[str]:
    """Remove the oldest releases beyond `keep`; gives their ids. One that cannot be removed stays, and is not counted.

    A release is renamed first, so that what is half removed is never taken for one.
    """
    for rest in layout.releases.glob(f"{REMOVING}*"):
        shutil.rmtree(rest, ignore_errors=True)
    kept = {id for id in used(layout).values() if id is not None}
    last_run = {one.id: max(one.attempts, default=0) for one in found(layout)}
    whole = sorted((f for f in found(layout) if not f.damaged), key=lambda f: (last_run[f.id], f.t), reverse=True)
    room = max(0, keep - sum(1 for f in whole if f.id in kept))
    old = [f.id for f in whole if f.id not in kept][room:]
    removed = []
    for id in old:
        beside = layout.releases / f"{REMOVING}{id}-{os.getpid()}"
        with suppress(OSError):
            layout.release(id).rename(beside)
            shutil.rmtree(beside, ignore_errors=True)
            removed.append(id)
    if removed:
        with suppress(OSError):
            journal.append(layout.journal, "releases_removed", actor=actor, data={"releases": removed, "keep": keep})
    return removed
