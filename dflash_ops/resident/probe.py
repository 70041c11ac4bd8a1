"""What is there already? run through deploy/boot.py: one question before a deploy (docs/deploy.md).

Standard input: one line of JSON `{root, release, resident, resident_bytes, venv, then}`. Nothing is changed; with
`then` an upload may follow on the same input, as resident/receive.py says.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dflash_ops.contracts import Layout, Release, Snapshot, from_dict, to_dict
from dflash_ops.resident import attempts, daemon, journal, venv
from dflash_ops.resident.content import damaged_files, lacking
from dflash_ops.resident.watch import Watcher


@dataclass(frozen=True)
class Probe:
    """The answer.

    `release` is `none` (the job has none), `missing`, `whole` or `damaged` (then `damaged` names some files);
    `resident` = whether the zipapp of the asked id is there; `current` = id that `current` points to;
    `lacking` = indices of the release's files whose content must travel, where the release is missing or damaged;
    `venv` = what `resident.venv.look` says, empty for a job without one;
    `topology` = targets and drafters of the last deploy, None where it said none;
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
    lacking: tuple[int, ...] = ()
    topology: tuple[int, int] | None = None
    venv: dict[str, Any] = field(default_factory=dict)
    schema: int = 1


def probe(request: dict[str, Any]) -> dict[str, Any]:
    layout = Layout(Path(request["root"]))
    release = from_dict(Release, request["release"], "manifest") if request.get("release") else None
    state, damaged, absent = "none", [], []
    if release is not None:
        folder = layout.release(release.id)
        state = "missing"
        if os.path.lexists(folder):
            damaged = damaged_files(folder, release.files)
            state = "damaged" if damaged else "whole"
        absent = lacking(layout.root, release.files) if state != "whole" else []
    answer = Probe(
        now=time.time(),
        release=state,
        resident=_resident(layout.resident / f"{request['resident']}.pyz", request.get("resident_bytes")),
        damaged=tuple(damaged[:5]),
        current=_current(layout),
        snapshot=_snapshot(layout),
        launcher=_launcher(layout),
        python=platform.python_version(),
        machine=platform.node(),
        lacking=tuple(absent),
        topology=_topology(layout),
        venv=venv.look(layout.root, request["venv"]) if request.get("venv") else {},
    )
    return dict(to_dict(answer))


def _resident(place: Path, size: int | None) -> bool:
    try:
        info = place.lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and size in (None, info.st_size)


def _current(layout: Layout) -> str | None:
    try:
        return layout.current.readlink().name
    except OSError:
        return None


def _topology(layout: Layout) -> tuple[int, int] | None:
    """Targets and drafters of the newest `deployed` event."""
    for event in reversed(journal.read(layout.journal)[0]):
        if event.event == "deployed":
            devices = event.data.get("devices")
            if isinstance(devices, dict) and devices:
                return len(devices.get("target") or ()), len(devices.get("drafter") or ())
            return None
    return None


def _snapshot(layout: Layout) -> Snapshot | None:
    if not attempts.numbers(layout):
        return None
    return Watcher(layout, daemon.last_snapshot(layout)).look(None)


def _launcher(layout: Layout) -> int | None:
    last = attempts.last(layout)
    return last.start.launcher.pid if last is not None and last.start is not None and last.launcher_alive else None


def main(args: list[str]) -> int:
    from dflash_ops.resident.receive import after, say
    from dflash_ops.resident.tmux import clean_environment

    clean_environment()
    stream: Any = sys.stdin.buffer
    request = json.loads(stream.readline())
    code = say(lambda: probe(request))
    return after(stream, request["release"]) if request.get("then") and code == 0 else code
