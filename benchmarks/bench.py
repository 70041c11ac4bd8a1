"""All CPU benchmarks, one after the other, and one table of their ratios with goals.

    python benchmarks/bench.py [--only ring pipeline] [--list] [--strict] [--json]

A benchmark that fails, runs too long or does not say what it measured is broken: exit code 1. A goal that is missed is
said (`miss`); with --strict it ends with 1, too. What needs root and the lab of containers runs only there, what
needs a GPU or takes long only if it is named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Ratio:
    """One number of a benchmark's output: where it stands, what it is, and what it should be.

    Attributes:
        pattern: its group is the number. Of several the worst counts. text: for the table.
        goal: a number. most: the ratio should be at most it, not at least.
    """

    pattern: str
    text: str
    goal: float
    most: bool = False

    def found(self, output: str) -> float | None:
        never = math.inf if self.most else 0.0
        numbers = [never if found == "none" else float(found) for found in re.findall(self.pattern, output)]
        return (max(numbers) if self.most else min(numbers)) if numbers else None

    def passes(self, value: float) -> bool:
        return value <= self.goal if self.most else value >= self.goal


@dataclass(frozen=True)
class Case:
    """A benchmark: its name, the command's words, what it measures, and what it needs besides a CPU.

    `needs`: "", "lab" (root, Linux, the packages of `make lab`), "gpu", or "long": why it is not run unasked.
    """

    name: str
    words: tuple[str, ...]
    ratios: tuple[Ratio, ...]
    needs: str = ""
    timeout_s: float = 600.0

    @property
    def script(self) -> Path:
        return HERE / self.words[0]


#: `none`: it cannot be done at all, which misses every goal.
NUMBER = r"([\d.]+|none)"
START = rf"of a whole start: {NUMBER}"
BUSY = rf"drafter busy, of the run's time: {NUMBER}"
CASES = (
    Case(
        "fleet",
        ("fleet.py",),
        (
            Ratio(
                rf"slowest answer [\d.]+ s: ratio {NUMBER}",
                "a pass over 200 hosts, of its slowest answer",
                2.0,
                most=True,
            ),
        ),
    ),
    Case(
        "start",
        ("start.py", "--rounds", "7"),
        (Ratio(rf"dflash-ops --help +{NUMBER} s", "dflash-ops --help, seconds", 0.25, most=True),),
    ),
    Case(
        "watch",
        ("watch.py",),
        (
            Ratio(
                rf"cells written, of those that changed: {NUMBER}", "a redraw's cells, of those that changed", 1.5, True
            ),
        ),
    ),
    Case(
        "drafter_step",
        ("drafter_step.py", "--threads", "1"),
        (Ratio(rf"at least {NUMBER} x the speed of the reference", "drafter step, of the dense mask's speed", 1.5),),
    ),
    Case(
        "loss_modes",
        ("loss_modes.py",),
        (
            Ratio(rf"fused +[\d.]+ s +[\d.]+ x +{NUMBER} chunks", "fused loss, memory in chunks of logits", 1.1, True),
            Ratio(rf"checkpoint +[\d.]+ s +{NUMBER} x", "checkpointed loss, of the fused one's time", 1.0),
        ),
    ),
    Case(
        "ring",
        ("ring.py",),
        (
            Ratio(rf"writing a slot, of memcpy's rate: {NUMBER}", "writing a ring slot, of memcpy's rate", 0.8),
            Ratio(rf"of two memcpy's rate: {NUMBER}", "ring between two processes, of two memcpy's rate", 0.8),
        ),
    ),
    Case(
        "pipeline",
        ("pipeline.py",),
        (Ratio(BUSY, "drafter busy with a target, of the time", 0.95),),
    ),
    Case(
        "offline",
        ("pipeline.py", "--readers"),
        (Ratio(BUSY, "drafter busy with features from disk, of the time", 0.95),),
    ),
    Case(
        "restart",
        ("restart.py",),
        (
            Ratio(rf"killed target, {START}", "pause for a killed target, of a whole start", 0.5, True),
            Ratio(rf"resumed start, {START}", "resumed start, of a whole start", 1.2, True),
            Ratio(rf"next step, {START}", "killed drafter to next step, of a whole start", 1.0, True),
        ),
    ),
    Case(
        "triage",
        ("triage.py", "--lines", "120000", "--repeat", "2"),
        (
            Ratio(rf"ratio  clean, of grep's speed: {NUMBER}", "triage of clean text, of grep's speed", 1.0),
            Ratio(rf"ratio  crash at the end, of grep's speed: {NUMBER}", "triage of a crash, of grep's speed", 1.0),
        ),
    ),
    Case(
        "wire",
        ("wire.py", "--rounds", "9", "--bulk", "100"),
        (
            Ratio(rf"status_ratio +{NUMBER}", "status, of a bare tmux capture's time", 1.2, True),
            Ratio(rf"bulk_ratio +{NUMBER}", "bulk into a container, of cat's rate", 0.8),
        ),
        needs="lab",
        timeout_s=600,
    ),
    Case(
        "send",
        ("send.py", "--rounds", "3", "--bulk", "100"),
        (
            Ratio(rf'"new": {NUMBER}', "sending 300 new files, of rsync's time", 1.0, True),
            Ratio(rf'"changed": {NUMBER}', "sending 3 changed of 300, of rsync's time", 1.0, True),
            Ratio(rf'"bulk": {NUMBER}', "sending a large file, of cat's rate", 0.8),
        ),
        needs="lab",
        timeout_s=600,
    ),
    Case(
        "goodput",
        ("goodput.py", "--minutes", "2", "--others", "1", "--every", "30"),
        (
            Ratio(rf"under target faults: {NUMBER}", "goodput under target faults, one every 30 s", 0.94),
            Ratio(rf"under drafter faults: {NUMBER}", "goodput under drafter faults, one every 30 s", 0.80),
        ),
        timeout_s=900,
    ),
    Case(
        "supervise",
        ("supervise.py", "--seconds", "60", "--rounds", "1"),
        (
            Ratio(rf"of without: {NUMBER}", "step time with the supervisor, of without", 1.01, True),
            Ratio(rf"CPU, of a core: {NUMBER}", "supervisor's CPU, of a core", 0.005, True),
            Ratio(rf"of 60 MB: {NUMBER}", "supervisor's memory, of 60 MB", 1.0, True),
            Ratio(rf"of 1 s: {NUMBER}", "exit to crashed, of 1 s", 1.0, True),
            Ratio(rf"after a crash, of torchrun's: {NUMBER}", "restart after a crash, of torchrun's", 1.5, True),
            Ratio(rf"of a drafter, of torchrun's: {NUMBER}", "restart of a drafter, of torchrun's", 0.5, True),
        ),
        timeout_s=900,
    ),
    Case(
        "gpu_drafter",
        ("gpu_drafter.py",),
        (
            Ratio(rf"of 35,000: {NUMBER}", "27B drafter, of 35,000 block tokens/s (H200)", 1.0),
            Ratio(rf"measured bf16 matmul peak: {NUMBER}", "27B drafter, of the bf16 matmul peak", 0.55),
        ),
        needs="gpu",
        timeout_s=600,
    ),
    Case(
        "balance",
        ("balance.py",),
        (Ratio(rf"measured, largest difference: {NUMBER}", "a split's rate predicted, off by", 0.1, True),),
        needs="long",
        timeout_s=1800,
    ),
    Case(
        "rebalance",
        ("rebalance.py",),
        (Ratio(rf"median interval, largest difference: {NUMBER}", "a new split's rate predicted, off by", 0.1, True),),
        needs="long",
        timeout_s=1800,
    ),
    Case("fx_race", ("fx_race.py",), (), needs="long", timeout_s=900),
)
#: Files of this folder that measure nothing by themselves.
HELPERS = frozenset({"bench.py", "history.py", "parts.py", "memory.py", "systems.py", "torchrun_stages.py"})


def why_not(case: Case) -> str | None:
    """Why a benchmark is not run unasked, None if it is."""
    if not case.script.exists():
        return "not in this checkout"
    if case.needs == "lab":
        sys.path[:0] = [str(HERE.parent / "tests")]
        from lab import missing

        why = missing()
        return None if why is None else f"needs the lab: {why}"
    if case.needs == "gpu":
        return "needs a CUDA GPU: --only gpu_drafter"
    return f"takes minutes: --only {case.name}" if case.needs else None


def run(case: Case) -> tuple[int | None, str, float]:
    """Exit code (None: it ran too long), output and seconds. Nothing of it is left running."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(case.script), *case.words[1:]],
        cwd=HERE.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    code: int | None
    try:
        output, _ = process.communicate(timeout=case.timeout_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired as held:  # somebody with a session of his own keeps its output open
            output = (held.output or b"").decode("utf-8", "replace") if isinstance(held.output, bytes) else ""
        code = None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return code, output, time.monotonic() - began


def judge(case: Case, code: int | None, output: str) -> tuple[list[tuple[str, float, str, bool]], str | None]:
    """Rows of the table (what, ratio, goal, passed), and what is broken.

    A benchmark that has all its numbers and ends with 1 missed a goal of its own: that is not broken.
    """
    rows, silent = [], []
    for ratio in case.ratios:
        value = ratio.found(output)
        if value is None:
            silent.append(ratio.text)
        else:
            rows.append((ratio.text, value, f"{'<=' if ratio.most else '>='} {ratio.goal:g}", ratio.passes(value)))
    if code is None:
        return rows, f"it ran longer than {case.timeout_s:g} s"
    if silent:
        return rows, f"it ended with {code} and said nothing of: {'; '.join(silent)}"
    if code not in ((0, 1) if case.ratios else (0,)):
        return rows, f"it ended with {code}"
    return rows, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[c.name for c in CASES], default=None, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="say what there is and what would run")
    parser.add_argument("--strict", action="store_true", help="a missed goal ends with 1, too")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what runs, as Ctrl-C does
    chosen = [c for c in CASES if given.only is None or c.name in given.only]
    skipped = {c.name: why for c in chosen if (why := why_not(c)) and not (given.only and c.script.exists())}
    if given.list:
        for case in CASES:
            print(f"{case.name:14} {' '.join(case.words):45} {why_not(case) or ''}")
        return 0
    table: list[tuple[str, str, float, str, bool]] = []
    broken: dict[str, str] = {}
    for case in chosen:
        if case.name in skipped:
            continue
        print(f"---- {case.name}: python benchmarks/{' '.join(case.words)}", flush=True)
        code, output, seconds = run(case)
        print(output.rstrip() + f"\n     {seconds:.0f} s", flush=True)
        rows, fault = judge(case, code, output)
        table += [(case.name, *row) for row in rows]
        if fault is not None:
            broken[case.name] = fault
    print(f"\n{'benchmark':14} {'what':52} {'ratio':>7}  {'goal':8}")
    for name, what, value, goal, passed in table:
        print(f"{name:14} {what:52} {value:7.2f}  {goal:8} {'pass' if passed else 'miss'}")
    for name, fault in broken.items():
        print(f"{name:14} BROKEN: {fault}")
    for name, why in skipped.items():
        print(f"{name:14} not run: {why}")
    missed = sum(not row[4] for row in table)
    if given.json:
        ratios = [dict(zip(("benchmark", "what", "ratio", "goal", "passed"), row, strict=True)) for row in table]
        print(json.dumps({"schema": 1, "kind": "bench", "ratios": ratios, "broken": broken, "not_run": skipped}))
    return 1 if broken or (given.strict and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
