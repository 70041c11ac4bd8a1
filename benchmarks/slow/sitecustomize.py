"""Stages of known length: with this folder on PYTHONPATH a target's forward and a drafter's step sleep, too.

    BENCH_TARGET_S, BENCH_DRAFTER_S: seconds that each takes at least (a sleep for what the computation leaves of them)

Python runs a `sitecustomize` at every start. The trainer knows nothing of it: the two methods are wrapped when their
module is imported. With sleeps in place of computation many pipelines run side by side on two cores, and each one's
speed is its own.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from types import ModuleType
from typing import Any

#: Module -> (class, method, variable that holds the seconds).
STAGES = {
    "trainer.target": ("Target", "features", "BENCH_TARGET_S"),
    "trainer.drafter_worker": ("DrafterWorker", "train", "BENCH_DRAFTER_S"),
}


def at_least(seconds: float, work: Any) -> Any:
    @functools.wraps(work)
    def wrapped(*args: Any, **named: Any) -> Any:
        began = time.monotonic()
        done = work(*args, **named)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return done

    return wrapped


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; of the two modules it has the loader wrap a method once they were executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        stage = STAGES.get(name)
        if stage is None or not os.environ.get(stage[2]):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            owner = getattr(module, stage[0])
            setattr(owner, stage[1], at_least(float(os.environ[stage[2]]), getattr(owner, stage[1])))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
