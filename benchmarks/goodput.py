"""Goodput under faults: useful steps of a CPU pipeline that is struck again and again, of the steps that were possible.

    python benchmarks/goodput.py [--minutes 15] [--others 4] [--every 60] [--drafters 1] [--only ours] [--json]

Pipelines of the same run.json run side by side, with stages that sleep (slow_stages/), so that none of them
takes another's time: an undisturbed one, and one for each way of restarting and each role that is struck.

    ours       a supervised job (the resident acts); the trainer starts a worker that died anew, and nothing else
    loop       restart everything: the same trainer without restarts of workers, in a shell loop
    torchrun   the same stages written for `torchrun --max-restarts` (torchrun_stages.py)

First ours, both roles, for `--minutes`; then the other ways for `--others` minutes (one fault of each kind), since they
import torch and load everything again and again, which two cores that run ours at the same time would not let be
unnoticed. Each part has its own undisturbed pipeline beside it.

Every `--every` seconds a worker of the struck role gets, in turn, SIGKILL, SIGSEGV, SIGABRT and SIGSTOP (a hang that
only a limit of silence notices; the same limit for all, `--hang`). There are two targets where one suffices: a spare
one. Each pipeline's first fault comes at another moment, so that seldom two restart at the same time, and each is
measured over its own window of whole periods. Goodput: the steps that count at its end (what was lost by going back
does not), of the undisturbed pipeline's steps in the same window. Ours ends with a stop and an audit: every sample
once an epoch, also after all that. Exit code 1 where a goal is missed or the audit finds anything.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from systems import Loop, Plain, Supervised, System, Torchrun, build_pyz, environment, shape, wait_until

KINDS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)
GOALS = {"target": 0.97, "drafter": 0.90}
#: Between two readings of everybody's step.
LOOK_S = 0.25
WAYS = ("ours", "loop", "torchrun")


@dataclass
class Struck:
    """A pipeline and its faults.

    Attributes:
        way, role: how it restarts; who is struck. offset: of its window's begin. hits: (time, kind) of each fault.
        late: seconds by which faults had to wait for a worker to be there.
    """

    way: str
    role: str
    system: System
    offset: float
    hits: list[tuple[float, str]] = field(default_factory=list)
    late: float = 0.0
    due: float | None = None


def strike(one: Struck, began: float, every: float, count: int) -> None:
    """Its next fault, if it is time and there is somebody to strike."""
    number = len(one.hits)
    if number >= count:
        return
    # In the middle of nothing in particular: a little after the window's begin, so that the last one is paid within it.
    due = began + one.offset + every * number + 0.05 * every
    now = time.monotonic()
    if now < due:
        return
    alive = one.system.workers(one.role)
    if not alive:
        return
    kind = KINDS[number % len(KINDS)]
    try:
        os.kill(alive[number % len(alive)], kind)
    except ProcessLookupError:
        return
    one.late += now - due
    one.hits.append((now, kind.name))


def useful(samples: list[tuple[float, int]], begin: float, end: float) -> int:
    """Steps gained between two moments, from (time, step) readings."""

    def at(moment: float) -> int:
        return next((step for t, step in reversed(samples) if t <= moment), samples[0][1])

    return at(end) - at(begin)


def run(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Ours, then the others; the results of both."""
    parts = []
    for name, ways, minutes in (("ours", WAYS[:1], given.minutes), ("others", WAYS[1:], given.others)):
        if any(way in given.only for way in ways) and minutes > 0:
            (root / name).mkdir()
            parts.append(part(given, root / name, ways, minutes))
    rows = sorted(
        (row for p in parts for row in p["rows"]), key=lambda r: (r["struck"] != "target", r["way"] != "ours")
    )
    wrong = {name: faults for p in parts for name, faults in p["wrong"].items()}
    return {"rows": rows, "wrong": wrong, "load": [p["load"] for p in parts], "step_s": [p["step_s"] for p in parts]}


def part(given: argparse.Namespace, root: Path, ways: tuple[str, ...], minutes: float) -> dict[str, Any]:
    """Pipelines of these ways side by side, from start to end."""
    env = environment(given.target_s, given.drafter_s)

    def config(name: str) -> Path:
        (root / name).mkdir()
        return shape(root / name, targets=2, drafters=given.drafters, hang_s=given.hang, samples=given.samples)

    pyz = build_pyz(root)
    reference = Plain("undisturbed", root / "runs" / "undisturbed", config("undisturbed"), env)
    struck: list[Struck] = []
    pairs = [(way, role) for role in GOALS for way in ways if way in given.only and role in given.roles]
    for place, (way, role) in enumerate(pairs):
        name = f"{way}-{role}"
        make: dict[str, Any] = {"ours": Supervised, "loop": Loop, "torchrun": Torchrun}
        more = [pyz] if way == "ours" else []
        system = make[way](name, root / "runs" / name, config(name), env, *more)
        struck.append(Struck(way, role, system, place * given.every / len(pairs)))
    systems = [reference, *(s.system for s in struck)]
    try:
        for system in systems:
            system.start()
            wait_until(system, 1)
            if given.verbose:
                print(f"{time.strftime('%T')} {system.name} steps", flush=True)
        time.sleep(given.settle)  # all have a checkpoint, and ours its spare
        return measure(given, reference, struck, minutes)
    finally:
        for system in systems:
            system.close()


