"""Does the model of `dflash_ops.balance` tell the truth? The real pipeline on the CPU, predicted from one split.

    python benchmarks/balance.py [--from 2+1] [--splits 1+1 2+1 ...] [--target 0.2] [--drafter 0.3] [--vary 0.2]
    python benchmarks/balance.py --real

Every worker is a process of its own; each stage sleeps (benchmarks/slow_stages) for far longer than it computes, so
that 6 workers on 2 cores behave like 6 devices. Stage times are measured at `--from` alone, by the records of that run;
all other splits are predicted from them, then run. `--real`: nothing sleeps, 1+1 only: two cores cannot tell the truth
about more workers. Measured is the median round (other work on the machine may hold one up for seconds); with `--real`
the mean, of the very run that the stages were measured in.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from parts import Launcher, write_config

from dflash_ops.balance import Split, measure, paces, predict, simulate

#: Steps of a drafter between two averagings; a record is written as often, so that each holds one round.
ROUND = 4
#: Rounds that are run: the first two are warm-up, and `measure` leaves them out.
ROUNDS = 8


def run(split: Split, rounds: int, stages: dict[str, float]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One run of the pipeline; its records and its run.json.

    Raises:
        RuntimeError: it failed or did not end in time.
    """
    settings = {"epochs": None, "steps": ROUND * rounds, "average_every": ROUND, "log_every": ROUND}
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as name:
        root = Path(name)
        config = write_config(
            root, samples=256, length=32 if stages else 256, drafter={"layers": 1 if stages else 3},
            train={"anchors": 4 if stages else 32, **settings}, checkpoint={"every": 10**6},
            workers={"target_devices": ["cpu"] * split.targets, "drafter_devices": ["cpu"] * split.drafters},
        )  # fmt: skip
        launcher = Launcher(root, config, 1, slow=stages)
        try:
            if launcher.process.wait(180) != 0:
                raise RuntimeError(launcher.tail())
            return launcher.metrics(), json.loads(config.read_text(encoding="utf-8"))
        finally:
            launcher.close()


def split_of(text: str) -> Split:
    targets, plus, drafters = text.partition("+")
    if not plus or not targets.isdigit() or not drafters.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no TARGETS+DRAFTERS")
    return Split(int(targets), int(drafters))


def main() -> int:
    every = [Split(t, n - t) for n in range(2, 7) for t in range(n - 1, 0, -1)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="base", type=split_of, default=Split(2, 1), help="where stages are measured")
    parser.add_argument("--splits", type=split_of, nargs="+", default=every, help="all of up to 6 workers")
    parser.add_argument("--target", type=float, default=0.2, help="seconds that a target sleeps for a batch")
    parser.add_argument("--drafter", type=float, default=0.3, help="that a drafter sleeps for a step")
    parser.add_argument("--average", type=float, default=0.1, help="that each sleeps in an averaging")
    parser.add_argument("--vary", type=float, default=0.0, help="standard deviation of each, relative")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--real", action="store_true", help="nothing sleeps; 1+1 only")
    given = parser.parse_args()
    stages = {"target": given.target, "drafter": given.drafter, "average": given.average, "vary": given.vary}
    if given.real:
        stages, given.base, given.splits = {}, Split(1, 1), [Split(1, 1)]
        given.rounds *= 10
    records, config = run(given.base, 2 * given.rounds, stages)
    rates = measure(records, config)
    print(f"stages at {given.base}: target {rates.target.mean:.4f} s, drafter {rates.drafter.mean:.4f} s, ", end="")
    print(f"averaging {rates.average.mean:.4f} s, hops {rates.target_hop.mean:.4f} and {rates.drafter_hop.mean:.4f} s")
    if stages:
        shares = [given.target / rates.target.mean, given.drafter / rates.drafter.mean]
        print(f"ratio  of a stage that is sleep, least: {min(shares):.2f}")
    print(f"{'split':>6} {'predicted':>10} {'measured':>10} {'difference':>10} {'simulated':>10}  limit")
    worst = 0.0
    for split in given.splits:
        found, played = predict(rates, split), simulate(rates, split, rounds=100)
        rounds = paces(records, config) if split == given.base else paces(*run(split, given.rounds, stages))
        seen = statistics.median(tokens / seconds for tokens, seconds in rounds)
        if not stages:
            seen = sum(tokens for tokens, _ in rounds) / sum(seconds for _, seconds in rounds)
        difference = found.block_tok_s / seen - 1
        worst = max(worst, abs(difference))
        print(
            f"{split!s:>6} {found.block_tok_s:10.1f} {seen:10.1f} {difference:10.1%} "
            f"{played.block_tok_s:10.1f}  {found.limit}",
            flush=True,
        )
    print(f"ratio  predicted against measured, largest difference: {worst:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
