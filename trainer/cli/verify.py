"""`python -m trainer verify`: reads checkpoints whole and checks sizes and hashes. Exit 5 if one is not whole."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trainer.bar import Bar
from trainer.errors import CheckpointError, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Read a checkpoint whole: every file that its manifest lists is there, with the size and hash that it says, "
        "and its state has what a resume needs. Nothing is written. Exit 5 if one is not whole."
    )
    parser.add_argument("--checkpoints", required=True, type=Path, metavar="DIR", help="folder of the checkpoints")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, default=None, metavar="N", help="the one of this step (default: the latest)")
    which.add_argument("--all", action="store_true", help="every one that is there")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def main(args: argparse.Namespace) -> int:
    from trainer.checkpoint import size_of

    found: list[dict[str, Any]] = []
    bar = Bar("verifying", 0, "")
    with bar.alive():
        for path in _chosen(args):
            bar.phase(f"verifying {path.name}", size_of(path) >> 20, "MiB")
            entry = _entry(path, bar)
            found.append(entry)
            if not args.json:
                bar.clear()
                print(_line(entry), flush=True)
        bar.clear()
    bad = sum(not entry["ok"] for entry in found)
    if args.json:
        print(json.dumps({"schema": 1, "kind": "verify", "ok": not bad, "checkpoints": found}))
    elif len(found) > 1:
        print(f"{len(found)} checkpoints, {bad} of them not whole" if bad else f"{len(found)} checkpoints, all whole")
    return CheckpointError.exit_code if bad else 0


def _entry(path: Path, bar: Bar) -> dict[str, Any]:
    """What is said of one checkpoint."""
    from trainer.checkpoint import KEEP, size_of, verify

    kept = (path / KEEP).exists()
    entry: dict[str, Any] = {"path": str(path), "ok": True, "step": None, "bytes": None, "kept": kept}
    try:
        entry["step"] = verify(path, bar.add).step
        entry["bytes"] = size_of(path)
    except CheckpointError as error:
        entry |= {"ok": False, "what": error.what, "where": error.where}
    return entry


def _chosen(args: argparse.Namespace) -> list[Path]:
    from trainer.checkpoint import list_checkpoints, step_of

    folder: Path = args.checkpoints
    if not folder.is_dir():
        raise ConfigError("there is no such folder", f"--checkpoints {folder}", "give a run's checkpoints folder")
    there = list_checkpoints(folder)
    if not there:
        raise CheckpointError("there is no checkpoint in it", str(folder), "give a run's checkpoints folder")
    if args.all:
        return there
    if args.step is None:
        return there[-1:]
    chosen = [path for path in there if step_of(path) == args.step]
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in there[-10:])
        raise CheckpointError(f"there is no checkpoint of step {args.step}", str(folder), f"the last ones are {steps}")
    return chosen


def _line(entry: dict[str, Any]) -> str:
    if entry["ok"]:
        kept = ", stays" if entry["kept"] else ""
        return f"{entry['path']}: whole, step {entry['step']}, {entry['bytes']} bytes{kept}"
    return f"{entry['path']}: NOT whole: {entry['what']} ({entry['where']})"
