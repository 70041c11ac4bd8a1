"""Everything that is decided before a process starts: target, drafter geometry, data, plan, what to resume, needs.

Reads files and imports no torch, so `check` answers in a moment and a bad config never costs a model load.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.board import require_tensorboard
from trainer.checkpoint import Checkpoint, choose
from trainer.config import RunConfig
from trainer.corpus import Progress, open_corpus
from trainer.data import DataIndex, scan
from trainer.drafter_config import SLIDING, DrafterConfig
from trainer.drafter_start import same_start, start_notes, start_of
from trainer.errors import ConfigError, ConfigErrors, DataError
from trainer.features import check_features, identity_of
from trainer.hub import on_this_machine
from trainer.plan import Base, Plan
from trainer.ring import ITEM_BYTES, RingLayout
from trainer.state_layout import StateLayout, drafter_shapes
from trainer.target_files import TargetFacts, read_target

#: `check` reads larger data only in part.
WHOLE_SCAN_BYTES = 200 << 20
_PART_LINES = 1000
#: What a drafter that is gone on from decides, since [drafter] has no keys for it.
_WIDTHS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_OF_START = ("rope_theta", "rope_parameters", "rms_norm_eps", "max_position_embeddings")
#: Fields of a drafter's geometry -> the key that decides them, and what to do.
_AS_IN_RUN_TOML = {
    "num_hidden_layers": ("drafter.layers", "at least 1"),
    "target_layer_ids": ("drafter.layer_ids", "name different layers, counted from 0"),
    "mask_token_id": ("drafter.mask_token_id", "name a token of the target's vocabulary that its text does not use"),
    "taps": ("drafter.taps", "ask for fewer"),
    "full_layers": ("drafter.full_layers", "at most drafter.layers"),
}


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        config, target, drafter: what runs. layout: of the ring. state: of the averages in memory.
        index: the data. plan: its batches. resume: a verified checkpoint, or None.
        cursor: batches done. step: optimiser steps done. total: batches of the whole run.
        notes: what the operator should know.
    """

    config: RunConfig
    target: TargetFacts
    drafter: DrafterConfig
    layout: RingLayout
    state: StateLayout
    index: DataIndex
    plan: Plan
    resume: Checkpoint | None
    cursor: int
    step: int
    total: int
    notes: tuple[str, ...]

    @property
    def total_steps(self) -> int:
        drafters = len(self.config.workers.drafter_devices)
        return self.step + -(-max(0, self.total - self.cursor) // drafters)


def drafter_geometry(config: RunConfig, target: TargetFacts, start: DrafterConfig | None = None) -> DrafterConfig:
    """The drafter that the config asks for, from the target's config.json.

    Args:
        start: a drafter whose weights it goes on from. What [drafter] has no key for (widths of MLP and heads, RoPE,
            causality) is then as it is there.

    Raises:
        ConfigError: a geometry that cannot be.
    """
    raw = dict(target.raw)
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"] = SimpleNamespace(**raw["text_config"])
    table = config.drafter
    try:
        asked = DrafterConfig.from_target(
            SimpleNamespace(**raw),
            layers=table.layers,
            block_size=table.block_size,
            mask_token_id=table.mask_token_id,
            taps=table.taps,
            target_layer_ids=table.layer_ids,
            sliding_window=table.sliding_window,
            full_layers=table.full_layers,
            **({} if start is None else {name: getattr(start, name) for name in _WIDTHS}),
        )
        if start is None:
            return asked
        kept = {name: getattr(start, name) for name in _OF_START}
        return replace(asked, **kept, causal=start.causal and SLIDING in asked.layer_types)
    except ConfigError as error:
        spot = error.where.rpartition(".")[2]  # the name of the field, with or without its table
        name, fix = _AS_IN_RUN_TOML.get(spot, (f"drafter ({error.where})", "correct [drafter] or target.path"))
        what = error.what.removeprefix(f"{error.where}: ")
        raise ConfigError(what, f"{name}, target {target.path}", error.next or fix) from error


def prepare(
    config: RunConfig,
    checkpoints: Path | None,
    resume: str,
    *,
    in_part: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """
    Args:
        config: validated. checkpoints: their folder, None if the caller has none. resume: "auto", "none" or a path.
        in_part: write nothing, and read only the first lines of large data (`check`).
        progress: told how far the conversations are made into tokens.

    Raises:
        ConfigError, DataError, CheckpointError: what cannot run.
    """
    config, whole, hub_notes = on_this_machine(config, weights=not in_part)
    target = read_target(config.target.path, weights=whole)
    if config.train.tensorboard:
        require_tensorboard()
    chosen = None if checkpoints is None else choose(checkpoints, resume)
    start = start_of(config, chosen)
    drafter = drafter_geometry(config, target, start)
    layout = RingLayout(
        slots=config.slots,
        batch=config.data.batch_size,
        length=config.buckets[-1],
        width=len(drafter.target_layer_ids) * drafter.hidden_size,
        dtype=config.dtype,
    )
    state = StateLayout(drafter_shapes(drafter), config.moment_sets)
    notes = _room(config, layout, state)
    if chosen is not None:
        _same_drafter(chosen, drafter)
    elif start is not None:
        same_start(config.drafter.init_from or "", start, drafter)
    limit = _PART_LINES if in_part and _size(config.data.path) > WHOLE_SCAN_BYTES else None
    corpus = open_corpus(
        config.data, target.path, target.vocab_size, checkpoints, limit=limit, keep=not in_part, progress=progress
    )
    index = corpus.index
    if chosen is not None and index.whole and chosen.state["data"]["sha256"] != index.sha256:
        made = index.path != index.source
        raise DataError(
            ("the tokens made from the data are" if made else "the data is")
            + " not what the checkpoint was trained on",
            f"{config.data.path} against {chosen.path}",
            ("put the old data, tokenizer, chat template and options back" if made else "put the old data back")
            + ", or begin anew in another checkpoints folder (deploy --fresh does)",
        )
    if config.readers and index.whole and whole:
        check_features(Path(config.features.path or ""), identity_of(target, drafter, index, config))
    notes += [*hub_notes, *target.notes, *corpus.notes, *_notes(config, index, chosen)]
    if start is not None:
        notes += start_notes(start, target.raw)
    base, replanned = (Base(), None) if chosen is None else _base(config, index, target, chosen)
    if replanned is not None:
        notes.append(replanned)
    plan = Plan(index.ids, index.lengths, config.train.seed, config.data.batch_size, config.buckets, base)
    cursor, step = (0, 0) if chosen is None else (chosen.batches, chosen.step)
    total = total_batches(config, plan, cursor, step, len(config.workers.drafter_devices))
    return Prepared(config, target, drafter, layout, state, index, plan, chosen, cursor, step, total, tuple(notes))


def total_batches(config: RunConfig, plan: Plan, cursor: int, step: int, drafters: int) -> int:
    """Batches of the whole run, by what is done (batches, steps) and the number of drafters from now on."""
    if config.train.steps is not None:
        return cursor + max(0, config.train.steps - step) * drafters
    assert config.epochs is not None
    return max(cursor, plan.total(config.epochs))


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0  # the scan says what is wrong with it


def _room(config: RunConfig, layout: RingLayout, state: StateLayout) -> list[str]:
    """A note where the shared memory is short of room now: what holds it may be the run that this one replaces.

    Raises:
        ConfigError: no such folder, or its file system is too small even when it is empty.
    """
    folder = config.ring.dir
    try:
        found = os.statvfs(folder)
    except OSError:
        raise ConfigError("there is no such folder", f"ring.dir = {folder}", "name a folder on a large tmpfs") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("no file can be made there", f"ring.dir = {folder}", "name a folder that can be written")
    need = layout.total_bytes + state.total_bytes
    whole, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    ring = f"the ring {layout.total_bytes} ({layout.slots} slots of {layout.slot_bytes})"
    parts = f"{ring}, the drafters' averages {state.total_bytes}"
    if need > whole:
        raise ConfigError(
            f"{need} bytes of shared memory are needed, the file system has {whole}: {parts}",
            f"ring.dir = {folder}",
            "a larger tmpfs there (a container's --shm-size), another ring.dir, or fewer ring.slots",
        )
    return [f"{free} bytes are free in {folder}, {need} are needed: {parts}"] if need > free else []


def _notes(config: RunConfig, index: DataIndex, chosen: Checkpoint | None) -> list[str]:
    notes = []
    if config.features.path is not None:
        source = "targets compute" if not config.readers else f"{config.readers} readers take"
        where = f" from {config.features.path}" if config.readers else f": {config.features.path} is not read"
        notes.append(f"{source} the features{where}")
    every, average = config.checkpoint.every, config.train.average_every
    if every % average:
        later = -(-every // average) * average
        notes.append(f"checkpoints are taken at averagings only: every {later} steps, not every {every}")
    if index.cut:
        notes.append(f"{index.cut} samples are longer than max_length = {config.data.max_length} and were cut")
    if chosen is not None and chosen.state.get("threads") != config.workers.threads:
        notes.append(
            f"workers.threads was {chosen.state.get('threads')}, is {config.workers.threads}: "
            "the resume will not be equal bit for bit"
        )
    return notes


def _same_drafter(chosen: Checkpoint, drafter: DrafterConfig) -> None:
    before, now = chosen.state["drafter"], drafter.to_hf()
    differ = sorted(k for k in now.keys() | before.keys() if now.get(k) != before.get(k))
    if differ:
        what = ", ".join(f"{k} was {before.get(k)}, is {now.get(k)}" for k in differ[:3])
        raise ConfigError(
            f"the checkpoint holds another drafter: {what}",
            str(chosen.path),
            "correct [drafter], or begin anew in another checkpoints folder (deploy --fresh does)",
        )


def _base(config: RunConfig, index: DataIndex, target: TargetFacts, chosen: Checkpoint) -> tuple[Base, str | None]:
    """The plan's base, and a note if batches are made in another way than before."""
    old = chosen.state["plan"]
    base = Base.from_dict(old["base"])
    way = {"seed": config.train.seed, "batch_size": config.data.batch_size, "buckets": list(config.buckets)}
    changed = [k for k in way if old[k] != way[k]]
    if not changed:
        return base, None
    longest = int(old["buckets"][-1])
    if longest != config.data.max_length:  # another cut: what was trained must be found as it was then
        index = scan(index.path, vocab_size=target.vocab_size, max_length=longest, max_bad_lines=sys.maxsize)
    before = Plan(index.ids, index.lengths, old["seed"], old["batch_size"], tuple(old["buckets"]), base)
    return before.rebase(chosen.batches), (
        f"{', '.join(changed)} changed: the epoch goes on with the samples that were not trained yet"
    )


# ---- what it will take


def needs(prepared: Prepared) -> dict[str, Any]:
    """Bytes and devices that the run will take; `deploy`'s preflight compares them with what is there.

    A target: its weights as stored, and one batch of features. A drafter: fp32 weights, gradients and two moments, the
    target's embedding and head, one batch of features, one chunk of logits twice; activations are not counted.
    """
    config, target = prepared.config, prepared.target
    parameters = prepared.state.parameters
    item = ITEM_BYTES[config.dtype]
    embeddings = target.vocab_size * target.hidden_size * item * (1 if target.tied else 2)
    features = prepared.layout.batch * prepared.layout.length * prepared.layout.width * item
    return {
        "ring_bytes": prepared.layout.total_bytes,
        "ring_dir": config.ring.dir,
        "average_bytes": prepared.state.total_bytes,
        "shared_bytes": prepared.layout.total_bytes + prepared.state.total_bytes,
        "target_bytes_per_worker": target.weight_bytes + features,
        "drafter_bytes_per_worker": parameters * 16 + embeddings + features + 8 * config.loss.chunk * target.vocab_size,
        "checkpoint_bytes": parameters * (4 + 8 * prepared.state.moment_sets),
        "drafter_parameters": parameters,
        "devices": sorted({*config.workers.target_devices, *config.workers.drafter_devices}),
        "targets": len(config.workers.target_devices),
        "readers": config.readers,
        "drafters": len(config.workers.drafter_devices),
    }


def gpus_missing(config: RunConfig) -> list[ConfigError]:
    """GPUs that are asked for and not there, by their device files."""
    wanted = sorted({int(d[5:]) for d in _devices(config) if d.startswith("cuda:")})
    if not wanted:
        return []
    there = sum(p.name[6:].isdigit() for p in Path("/dev").glob("nvidia*"))
    absent = [n for n in wanted if n >= there]
    if not absent:
        return []
    return [
        ConfigError(
            f"cuda:{n} is asked for, {there} GPUs are there",
            "workers.target_devices, workers.drafter_devices",
            "name GPUs that exist, or pass more of them to the container",
        )
        for n in absent
    ]


def _devices(config: RunConfig) -> tuple[str, ...]:
    return config.workers.target_devices + config.workers.drafter_devices


def raise_if_any(errors: list[ConfigError]) -> None:
    if errors:
        raise ConfigErrors(errors)
