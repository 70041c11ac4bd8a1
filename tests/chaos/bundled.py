"""Faults of the bundled trainer: one target and one drafter on the CPU, with a tiny random target made on the spot."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resident_lab import wait_for  # type: ignore[import-not-found]

from chaos.scene import Scene
from dflash_ops.contracts import RemedyTable, from_dict
from dflash_ops.resident import attempts, proc

REPO = Path(__file__).parents[2]
if str(REPO / "tests" / "trainer") not in sys.path:
    sys.path.append(str(REPO / "tests" / "trainer"))


@functools.cache
def _target() -> tempfile.TemporaryDirectory[str]:
    """Made once a process; gone with it."""
    from pipeline_support import write_target  # type: ignore[import-not-found]

    made = tempfile.TemporaryDirectory(prefix="dflash-chaos-target-")
    write_target(Path(made.name))
    return made


def bundled(bad_from: int | None = None, **config: Any) -> Callable[[Scene], dict[str, Any]]:
    """The job. `bad_from`: the sample from which on the data holds tokens that the target does not have."""

    def changes(scene: Scene) -> dict[str, Any]:
        from pipeline_support import make_job, write_samples

        data = write_samples(Path(scene.one.root) / "data.jsonl", 400)
        if bad_from is not None:
            lines = data.read_text().splitlines()
            lines[bad_from] = json.dumps({"input_ids": [999_999] * 20, "prompt_length": 5})
            data.write_text("\n".join(lines) + "\n")
        values = {"train.epochs": 50, "checkpoint.every": 10, **config}
        run = make_job(Path(scene.one.root) / "job", Path(_target().name), data=data, **values)
        devices = {"workers.target_devices": ["cpu"], "workers.drafter_devices": ["cpu"]}
        table = from_dict(RemedyTable, json.loads((REPO / "trainer" / "remedies.json").read_text()), "remedies.json")
        argv = (sys.executable, "-m", "trainer", "run", "--config", str(run.config), "--out", "{attempt}")
        return {
            "argv": (*argv, "--checkpoints", "{checkpoints}", "--resume", "auto"),
            "cwd": str(REPO),
            "env": {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
            "progress": "",
            "remedies": RemedyTable(table.ways, {**table.values, **devices}, table.reasons),
        }

    return changes


def loses(worker: str) -> Callable[[Scene], None]:
    """One worker is killed; the trainer itself starts it again and goes on, and the supervisor lets it."""

    def during(scene: Scene) -> None:
        scene.steps(5)
        launcher = scene.one.launcher()
        (found,) = [
            p for p in proc.family(launcher) if worker in (line := _line(p.pid)) and not line.endswith(" spare ")
        ]
        proc.send(found, signal.SIGKILL)
        log = attempts.read(scene.one.layout, 1).layout.log
        wait_for(lambda: "event=worker_exit worker=" + worker in log.read_text("utf-8", "replace"), "its end", 60)
        at = scene.one.snapshot().progress
        scene.steps((at.step or 0) + 5 if at else 5)

    return during


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""  # it has just ended: it is not the one


def cuts_the_newest(scene: Scene) -> None:
    """The launcher is held, its newest checkpoint is cut, and it is killed."""
    scene.steps(35)
    launcher = scene.one.launcher()
    held = (launcher, *proc.family(launcher))
    for process in held:
        proc.send(process, signal.SIGSTOP)
    newest = max(scene.saves.glob("step-*"))
    scene.notes["newest"] = newest.name
    weights = max((p for p in newest.iterdir() if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(weights, weights.stat().st_size // 2)
    proc.send(launcher, signal.SIGKILL)
    for process in held:
        proc.send(process, signal.SIGCONT)  # a saver that is held would never see that its launcher is gone


def newest_is_aside(scene: Scene) -> None:
    aside = scene.one.ok("checkpoints", "list")["aside"]
    there = {p.name for one in aside for p in Path(one["path"]).glob("step-*")}
    assert scene.notes["newest"] in there, there
