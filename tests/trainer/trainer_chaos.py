"""Kills at random, one soon after the other, while a run goes on; and what must be true of it afterwards.

    python tests/trainer/trainer_chaos.py [--kills 20] [--hangs 4] [--seed 1] [--schedule fixed] [--keep]

Two targets and two drafters, one run undisturbed and one that is struck. A kill is SIGKILL, SIGSEGV, SIGABRT, or a
SIGSTOP that only `workers.timeout_s` can notice. As soon as there was progress after one the next one comes, so that a
target often dies while drafters start, and the other way round. Exit code 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline_support import Run, children_of, make_job, write_samples, write_target  # type: ignore[import-not-found]

from trainer.checkpoint import list_checkpoints
from trainer.plan_record import audit

DEADLY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
#: Of the run in `make test`; the command does twice as many.
KILLS, HANGS = 10, 2
SAMPLES, BATCH, EVERY = 160, 4, 4  # 5 rounds an epoch
OPTIONS: dict[str, Any] = {
    "workers.target_devices": ["cpu", "cpu"],
    "workers.drafter_devices": ["cpu", "cpu"],
    "data.batch_size": BATCH,
    "train.average_every": EVERY,
    "train.log_every": EVERY,  # an entry of metrics.jsonl is exactly one round
    "train.warmup": 0.02,
    "checkpoint.every": 40,
    "ring.slots": 5,
}
#: Of which role, and by what.
Card = tuple[str, signal.Signals]


@dataclass
class Hit:
    """One kill.

    Attributes:
        worker, life, pid: who was hit. how: by what. at: seconds since the run's start. step: of the last average then.
        averages: how many there were when the run had noticed. until: seconds until there was a new one.
    """

    worker: str
    life: int
    pid: int
    how: signal.Signals
    at: float
    step: int
    averages: int
    until: float | None = None

    @property
    def role(self) -> str:
        return self.worker.rstrip("0123456789")

    @property
    def exit_code(self) -> int:
        """Of one that hangs: the launcher kills it."""
        return -int(signal.SIGKILL if self.how is signal.SIGSTOP else self.how)


def deck(rng: random.Random, kills: int, hangs: int) -> list[Card]:
    """Whom and how, in random order: half of them targets, `hangs` of them SIGSTOP, as many of either role."""
    cards: list[Card] = []
    for number, role in enumerate(("target", "drafter")):
        count, stopped = (kills + 1 - number) // 2, (hangs + 1 - number) // 2
        cards += [(role, signal.SIGSTOP if i < stopped else rng.choice(DEADLY)) for i in range(count)]
    rng.shuffle(cards)
    return cards


class Chaos:
    """Strikes a run that was just started.

    Args:
        run: the run, with one attempt. rng: decides whom. budget: deaths of a target in a row, before it was of use
        again; fewer than `workers.restarts`, which the run must not use up.
    """

    def __init__(self, run: Run, rng: random.Random, budget: int = 2) -> None:
        self.run, self.rng, self.budget = run, rng, budget
        self.hits: list[Hit] = []
        self.steps: list[int] = []  # of all averages so far
        self.began = time.monotonic()

    def strike(self, cards: list[Card], within: float) -> None:
        """One after the other, each as soon as the run has got over the one before of the same role."""
        for role, how in cards:
            worker, life, pid = self.run.until(
                partial(self._victim, role, len(self.steps) + self.rng.randint(0, 4)), within
            )
            time.sleep(self.rng.uniform(0, 0.05))  # anywhere in a round
            self.run.workers()  # remembered for the end
            os.kill(pid, how)
            at = time.monotonic() - self.began
            self.hits.append(Hit(worker, life, pid, how, at, self.steps[-1], len(self.steps)))
        self.run.until(self._got_over, within)

    def _look(self) -> None:
        """Which hits the run has got over: the dead are buried, drafters train again, and there is a new average."""
        plan, log = self.run.attempt / "plan.jsonl", self.run.log
        self.steps = [int(step) for step in re.findall(r'"k":"commit","step":(\d+)', plan.read_text())]
        for hit in self.hits:
            buried = f"event=worker_exit worker={hit.worker} life={hit.life} exitcode=" in log
            back = hit.role == "target" or f"event=drafters_back life={hit.life + 1} " in log
            if not (buried and back):
                hit.averages = len(self.steps)
            elif hit.until is None and len(self.steps) > hit.averages:
                hit.until = time.monotonic() - self.began - hit.at

    def _got_over(self) -> bool:
        self._look()
        return all(hit.until is not None for hit in self.hits)

    def _victim(self, role: str, averages: int) -> tuple[str, int, int] | None:
        """(worker, life, pid) of one that may be hit now; beside a target that hangs the other one may."""
        if not self.run.metrics():
            return None
        self._look()
        mine = [hit for hit in self.hits if hit.role == role]
        waiting = [hit for hit in mine if hit.until is None and not (role == "target" and hit.how is signal.SIGSTOP)]
        hangs = any(hit.until is None for hit in self.hits)
        if waiting or not self.steps or (len(self.steps) < averages and not hangs):
            return None
        before = {(hit.worker, hit.life) for hit in mine}
        alive = [
            (str(name), int(life), pid)
            for pid, line in children_of(self.run.running[-1].pid)
            for name, life in re.findall(rf"trainer\.worker_main {role} (\w+) (\d+) ", line)
        ]
        fair = [w for w in sorted(alive) if w[:2] not in before and self._in_a_row(w[0]) < self.budget]
        return self.rng.choice(fair) if fair else None

    def _in_a_row(self, worker: str) -> int:
        """How often a target died since it was last of use, as far as is committed."""
        entries = [e["workers"].get(worker, {}) for e in self.run.metrics() if e["step"] <= self.steps[-1]]
        of_use = max((e["life"] for e in entries if e.get("compute")), default=-1)
        return sum(h.worker == worker and h.role == "target" and h.life > of_use for h in self.hits)

    def table(self) -> str:
        rows = [f"{'':>3} {'s':>7} {'step':>5} {'worker':9} {'life':>4} {'by':8} {'new average after s':>20}"]
        for number, hit in enumerate(self.hits, 1):
            until = "-" if hit.until is None else f"{hit.until:.1f}"
            rows.append(
                f"{number:3} {hit.at:7.1f} {hit.step:5} {hit.worker:9} {hit.life:4} {hit.how.name:8} {until:>20}"
            )
        return "\n".join(rows)


def losses(run: Run) -> dict[int, float]:
    """Loss of each round, by its last step; of a round that was trained twice the one that counts."""
    return {entry["step"]: entry["loss"] for entry in run.metrics()}


def faults(calm: Run, struck: Run, chaos: Chaos) -> list[str]:
    """What is not as it must be. On the fixed schedule deaths change nothing at all."""
    equal = json.loads(struck.config.read_text())["train"]["schedule"] == "fixed"
    said: list[str] = []
    log = struck.log

    def must(holds: object, text: str) -> None:
        if not holds:
            said.append(text)

    result = audit(struck.root / "attempts")
    must(result.ok, f"audit: {result.problems or 'samples missing or trained twice'}")
    trained = [(e.trained, e.complete) for e in result.epochs]
    must(
        trained == [(SAMPLES, True)] * int(calm.metrics()[-1]["epoch"]),
        f"audit: samples trained and complete are {trained}",
    )
    must(result.provisional == 0, f"audit: {result.provisional} batches are in no checkpoint")

    exits = Counter(re.findall(r"event=worker_exit worker=(target\d) life=(\d+) exitcode=(-?\d+)", log))
    ours = Counter((h.worker, str(h.life), str(h.exit_code)) for h in chaos.hits if h.role == "target")
    must(exits == ours, f"targets ended that were not hit: {exits - ours}, or hit and not ended: {ours - exits}")
    starts = Counter(re.findall(r"event=worker_start worker=(target\d) life=(\d+)", log))
    anew = Counter((worker, str(int(life) + 1)) for worker, life, _ in ours.elements())
    must(starts == anew, f"targets were started that had not died: {starts - anew}")

    causes = re.findall(r"event=drafters_restart cause=(\S+) worker=(drafter\d) life=(\d+)", log)
    drafters = [h for h in chaos.hits if h.role == "drafter"]
    must(len(causes) == len(drafters), f"{len(drafters)} drafters were hit, and started {len(causes)} times")
    for hit, (cause, worker, _) in zip(drafters, causes, strict=False):
        told = f"{hit.worker}_was_killed_by_{hit.how.name}"
        # All that average together with one that hangs are silent.
        must(
            hit.how is signal.SIGSTOP or (told in cause and worker == hit.worker),
            f"{hit.worker} got {hit.how.name}, told was {cause} of {worker}",
        )

    before, after = losses(calm), losses(struck)
    must(before.keys() == after.keys(), f"rounds that are not those of the calm run: {before.keys() ^ after.keys()}")
    allowed = 1e-6 if equal else 0.1
    must(gap(before, after) <= allowed, f"losses are {gap(before, after):.2%} off those of the calm run")
    names = [list_checkpoints(run.checkpoints)[-1].name for run in (calm, struck)]
    must(names[0] == names[1], f"last checkpoints are {names}")
    if equal:
        for file in sorted(list_checkpoints(calm.checkpoints)[-1].glob("*.safetensors")):
            other = list_checkpoints(struck.checkpoints)[-1] / file.name
            must(file.read_bytes() == other.read_bytes(), f"{file.name} of the last checkpoint differs")
    return said


def gap(before: dict[int, float], after: dict[int, float], over: int = 5) -> float:
    """Largest difference of two loss curves, each a mean over some rounds, as a part of the first."""
    steps = sorted(before.keys() & after.keys())
    worst = 0.0
    for i in range(max(1, len(steps) - over + 1)):
        one, other = (sum(curve[s] for s in steps[i : i + over]) for curve in (before, after))
        worst = max(worst, abs(one - other) / one)
    return worst


def until_stepping(run: Run) -> float:
    """Seconds from a start to the first round of its drafters: what a worker's silence may last, at the least."""
    began = time.monotonic()
    run.until(run.metrics)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2 * KILLS)
    parser.add_argument("--hangs", type=int, default=2 * HANGS, help="how many of them are SIGSTOP")
    parser.add_argument("--seed", type=int, default=None, help="of whom, how and when; printed, to do the same again")
    parser.add_argument("--schedule", choices=("fixed", "ready"), default="fixed")
    parser.add_argument("--keep", action="store_true", help="the runs' folders stay")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    root = Path(tempfile.mkdtemp(prefix="dflash-chaos-"))
    print(f"seed {seed}, {given.kills} kills, {root}", flush=True)
    (root / "target").mkdir()
    target, data = write_target(root / "target"), write_samples(root / "data.jsonl", SAMPLES)
    made = options(given.kills, given.schedule)
    calm, struck = (make_job(root / name, target, data=data, **made) for name in ("calm", "struck"))
    began = time.monotonic()
    try:
        chaos, said = storm(calm, struck, seed, given.kills, given.hangs)
    finally:
        for run in (calm, struck):
            run.kill()
    print(chaos.table())
    print(f"largest difference of the losses, means of 5 rounds: {gap(losses(calm), losses(struck)):.2%}")
    print("\n".join(f"FAULT: {text}" for text in said) or "all as it must be", f"({time.monotonic() - began:.0f} s)")
    if not given.keep and not said:
        shutil.rmtree(root)
    return 1 if said else 0


def options(kills: int, schedule: str) -> dict[str, Any]:
    """For `make_job`: with rounds enough for so many kills."""
    return {**OPTIONS, "train.schedule": schedule, "train.epochs": kills * 8 // 5}


def storm(calm: Run, struck: Run, seed: int, kills: int, hangs: int, within: float = 300) -> tuple[Chaos, list[str]]:
    """An undisturbed run, then one that is struck; what is not as it must be. `within`: seconds for each wait."""
    undisturbed = calm.start()
    needed = until_stepping(calm)
    assert undisturbed.wait(within) == 0, calm.log
    process = struck.start(f"workers.timeout_s={max(10.0, 3 * needed):.0f}")
    rng = random.Random(seed)
    chaos = Chaos(struck, rng)
    try:
        chaos.strike(deck(rng, kills, hangs), within)
    except BaseException:
        print(f"seed {seed}\n{chaos.table()}", file=sys.stderr)
        raise
    code = process.wait(within)
    return chaos, faults(calm, struck, chaos) if code == 0 else [f"exit code {code}:\n{struck.log}"]


if __name__ == "__main__":
    sys.exit(main())
