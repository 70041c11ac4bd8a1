"""What the supervisor costs and how fast it is, beside a running job on this machine.

    python benchmarks/supervise.py [--seconds 120] [--rounds 3] [--json]

One supervised pipeline (stages that sleep, slow_stages/sitecustomize.py), the same one without a supervisor beside it,
and one under `torchrun --max-restarts` (torchrun_stages.py); all of the same run.json.

    overhead   step time with the supervisor, of without, over the same seconds
    cost       CPU of loop and guard, with all that they start (passes of repair, tmux clients), as a share of one
               core; their memory (Pss: pages that both share count once), and the wrapper's beside it
    detection  SIGKILL of the launcher -> `crashed` in snapshot.json; SIGSTOP of it -> `hung` beyond its limit
    restart    that kill -> the first new step; of the supervisor, of torchrun when a rank is killed, and of the trainer
               itself when a drafter is

Exit code 1 where a goal is missed.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from systems import Plain, Supervised, System, Torchrun, build_pyz, environment, shape, wait_until

TICK = os.sysconf("SC_CLK_TCK")
TARGET_S, DRAFTER_S = 0.2, 0.25
#: Silence in a step after which this job counts as hung: short, since what is measured is what comes on top of it.
HUNG_S = 6.0


def cpu_s(pid: int) -> float:
    """Seconds of CPU of a process so far: its own to the nanosecond, of children that have ended in ticks."""
    own = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return own + (int(fields[13]) + int(fields[14])) / TICK


def memory(pid: int) -> tuple[float, float]:
    """(Pss, Rss) in MB."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    pss, rss = (int(lines[key].split()[0]) / 1024 for key in ("Pss", "Rss"))
    return pss, rss


