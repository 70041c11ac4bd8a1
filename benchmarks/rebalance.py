"""`dflash-ops rebalance`, from split to split of one running job: predicted, measured, and what became of the training.

    python benchmarks/rebalance.py [--splits 2+1 1+2 2+2 3+1] [--target 0.3] [--drafter 0.4] [--average 0.1]

A job of the bundled trainer on this machine's CPU, deployed and rebalanced by the command line itself, with real
processes, gate, checkpoints and tmux; its stages sleep (benchmarks/slow_stages), so that 4 workers on 2 cores behave
like 4 devices. Each prediction is made from what the split before it measured. At the end the record of the training
(`trainer audit`) says whether each sample was trained once an epoch; the loss stands on both sides of each change.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from ending import end_supervisors, kill_recorded
from parts import MASK, ROOT, write_samples, write_target

from dflash_ops.deploy.toml import dump_toml

#: Steps between two averagings, and between two records: each holds one whole round.
ROUND = 4
#: Rounds before a split is predicted from; for settling; that are measured.
BEFORE, SETTLE, MEASURE = 8, 2, 8
LIMIT_S = 600.0


class Job:
    """One job in a folder of its own, and the command line to it."""

    def __init__(self, folder: Path, stages: dict[str, float]) -> None:
        self.folder, self.root = folder, folder / "root"
        self.socket = f"dflash-bench-{secrets.token_hex(4)}"
        python = os.path.realpath(sys.executable)
        slow = {"PYTHONPATH": str(ROOT / "benchmarks/slow_stages"), "DFLASH_SLOW_STAGES": json.dumps(stages)}
        trainer = {
            "target_devices": ["cpu"],
            "drafter_devices": ["cpu"],
            "target": {"path": str(write_target(folder / "target"))},
            "drafter": {"layers": 1, "block_size": 8, "taps": 1, "mask_token_id": MASK},
            "data": {
                "path": str(write_samples(folder / "data.jsonl", 256, 32)),
                "max_length": 32, "buckets": [32], "batch_size": 2,
            },
            "train": {"epochs": 1000, "anchors": 4, "average_every": ROUND, "log_every": ROUND},
            "checkpoint": {"every": 10**6},
        }  # fmt: skip
        job = {
            "host": "here", "root": str(self.root), "session": "bench", "socket": self.socket, "trainer": trainer,
            "interpreter": sys.executable, "env": {"OMP_NUM_THREADS": "1", **slow}, "watch_s": 300, "grace_s": 60,
        }  # fmt: skip
        self.inventory = folder / "inventory.toml"
        hosts = {"here": {"kind": "local", "python": python}}
        self.inventory.write_text(dump_toml({"schema": 1, "hosts": hosts, "jobs": {"bench": job}}), "utf-8")

    def ops(self, *words: str) -> dict[str, Any]:
        """One command of dflash-ops with --json; its answer.

        Raises:
            RuntimeError: it failed.
        """
        argv = [sys.executable, "-m", "dflash_ops.cli.main", words[0], "-i", str(self.inventory), *words[1:], "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    def records(self, attempt: int) -> list[dict[str, Any]]:
        file = self.root / f"run/attempts/{attempt}/metrics.jsonl"
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []

    def until(self, attempt: int, count: int) -> None:
        """So many records of the attempt.

        Raises:
            RuntimeError: they do not come.
        """
        end = time.monotonic() + LIMIT_S
        while len(self.records(attempt)) < count:
            if time.monotonic() > end:
                raise RuntimeError(f"attempt {attempt} told {len(self.records(attempt))} of {count} records")
            time.sleep(0.2)

    def audit(self) -> dict[str, Any]:
        argv = [sys.executable, "-m", "trainer", "audit", str(self.root / "run/attempts"), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))

    def end(self) -> None:
        """Nothing of it is left."""
        end_supervisors(self.root)
        kill_recorded(self.root)
        subprocess.run(["tmux", "-L", self.socket, "kill-server"], capture_output=True, timeout=20)
        Path(f"/tmp/tmux-{os.getuid()}/{self.socket}").unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", nargs="+", default=["1+2", "2+1", "2+2", "3+1"], metavar="T+D")
    parser.add_argument("--target", type=float, default=0.3, help="seconds that a target sleeps for a batch")
    parser.add_argument("--drafter", type=float, default=0.4, help="that a drafter sleeps for a step")
    parser.add_argument("--average", type=float, default=0.1, help="that each sleeps in an averaging")
    given = parser.parse_args()
    splits = [tuple(map(int, text.split("+"))) for text in given.splits]
    devices = ",".join(["cpu"] * max(sum(split) for split in splits))
    worst, calm, attempt = 0.0, 0.0, 1
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as name:
        job = Job(Path(name), {"target": given.target, "drafter": given.drafter, "average": given.average})
        try:
            job.ops("deploy")
            print(
                f"{'split':>5} {'predicted':>9} {'interval':>12} {'measured':>8} {'off':>6} {'median':>7} {'off':>6}"
                f"  {'loss before, after':>18}  {'no training':>11}"
            )
            for targets, drafters in splits:
                job.until(attempt, BEFORE)
                said = job.ops(
                    "rebalance", "--targets", str(targets), "--drafters", str(drafters), "--devices", devices,
                    "--settle", str(SETTLE * ROUND), "--measure", str(MEASURE * ROUND), "--no-back",
                )  # fmt: skip
                before, after = job.records(attempt)[-1], job.records(said["attempt"])[0]
                attempt = said["attempt"]
                found, seen = said["predicted"], said["measured"]["block_tok_s"]
                # The median of its intervals: what the split does while the machine does nothing else.
                typical = statistics.median(r["block_tok_s"] for r in job.records(attempt)[SETTLE + 1 :])
                off, quiet = (found["block_tok_s"] / value - 1 for value in (seen, typical))
                worst, calm = max(worst, abs(off)), max(calm, abs(quiet))
                interval = f"{found['low']:.0f} to {found['high']:.0f}"
                print(
                    f"{targets}+{drafters:<3} {found['block_tok_s']:9.1f} {interval:>12} {seen:8.1f} {off:6.1%} "
                    f"{typical:7.1f} {quiet:6.1%}  {before['loss']:10.4f} {after['loss']:7.4f}  "
                    f"{after['t'] - before['t']:9.1f} s",
                    flush=True,
                )
            job.ops("stop")
            audit = job.audit()
        finally:
            job.end()
    print(f"samples: {len(audit['epochs'])} epochs over {audit['attempts']} attempts, once each: {audit['ok']}")
    print(f"ratio  predicted against measured, largest difference: {worst:.3f}")
    print(f"ratio  predicted against the median interval, largest difference: {calm:.3f}")
    return 0 if audit["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
