"""`python -m trainer features`: writes a target's features to disk, to be trained from without the target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from trainer.bar import Bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compute the tapped layers of every sample once, on all workers.target_devices, and keep them. Call it again "
        "after a stop or a crash: whole shards stay. Train from them with features.path and `run --targets 0`."
    )
    parser.add_argument("--config", required=True, type=Path, help="run.toml or run.json (docs/run-config.md)")
    parser.add_argument("--out", type=Path, default=None, help="folder of the features (default: features.path)")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="table.key=value", help="override one key"
    )
    parser.add_argument("--shard-mib", type=float, default=512, metavar="N", help="size of a shard (default 512)")
    parser.add_argument("--verify", action="store_true", help="write nothing: read all shards and compare their hashes")
    parser.add_argument("--json", action="store_true", help="the last line of the output is a JSON object")


def main(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from trainer.cli.guard import told
    from trainer.config import load_config
    from trainer.errors import FINISHED, ConfigError
    from trainer.features import read_manifest
    from trainer.prepare import gpus_missing, prepare, raise_if_any
    from trainer.signals import StopSignals

    config = load_config(args.config, args.overrides)
    out = args.out or (Path(config.features.path) if config.features.path else None)
    if out is None:
        raise ConfigError("no folder is named", "--out", "give --out, or features.path in the config")
    if not 0 < args.shard_mib < 1 << 20:
        raise ConfigError(f"--shard-mib {args.shard_mib:g} is out of range", "--shard-mib", "above 0, below 2**20")
    if args.verify:
        return _verify(out)
    if not config.workers.target_devices:
        raise ConfigError("there are 0 targets to compute features", "workers.target_devices", "name a device")
    raise_if_any(gpus_missing(config))
    alone = replace(config, features=replace(config.features, path=None))
    bar = Bar("features", 0, "")
    with bar.alive():
        bar.update(0, "reading target and data")
        with told("reading the data", "nothing was computed; whole shards of earlier calls stay"):
            prepared = prepare(alone, None, "none", progress=_tokenizing(bar))
        bar.phase("features", sum(prepared.index.lengths), "tokens", text="starting the targets")
        with StopSignals() as signals:
            from trainer.feature_writer import write_features

            code = write_features(prepared, out.absolute(), int(args.shard_mib * (1 << 20)), signals, _shown(bar))
    manifest = read_manifest(out)
    assert manifest is not None
    size = sum(shard.bytes for shard in manifest.shards)
    samples = sum(shard.samples for shard in manifest.shards)
    state = "all there" if code == FINISHED else "stopped; the same command goes on"
    print(
        f"{out}: {samples} of {manifest.identity.samples} samples in {len(manifest.shards)} shards, "
        f"{size / 2**20:.1f} MiB: {state}"
    )
    if args.json:
        record = {"schema": 1, "kind": "features", "out": str(out), "samples": samples, "bytes": size}
        print(json.dumps({**record, "complete": manifest.complete, "shards": len(manifest.shards)}))
    return code


def _shown(bar: Bar) -> Callable[[int, int, str], None]:
    """The bar's rate counts what this call does: from its first token on, behind what an earlier call had done."""
    before: int | None = None

    def show(done: int, _: int, text: str) -> None:
        nonlocal before
        if before is None or done == before:
            before = done
            bar.start(done)
        bar.update(done, text)

    return show


def _tokenizing(bar: Bar) -> Callable[[int, int, str], None]:
    """Progress of conversations that are made into tokens first."""
    begun = False

    def show(done: int, total: int, _: str) -> None:
        nonlocal begun
        if not begun:
            begun = True
            bar.phase("tokenizing", max(1, total), "lines", done=done)
        bar.update(done)

    return show


def _verify(out: Path) -> int:
    from trainer.errors import DataError
    from trainer.feature_writer import verify_features
    from trainer.features import read_manifest

    manifest = read_manifest(out)
    bar = Bar("verify", max(1, len(manifest.shards)) if manifest else 1, "shards")
    with bar.alive():
        found = verify_features(out, lambda done, _, text: bar.update(done, text))
    if not found.complete:
        raise DataError("whole as far as they go, but not complete", str(out), "go on writing them")
    print(f"{out}: {len(found.shards)} shards, all as they were written")
    return 0
