"""`python -m trainer check`: could this run start, and what would it take? One JSON object; no torch, no writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trainer.cli.run import device_arguments
from trainer.errors import TrainerError, each_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="run.toml or run.json (docs/run-config.md)")
    parser.add_argument("--checkpoints", type=Path, help="folder of the checkpoints; without it none is looked at")
    parser.add_argument("--resume", default="auto", help="auto (default), none, or a checkpoint's folder")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="table.key=value", help="override one key"
    )
    device_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from trainer.bar import Bar
    from trainer.checkpoint import unwritable
    from trainer.config import load_config
    from trainer.prepare import gpus_missing, needs, prepare

    bar = Bar("check", 0, "", text="reading config, target, data and checkpoint")
    errors: list[TrainerError] = []
    unknown = dict.fromkeys(("needs", "total_steps", "from_step"))
    out: dict[str, Any] = {"schema": 1, "kind": "check", "ok": False, "errors": [], **unknown}
    try:
        config = load_config(args.config, args.overrides, targets=args.targets, drafters=args.drafters)
        errors += gpus_missing(config)
        errors += unwritable(args.checkpoints) if args.checkpoints is not None else []
        with bar.alive():
            prepared = prepare(config, args.checkpoints, args.resume, in_part=True)
        out["needs"] = needs(prepared)
        # The first lines of large data tell nothing about how many batches all of it makes.
        known = prepared.index.whole or config.train.steps is not None
        out["total_steps"] = prepared.total_steps if known else None
        out["from_step"] = prepared.step
        out["samples"] = len(prepared.index.ids) if prepared.index.whole else None
        out["notes"] = list(prepared.notes)
    except TrainerError as error:
        errors += each_error(error)
    out["errors"] = [{"what": e.what, "where": e.where, "next": e.next, "exit_code": e.exit_code} for e in errors]
    out["ok"] = not errors
    print(json.dumps(out))
    return errors[0].exit_code if errors else 0
