"""`python -m trainer smoke`: a few real steps at tiny size, with as many processes as the job."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from trainer.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, help="scratch folder, new or empty; it is left as it is")
    parser.add_argument("--targets", type=int, default=1, metavar="N", help="target processes (default 1)")
    parser.add_argument("--drafters", type=int, default=1, metavar="M", help="drafter processes (default 1)")
    parser.add_argument(
        "--devices", metavar="LIST", help="cuda:N or cpu, one for each process, targets first (default: all on the CPU)"
    )
    parser.add_argument("--config", type=Path, help="the job's run.toml or run.json: its way of training is kept")


def main(args: argparse.Namespace) -> int:
    from trainer.cli.run import add_arguments as add_run_arguments
    from trainer.cli.run import main as run
    from trainer.config import load_config
    from trainer.smoke import NOT_ON_CPU, STEPS, make

    count = args.targets + args.drafters
    devices = args.devices.split(",") if args.devices else ["cpu"] * count
    if min(args.targets, args.drafters) < 1 or len(devices) != count:
        raise ConfigError(
            f"{len(devices)} devices for {args.targets} targets and {args.drafters} drafters",
            "--devices",
            "at least one of each, and a device for each process",
        )
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError("this is no folder", str(args.out), "name a new one with --out")
    if args.out.exists() and any(args.out.iterdir()):
        raise ConfigError("the folder is not empty", str(args.out), "name a new one with --out")
    begin = time.monotonic()
    config = load_config(args.config) if args.config is not None else None
    out = args.out.absolute()
    try:
        file = make(out, config, devices[: args.targets], devices[args.targets :])
        (out / "attempt").mkdir()
    except OSError as error:
        raise ConfigError(
            f"the scratch folder cannot be written: {error}", str(out), "name another with --out"
        ) from error
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    words = ["--config", str(file), "--out", str(out / "attempt"), "--checkpoints", str(out / "checkpoints")]
    code = run(parser.parse_args([*words, "--resume", "none"]))
    on_cpu = any(d == "cpu" for d in devices)
    print(
        json.dumps(
            {
                "schema": 1,
                "kind": "smoke",
                "ok": code == 0,
                "exit": code,
                "steps": STEPS if code == 0 else None,
                "targets": args.targets,
                "drafters": args.drafters,
                "devices": devices,
                "seconds": round(time.monotonic() - begin, 1),
                "not_exercised": list(NOT_ON_CPU) if on_cpu else [],
            }
        ),
        flush=True,
    )
    return code
