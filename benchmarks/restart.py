"""How long it takes to go on: after a target's death, a drafter's death, and a stop, against a whole start.

    python benchmarks/restart.py

One run with two targets on the CPU. Measured from its lines and metrics: from the start to the first step; the longest
pause of training around the kill of a target, and until that target works again; from the kill of a drafter to the next
step; and from the start of a resumed run to its first step. Here all of them load little: with a large target a whole
start also loads it, a drafter's restart does not.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from parts import Launcher, write_config

STEP = r"^dflash step="


def steady(launcher: Launcher) -> float:
    """A moment at which training is under way."""
    at = launcher.until(STEP)
    for _ in range(4):
        at = launcher.until(STEP, after=at)
    return time.monotonic()


def longest_pause(launcher: Launcher, begin: float, end: float) -> float:
    """Longest time without a progress line between two moments."""
    times = [begin, *(at for at, line in launcher.lines if begin < at < end and line.startswith("dflash step=")), end]
    return max(b - a for a, b in itertools.pairwise(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as name:
        root = Path(name)
        config = write_config(
            root, samples=64, length=64, train={"epochs": 10**5, "anchors": 8},
            workers={"target_devices": ["cpu", "cpu"]}, checkpoint={"every": 50},
        )  # fmt: skip
        first = Launcher(root, config, 1)
        try:
            fresh = first.until(STEP) - first.began
            killed = steady(first)
            os.kill(first.worker("target0"), signal.SIGKILL)
            first.until(r"event=worker_start worker=target0 life=1", after=killed)
            back = killed
            limit = time.monotonic() + 120
            while True:  # until a progress line says that the new life computes
                if time.monotonic() > limit:
                    raise RuntimeError(first.tail())
                back = first.until(STEP, after=back)
                now = first.metrics()[-1]["workers"]["target0"]
                if now["life"] == 1 and now["compute"] > 0:
                    break
            pause = longest_pause(first, killed, back)
            target = back - killed
            drafter = _drafter(first)
            if first.process.poll() is None and first.stop() != 3:
                raise RuntimeError(first.tail())
        finally:
            first.close()
        resumed = min(_resumed(root, config, attempt) for attempt in (2, 3))
    print(f"a whole start to the first step        {fresh:6.2f} s")
    print(f"a resumed start to its first step      {resumed:6.2f} s")
    print(f"a killed target works again after      {target:6.2f} s, training paused {pause:.2f} s meanwhile")
    print(f"a killed drafter: next step after      {'the run ended' if drafter is None else f'{drafter:6.2f} s'}")
    print(f"ratio  training's pause for a killed target, of a whole start: {pause / fresh:.3f}")
    print(f"ratio  resumed start, of a whole start: {resumed / fresh:.2f}")
    said = "none" if drafter is None else f"{drafter / fresh:.2f}"
    print(f"ratio  killed drafter until the next step, of a whole start: {said}")
    return 0


def _resumed(root: Path, config: Path, attempt: int) -> float:
    """Seconds from a resumed start to its first step."""
    launcher = Launcher(root, config, attempt)
    try:
        launcher.until(r"event=resumed")
        first = launcher.until(STEP) - launcher.began
        launcher.stop()
    finally:
        launcher.close()
    return first


def _drafter(launcher: Launcher) -> float | None:
    """Seconds from a drafter's kill to the next step, None where that ends the run."""
    killed = steady(launcher)
    os.kill(launcher.worker("drafter0"), signal.SIGKILL)
    try:
        started = launcher.until(r"event=worker_start worker=drafter0", after=killed)
        return launcher.until(STEP, after=started) - killed
    except RuntimeError:
        if launcher.process.poll() is None:
            raise
        return None


if __name__ == "__main__":
    sys.exit(main())
