"""How busy the drafters are kept when the targets suffice: a run of real processes on the CPU, by its own metrics.

    python benchmarks/pipeline.py [--steps 40] [--drafters 1] [--readers]

The drafter's step is several times as long as the target's forward: nothing but the pipeline can make it wait.
`--readers`: features from disk in place of the target.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from parts import ROOT, Launcher, write_config

#: Progress lines that do not count: the ring is filled, caches are warm.
WARM_UP = 3


def shares(metrics: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each worker's mean share of the time of wait, compute, copy and sync, over the lines behind the warm-up."""
    counted, before = metrics[WARM_UP:], metrics[WARM_UP - 1]["t"]
    sums: dict[str, dict[str, float]] = {}
    for entry in counted:
        seconds = entry["t"] - before
        before = entry["t"]
        for name, found in entry["workers"].items():
            mine = sums.setdefault(name, dict.fromkeys(("wait", "compute", "copy", "sync"), 0.0))
            for kind in mine:
                mine[kind] += seconds * found[kind]
    whole = counted[-1]["t"] - metrics[WARM_UP - 1]["t"]
    return {name: {kind: value / whole for kind, value in mine.items()} for name, mine in sums.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of each drafter")
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument("--readers", action="store_true", help="features from disk")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as name:
        root = Path(name)
        config = write_config(
            root, samples=2 * given.drafters * given.steps, length=256,
            drafter={"layers": 3}, train={"anchors": 64, "log_every": 4, "average_every": 10},
            workers={"drafter_devices": ["cpu"] * given.drafters},
            features={"path": str(root / "features")}, checkpoint={"every": 10**6},
        )  # fmt: skip
        arguments: list[str] = []
        if given.readers:
            command = [sys.executable, "-m", "trainer", "features", "--config", str(config)]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
            arguments = ["--targets", "0"]
        launcher = Launcher(root, config, 1, *arguments)
        try:
            if launcher.process.wait(120) != 0:
                raise RuntimeError(launcher.tail())
            found = shares(launcher.metrics())
        finally:
            launcher.close()
    print(f"{'worker':10} {'wait':>6} {'compute':>8} {'copy':>6} {'sync':>6}")
    for worker, mine in found.items():
        print(f"{worker:10} {mine['wait']:6.1%} {mine['compute']:8.1%} {mine['copy']:6.1%} {mine['sync']:6.1%}")
    busy = min(1 - mine["wait"] for worker, mine in found.items() if worker.startswith("drafter"))
    print(f"ratio  drafter busy, of the run's time: {busy:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
