"""`python -m trainer export`: a checkpoint's drafter as a folder that servers load."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.bar import Bar
    from trainer.checkpoint import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a checkpoint's drafter as config.json and model.safetensors. The checkpoint is verified."
    )
    parser.add_argument("--checkpoint", default="auto", help="a checkpoint, by folder or name, or auto: the newest one")
    parser.add_argument("--checkpoints", type=Path, default=None, help="folder of the checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; an earlier export there is replaced")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the weights (bfloat16)"
    )
    parser.add_argument(
        "--causality",
        choices=("stamped", "by-layer"),
        default="stamped",
        help="of a drafter with causal sliding layers and full ones: written as one word (default), or left to each "
        "kind's default (docs/export.md)",
    )
    parser.add_argument("--json", action="store_true", help="the last line of the output is a JSON object")


def main(args: argparse.Namespace) -> int:
    from trainer.bar import Bar
    from trainer.cli.guard import told
    from trainer.errors import ConfigError

    if args.checkpoints is None and args.checkpoint == "auto":
        raise ConfigError(
            "--checkpoint auto needs the folder to look in", "--checkpoints", "give it, or one checkpoint"
        )
    bar = Bar("export", 0, "", text="loading torch")
    with told("the export", "nothing was written; an earlier export is whole"), bar.alive():
        import torch

        from trainer.drafter_source import from_checkpoint
        from trainer.export import export_drafter

        checkpoint = _chosen(args, bar)
        bar.phase("export", 0, "", text="reading the weights")
        source = from_checkpoint(checkpoint)

        def writing(file: Path, size: int) -> None:
            bar.phase("writing", size >> 20, "MiB", poll=lambda: file.stat().st_size >> 20 if file.exists() else 0)

        dtype = getattr(torch, args.dtype)
        by_layer = args.causality == "by-layer"
        out = export_drafter(source.state, source.config, args.out, dtype=dtype, by_layer=by_layer, writing=writing)
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"wrote {out}: step {source.step}, {len(source.state)} tensors, {size / 2**20:.1f} MiB, {args.dtype}")
    if source.config.mixed and not by_layer:
        print(
            "note: is_causal is written as trained (sliding layers). A server that applies it to full layers too would "
            "lower acceptance: for such a one export with --causality by-layer (docs/export.md)"
        )
    if args.json:
        record = {
            "schema": 1,
            "kind": "export",
            "export": str(out),
            "checkpoint": str(source.path),
            "step": source.step,
            "tensors": len(source.state),
            "bytes": size,
            "dtype": args.dtype,
        }
        print(json.dumps(record))
    return 0


def _chosen(args: argparse.Namespace, bar: Bar) -> Checkpoint:
    """The checkpoint that is meant, verified; the bar tells how much of it was read.

    Raises:
        ConfigError: no such one. CheckpointError: it is not whole.
    """
    from trainer.checkpoint import choose, list_checkpoints, size_of
    from trainer.drafter_source import newest
    from trainer.errors import ConfigError

    def hashing(path: Path) -> None:
        bar.phase(f"verifying {path.name}", size_of(path) >> 20, "MiB")

    if args.checkpoint == "auto":
        for latest in list_checkpoints(args.checkpoints)[-1:]:
            hashing(latest)
        return newest(args.checkpoints, bar.add)
    if args.checkpoints is None:
        hashing(Path(args.checkpoint))
        return _named(Path(args.checkpoint), bar)
    hashing(args.checkpoints / args.checkpoint)
    chosen = choose(args.checkpoints, args.checkpoint, bar.add)
    if chosen is None:
        raise ConfigError(f"{args.checkpoint!r} names no checkpoint", "--checkpoint", "a folder, a name or auto")
    return chosen


def _named(path: Path, bar: Bar) -> Checkpoint:
    """The checkpoint in this very folder, verified."""
    from trainer.checkpoint import verify
    from trainer.errors import CheckpointError

    try:
        return verify(path, bar.add)
    except CheckpointError as error:
        fix = "name another one: a folder step-N that holds manifest.json"
        raise CheckpointError(error.what, error.where, error.next or fix) from error