def measure(given: argparse.Namespace, reference: System, struck: list[Struck], minutes: float) -> dict[str, Any]:
    window = 60.0 * minutes
    count = max(1, round(window / given.every))
    began = time.monotonic() + 1.0
    readings: dict[str, list[tuple[float, int]]] = {s.name: [] for s in [reference, *(x.system for x in struck)]}
    end = began + window + max(s.offset for s in struck)
    load = []
    while (now := time.monotonic()) < end + LOOK_S:
        for system in [reference, *(x.system for x in struck)]:
            readings[system.name].append((time.monotonic(), system.step()))
        for one in struck:
            strike(one, began, given.every, count)
        load.append(os.getloadavg()[0])
        if given.verbose and len(load) % 120 == 0:
            print(f"{now - began:6.0f} s", {k: v[-1][1] for k, v in readings.items()}, flush=True)
        time.sleep(max(0.0, now + LOOK_S - time.monotonic()))
    rows = []
    for one in struck:
        begin = began + one.offset
        gained = useful(readings[one.system.name], begin, begin + window)
        possible = useful(readings[reference.name], begin, begin + window)
        lost = per_fault(readings[one.system.name], readings[reference.name], one, given.every)
        rows.append(
            {
                "way": one.way, "struck": one.role, "useful": gained, "possible": possible,
                "goodput": gained / possible if possible else 0.0, "faults": len(one.hits),
                "late_s": round(one.late, 1), "lost_s": lost,
            }
        )  # fmt: skip
    wrong = {one.system.name: found for one in struck if (found := one.system.faults())}
    pace = window / max(1, useful(readings[reference.name], began, began + window))
    return {"rows": rows, "wrong": wrong, "load": (min(load), sum(load) / len(load), max(load)), "step_s": pace}


def per_fault(
    mine: list[tuple[float, int]], others: list[tuple[float, int]], one: Struck, every: float
) -> dict[str, float]:
    """Seconds that a fault of each kind cost, on average: the steps that it lacks until the next one, in their time."""
    lost: dict[str, list[float]] = {}
    for t, kind in one.hits:
        possible = useful(others, t - 0.5, t + 0.9 * every)
        gained = useful(mine, t - 0.5, t + 0.9 * every)
        pace = (0.9 * every + 0.5) / possible if possible else 0.0
        lost.setdefault(kind, []).append((possible - gained) * pace)
    return {kind: round(sum(values) / len(values), 1) for kind, values in lost.items()}


def say(found: dict[str, Any], given: argparse.Namespace) -> bool:
    """Prints the table; whether all is as it should be."""
    kinds = [kind.name for kind in KINDS]
    print(f"a fault every {given.every:g} s, ours for {given.minutes:g} minutes, the others for {given.others:g}")
    for (low, mean, high), step_s in zip(found["load"], found["step_s"], strict=True):
        print(f"load of the machine {low:.1f} to {high:.1f}, mean {mean:.1f}; a step took {step_s:.3f} s undisturbed")
    print(f"{'struck':8} {'way':9} {'goodput':>8} {'useful':>7} {'possible':>9} {'faults':>7}  seconds lost by a "
          + " / ".join(k.removeprefix("SIG") for k in kinds))  # fmt: skip
    good = True
    for row in found["rows"]:
        lost = " / ".join(f"{row['lost_s'][k]:.1f}" if k in row["lost_s"] else "-" for k in kinds)
        late = f"   (faults waited {row['late_s']:.0f} s for a worker to strike)" if row["late_s"] > 5 else ""
        print(f"{row['struck']:8} {row['way']:9} {row['goodput']:8.1%} {row['useful']:7} {row['possible']:9} "
              f"{row['faults']:7}  {lost}{late}")  # fmt: skip
    for row in found["rows"]:
        if row["way"] == "ours":
            goal = GOALS[row["struck"]]
            passed = row["goodput"] >= goal
            good &= passed
            print(f"ratio  goodput under {row['struck']} faults: {row['goodput']:.3f} "
                  f"(goal {goal:g}: {'pass' if passed else 'MISS'})")  # fmt: skip
    for name, faults in found["wrong"].items():
        good = False
        print(f"WRONG  {name}: {'; '.join(faults)}")
    if not found["wrong"]:
        print("audit of ours: every sample once an epoch")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--others", type=float, default=4.0, help="minutes for the other ways")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two faults of a pipeline")
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument("--hang", type=float, default=5.0, help="workers.step_timeout_s, for all ways")
    parser.add_argument("--target-s", type=float, default=0.25, help="seconds of a target's forward")
    parser.add_argument("--drafter-s", type=float, default=0.5, help="seconds of a drafter's step")
    parser.add_argument("--samples", type=int, default=200, help="of an epoch")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds from the last one's first step on")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--roles", nargs="+", choices=tuple(GOALS), default=list(GOALS))
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="dflash-goodput-", ignore_cleanup_errors=True) as name:
        found = run(given, Path(name))
    good = say(found, given)
    if given.json:
        print(json.dumps({"schema": 1, "kind": "goodput", **found}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
