"""Stages of known length, for the benchmark and the tests of `dflash_ops.balance`; no part of the product.

A worker process whose PYTHONPATH has this folder sleeps before it ends a stage, so that the stage lasts as long as
asked for whatever the machine is doing. Nothing happens without DFLASH_SLOW_STAGES, a JSON object of seconds:
`{"target": 0.2, "drafter": 0.3, "average": 0.1, "vary": 0.0}`; `vary` = standard deviation of each, relative.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

_WANTED = json.loads(os.environ.get("DFLASH_SLOW_STAGES", "{}"))


def _slow_down() -> None:
    from trainer.stopwatch import Stopwatch

    lap, rng = Stopwatch.lap, random.Random(os.getpid())
    before = ""

    def slow(self: Stopwatch, kind: str) -> None:
        nonlocal before
        role = sys.argv[1] if len(sys.argv) > 1 else ""
        # A target computes once a batch; a drafter in two laps, of which the first follows its copy.
        if kind == "compute" and (role in ("target", "reader") or (role == "drafter" and before == "copy")):
            stage = "drafter" if role == "drafter" else "target"
        elif kind == "sync" and before == "wait":
            stage = "average"
        else:
            stage = ""
        seconds = _WANTED.get(stage, 0.0)
        if seconds:
            vary = _WANTED.get("vary", 0.0)
            time.sleep(rng.gammavariate(vary**-2, seconds * vary**2) if vary else seconds)
        before = kind
        lap(self, kind)

    Stopwatch.lap = slow


if _WANTED:
    _slow_down()
