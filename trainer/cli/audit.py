"""`python -m trainer audit`: replays plan.jsonl of all attempts. Exit 1 if a sample was not trained once an epoch."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "attempts",
        type=Path,
        nargs="+",
        metavar="ATTEMPTS_DIR",
        help="run/attempts, or one attempt's folder; of a job on several nodes those of all of them",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def main(args: argparse.Namespace) -> int:
    from trainer.bar import Bar
    from trainer.nodes_record import audit_nodes

    bar = Bar("audit", 0, "", text="replaying the record of the plan")
    with bar.alive():
        result = audit_nodes(args.attempts)
    if args.json:
        print(json.dumps({"schema": 1, "kind": "audit", "ok": result.ok, **dataclasses.asdict(result)}))
        return 0 if result.ok else 1
    for epoch in result.epochs:
        state = "complete" if epoch.complete else "unfinished"
        verdict = "once each" if epoch.ok else "NOT once each"
        print(f"epoch {epoch.epoch}: {epoch.trained} of {epoch.samples} samples trained, {state}: {verdict}")
        if epoch.missing and epoch.complete:
            print(f"  never trained: {epoch.missing_count}, first {list(epoch.missing)}")
        if epoch.repeated:
            print(f"  more than once: {epoch.repeated_count}, first {list(epoch.repeated)}")
    for problem in result.problems:
        print(f"problem: {problem}")
    print(
        f"{result.attempts} attempts, {result.rolled_back} batches rolled back, {result.provisional} not in a "
        f"checkpoint yet, {result.torn_lines} torn lines: {'ok' if result.ok else 'NOT ok'}"
    )
    return 0 if result.ok else 1