def processes(system: Supervised) -> dict[str, int]:
    """Pids of loop, guard and wrapper."""
    from dflash_ops.resident import attempts, daemon, proc

    record, last = daemon.running(system.lab.layout), attempts.last(system.lab.layout)
    if record is None or last is None or last.start is None:
        raise RuntimeError(f"no loop, or no attempt:\n{system.tail()}")
    children = [s.pid for s in proc.every() if s.ppid == record.pid and not s.dead]
    guard = [pid for pid in children if b"loop" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    return {"loop": record.pid, "guard": guard[0], "wrapper": last.start.wrapper.pid}


def cost(system: Supervised, other: System, seconds: float) -> dict[str, float]:
    """CPU and memory beside a running job, and what the job's pace loses by it."""
    pids = processes(system)
    both = (system, other)
    before, began = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    steps = [_moment(s) for s in both]
    most: dict[str, tuple[float, float]] = {}
    while time.monotonic() - began < seconds:
        time.sleep(1.0)
        for name, pid in pids.items():
            most[name] = max(most.get(name, (0.0, 0.0)), memory(pid))
    took = time.monotonic() - began
    used = {name: (cpu_s(pid) - before[name]) / took for name, pid in pids.items()}
    paces = []
    for one, (step, at) in zip(both, steps, strict=True):
        now, then = _moment(one)
        paces.append((then - at) / max(1, now - step))
    return {
        "cpu": used["loop"] + used["guard"], "wrapper_cpu": used["wrapper"], "seconds": took,
        "pss_mb": most["loop"][0] + most["guard"][0], "rss_mb": most["loop"][1] + most["guard"][1],
        "wrapper_mb": most["wrapper"][0], "overhead": paces[0] / paces[1],
    }  # fmt: skip


def _moment(system: System) -> tuple[int, float]:
    """(step, time) at which a step has just come, so that paces are of whole steps."""
    step = system.step()
    until(lambda: system.step() != step, f"a step of {system.name}", 60)
    return system.step(), time.monotonic()


def until(holds: Callable[[], Any], what: str, within: float = 120.0) -> float:
    """When it held first (monotonic), looked for every 5 ms.

    Raises:
        RuntimeError: never within so many seconds.
    """
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {within:g} s")
        time.sleep(0.005)
    return time.monotonic()


def state(system: Supervised) -> tuple[str, int | None]:
    try:
        said = json.loads(system.lab.layout.snapshot.read_text())
    except (OSError, ValueError):
        return "", None
    return str(said["state"]), said["attempt"]


def crash(system: Supervised) -> dict[str, float]:
    """SIGKILL of the launcher: seconds until it is seen, until the trainer is started, until it steps."""
    from dflash_ops.resident import attempts

    number = attempts.numbers(system.lab.layout)[-1]
    launcher = system.launcher()
    began = time.monotonic()
    os.kill(launcher, signal.SIGKILL)
    seen = until(lambda: state(system) == ("crashed", number), "crash in the snapshot", 30)
    log = system.attempts / str(number + 1) / "log"
    started = until(log.exists, "new attempt", 120)
    stepped = until(lambda: "\ndflash step=" in log.read_text("utf-8", "replace"), "step of the new attempt")
    return {"seen": seen - began, "started": started - began, "stepped": stepped - began}


def hang(system: Supervised) -> dict[str, float]:
    """SIGSTOP of the launcher: seconds beyond the limit until it is called hung, then until it is diagnosed."""
    launcher = system.launcher()
    quiet = float(json.loads(system.lab.layout.snapshot.read_text())["progress"]["t"])
    os.kill(launcher, signal.SIGSTOP)
    until(lambda: state(system)[0] == "hung", "hang in the snapshot", 60)
    hung = time.time()
    until(lambda: system.lab.events("diagnosed") and system.lab.events("diagnosed")[-1].t > hung - 1, "diagnosis", 60)
    named = time.time()
    quiet = max(quiet, float(json.loads(system.lab.layout.snapshot.read_text())["progress"]["t"]))
    return {"hung": hung - quiet - HUNG_S, "named": named - hung}


def rank_killed(system: Torchrun) -> dict[str, float]:
    """SIGKILL of a drafter's rank under torchrun: seconds until it steps beyond where it was."""
    steps = system.root / "steps"
    victim, others = system.workers("drafter")[0], system.workers("target")
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    seen = until(lambda: not set(others) & set(system.workers("target")), "end of the other ranks", 60)
    size = steps.stat().st_size
    stepped = until(lambda: steps.stat().st_size > size, "step under torchrun")
    return {"seen": seen - began, "stepped": stepped - began}


def drafter_killed(system: System) -> float:
    """SIGKILL of a drafter of the trainer alone: seconds until a step was trained again."""
    log = system.attempts / "1" / "log"
    count = log.read_text().count("event=drafters_back")
    began = time.monotonic()
    os.kill(system.workers("drafter")[0], signal.SIGKILL)
    return until(lambda: log.read_text().count("event=drafters_back") > count, "drafters back") - began


def measure(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    env = environment(TARGET_S, DRAFTER_S)
    tables = {"train": {"average_every": 4}, "checkpoint": {"every": 8}}

    def config(name: str) -> Path:
        (root / name).mkdir()
        return shape(root / name, targets=2, drafters=1, hang_s=30.0, samples=400, **tables)

    ours = Supervised("supervised", root / "runs" / "ours", config("ours"), env, build_pyz(root), step_s=HUNG_S)
    plain = Plain("alone", root / "runs" / "alone", config("alone"), env)
    others = Torchrun("torchrun", root / "runs" / "torchrun", config("torchrun"), env, restarts=given.rounds)
    systems: list[System] = [ours, plain, others]
    try:
        for system in systems:
            system.start()
            wait_until(system, 20)
        time.sleep(given.settle)
        found: dict[str, Any] = {"cost": cost(ours, plain, given.seconds)}
        crashes, ranks, drafters = [], [], []
        for _ in range(given.rounds):
            for system in systems:
                wait_until(system, system.step() + 20)  # all are at rest, a checkpoint and an average behind them
            crashes.append(crash(ours))
            ranks.append(rank_killed(others))
            drafters.append(drafter_killed(plain))
        wait_until(ours, ours.step() + 20)
        found |= {"crash": _median(crashes), "torchrun": _median(ranks), "drafter": statistics.median(drafters)}
        found["hang"] = hang(ours)
        found["load"] = os.getloadavg()[0]
        return found
    finally:
        for system in systems:
            system.close()


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


#: (what, its value of the results, the most it may be, printed as)
GOALS: tuple[tuple[str, Callable[[dict[str, Any]], float], float], ...] = (
    ("step time with the supervisor, of without", lambda f: f["cost"]["overhead"], 1.01),
    ("supervisor's CPU, of a core", lambda f: f["cost"]["cpu"], 0.005),
    ("supervisor's memory, of 60 MB", lambda f: f["cost"]["pss_mb"] / 60, 1.0),
    ("exit to crashed, of 1 s", lambda f: f["crash"]["seen"], 1.0),
    ("restart after a crash, of torchrun's", lambda f: f["crash"]["stepped"] / f["torchrun"]["stepped"], 1.5),
    ("restart of a drafter, of torchrun's", lambda f: f["drafter"] / f["torchrun"]["stepped"], 0.5),
)


def say(found: dict[str, Any]) -> bool:
    c, h = found["cost"], found["hang"]
    print(f"load of the machine {found['load']:.1f}; medians of the rounds")
    print(f"loop and guard beside a running job, {c['seconds']:.0f} s: {c['cpu']:.2%} of a core, "
          f"{c['pss_mb']:.0f} MB (Pss; Rss {c['rss_mb']:.0f})")  # fmt: skip
    print(f"the wrapper in its pane: {c['wrapper_cpu']:.2%} of a core, {c['wrapper_mb']:.0f} MB")
    print(f"launcher killed: crashed seen after {found['crash']['seen']:.2f} s, next attempt after "
          f"{found['crash']['started']:.2f} s, its first step after {found['crash']['stepped']:.2f} s")  # fmt: skip
    print(f"launcher stopped: hung {h['hung']:.2f} s beyond the limit of {HUNG_S:g} s, named {h['named']:.2f} s later")
    print(f"torchrun, a rank killed: the others ended after {found['torchrun']['seen']:.2f} s, "
          f"first step after {found['torchrun']['stepped']:.2f} s")  # fmt: skip
    print(f"the trainer alone, its drafter killed: trains again after {found['drafter']:.2f} s")
    good = True
    for text, value, most in GOALS:
        passed = value(found) <= most
        good &= passed
        print(f"ratio  {text}: {value(found):.4f} (goal at most {most:g}: {'pass' if passed else 'MISS'})")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="over which the cost is measured")
    parser.add_argument(
        "--settle", type=float, default=45.0, help="before that: a finding's first note is a pass, then none in an hour"
    )
    parser.add_argument("--rounds", type=int, default=3, help="crashes of each")
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="dflash-supervise-", ignore_cleanup_errors=True) as name:
        found = measure(given, Path(name))
    good = say(found)
    if given.json:
        print(json.dumps({"schema": 1, "kind": "supervise", **found}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
