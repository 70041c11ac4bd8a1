"""What is there already? run through deploy/boot.py: one question before a deploy (docs/deploy.md).

Standard input: one line of JSON `{root, release, resident}`. Nothing is changed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dflash_ops.contracts import Layout, Release, Snapshot, from_dict, to_dict
from dflash_ops.resident import attempts, daemon
from dflash_ops.resident.receive import damaged_files
from dflash_ops.resident.watch import Watcher


@dataclass(frozen=True)
class Probe:
    """The answer.

    `release` is `none` (the job has none), `missing`, `whole` or `damaged` (then `damaged` names some files);
    `resident` = whether the zipapp of the asked id is there; `current` = id that `current` points to;
    `snapshot` = the job's state now, None where nothing was ever started; `launcher` = pid of the living launcher;
    `now` = that machine's clock.
    """

    SCHEMA: ClassVar[int] = 1

    now: float
    release: str
    resident: bool
    damaged: tuple[str, ...] = ()
    current: str | None = None
    snapshot: Snapshot | None = None
    launcher: int | None = None
    python: str = ""
    machine: str = ""
    schema: int = 1


def probe(request: dict[str, Any]) -> dict[str, Any]:
    layout = Layout(Path(request["root"]))
    release = from_dict(Release, request["release"], "manifest") if request.get("release") else None
    state, damaged = "none", []
    if release is not None:
        folder = layout.release(release.id)
        state = "missing"
        if os.path.lexists(folder):
            damaged = damaged_files(folder, release.files)
            state = "damaged" if damaged else "whole"
    answer = Probe(
        now=time.time(),
        release=state,
        resident=(layout.resident / f"{request['resident']}.pyz").is_file(),
        damaged=tuple(damaged[:5]),
        current=_current(layout),
        snapshot=_snapshot(layout),
        launcher=_launcher(layout),
        python=platform.python_version(),
        machine=platform.node(),
    )
    return dict(to_dict(answer))


def _current(layout: Layout) -> str | None:
    try:
        return layout.current.readlink().name
    except OSError:
        return None


def _snapshot(layout: Layout) -> Snapshot | None:
    if not attempts.numbers(layout):
        return None
    return Watcher(layout, daemon.last_snapshot(layout)).look(None)


def _launcher(layout: Layout) -> int | None:
    last = attempts.last(layout)
    return last.start.launcher.pid if last is not None and last.start is not None and last.launcher_alive else None


def main(args: list[str]) -> int:
    from dflash_ops.resident.receive import say
    from dflash_ops.resident.tmux import clean_environment

    clean_environment()
    raw = sys.stdin.buffer.readline()
    return say(lambda: probe(json.loads(raw)))
