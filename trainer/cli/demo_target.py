"""`python -m trainer demo-target`: builds a small real target from Python's own help texts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level Qwen3 of 1.2 M parameters on Python's help texts, and cut prompts for it. The same call "
        "again finds the finished target and does nothing."
    )
    parser.add_argument("--out", type=Path, required=True, help="the target's folder; prompts go to DIR/../data")
    parser.add_argument(
        "--steps", type=int, default=150, help="optimiser steps (default 150, about a minute on two cores)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and prompts")
    parser.add_argument("--prompts", type=int, default=1024, help="training prompts (default 1024)")
    parser.add_argument("--held-out", type=int, default=48, help="prompts kept for evaluation (default 48)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all cores, at most 8)")
    parser.add_argument("--json", action="store_true", help="the last line of the output is a JSON object")


def main(args: argparse.Namespace) -> int:
    from trainer.bar import Bar
    from trainer.cli.guard import own_progress_only, share_cores, told
    from trainer.demo.target import Recipe, build

    recipe = Recipe(steps=args.steps, seed=args.seed, train_prompts=args.prompts, held_out_prompts=args.held_out)
    bar = Bar("demo target", args.steps, "steps")

    def report(done: int, total: int, loss: float) -> None:
        if done == 1:
            own_progress_only()
        bar.update(done, f"loss {loss:.2f}" if done else "loading torch")

    with told("building the demo target", "nothing was written; the same command starts anew"), bar.alive():
        built = build(args.out, recipe, report, threads=share_cores(args.threads, 8))
    print(f"{'found' if built.reused else 'built'} {built.target} (loss {built.loss:.2f} nats a byte)")
    if args.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "kind": "demo-target",
                    "target": str(built.target),
                    "prompts": str(built.train_prompts),
                    "held_out": str(built.held_out_prompts),
                    "reused": built.reused,
                    "loss": built.loss,
                }
            )
        )
    return 0
