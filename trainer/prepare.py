"""Everything that is decided before a process starts: target, drafter geometry, data, plan, what to resume, needs.

Reads files and imports no torch, so `check` answers in a moment and a bad config never costs a model load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
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
from trainer.plan import Base, Plan
from trainer.ring import ITEM_BYTES, RingLayout

#: `check` reads larger data only in part.
WHOLE_SCAN_BYTES = 200 << 20
_PART_LINES = 1000
_TARGET_NEXT = "give the folder of a Hugging Face causal LM with safetensors weights"
_COPY_NEXT = "copy the target's folder again, whole"
#: Names under which a text target, and the text part of a vision-language one, keep their embedding.
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
#: What a drafter that is gone on from decides, since [drafter] has no keys for it.
_WIDTHS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_OF_START = ("rope_theta", "rope_parameters", "rms_norm_eps", "max_position_embeddings")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class TargetFacts:
    """What the target's folder says without loading it.

    Attributes:
        vocab_size, hidden_size: V, H. tied: embedding and head are one tensor. weight_bytes: of its weight files.
        raw: config.json.
    """

    path: str
    vocab_size: int
    hidden_size: int
    tied: bool
    weight_bytes: int
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        config, target, drafter: what runs. layout: of the ring. index: the data. plan: its batches.
        resume: a verified checkpoint, or None. cursor: batches done. step: optimiser steps done.
        total: batches of the whole run. notes: what the operator should know.
    """

    config: RunConfig
    target: TargetFacts
    drafter: DrafterConfig
    layout: RingLayout
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


def read_target(path: str) -> TargetFacts:
    """
    Raises:
        ConfigError: no such folder, no config.json, or weights that are not all there.
    """
    folder = Path(path)
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "there is no such folder" if not folder.is_dir() else "no config.json: this is no target"
        raise ConfigError(what, f"target.path = {path}", _TARGET_NEXT) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json cannot be read: {error}", str(file), _TARGET_NEXT) from error
    if not isinstance(raw, dict):
        raise ConfigError("config.json is not an object", str(file), _TARGET_NEXT)
    inner = raw.get("text_config")
    text = inner if isinstance(inner, dict) else raw
    try:
        vocab, hidden = int(text["vocab_size"]), int(text["hidden_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json lacks {error}", str(file), _TARGET_NEXT) from error
    tied = bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    files = _weight_files(folder)
    for weights in files:
        _check_weights(weights, [vocab, hidden])
    return TargetFacts(path, vocab, hidden, tied, sum(f.stat().st_size for f in files), raw)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{_INDEX} cannot be read: {error}", str(index), _TARGET_NEXT) from error
        files = [folder / name for name in names]
    else:
        files = [folder / _SINGLE]
    absent = [f.name for f in files if not f.is_file()]
    if absent:
        raise ConfigError(f"weights are missing: {', '.join(absent[:3])}", str(folder), _TARGET_NEXT)
    return files


def _check_weights(file: Path, embedding: list[int]) -> None:
    """Whether a safetensors file is as long as its own header says, and the embedding in it fits config.json.

    Half-copied folders are found here, before a worker starts. Only headers are read (u64 length, then JSON).

    Raises:
        ConfigError: it is cut, no safetensors file, or of another vocabulary or width than [V, H].
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError("its header is cut")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        whole = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        shapes = {name: list(header[name]["shape"]) for name in _EMBEDDINGS if name in header}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"this is no whole safetensors file: {error}", str(file), _COPY_NEXT) from error
    if size != whole:
        raise ConfigError(f"the file has {size} bytes, its header says {whole}", str(file), _COPY_NEXT)
    for name, shape in shapes.items():
        if shape != embedding:
            raise ConfigError(
                f"{name} is {shape}, config.json says vocab_size and hidden_size are {embedding}",
                str(file),
                "put the config.json and the weights of one and the same target there",
            )


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
        raise ConfigError(error.what, f"drafter ({error.where}), target {target.path}", error.next) from error


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
    target = read_target(config.target.path)
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
    if not Path(config.ring.dir).is_dir():
        raise ConfigError("there is no such folder", f"ring.dir = {config.ring.dir}", "name a folder on a large tmpfs")
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
        raise DataError(
            "the data is not what the checkpoint was trained on",
            f"{config.data.path} against {chosen.path}",
            "put the old data back, or begin anew in another checkpoints folder (deploy --fresh does)",
        )
    if config.readers and index.whole:
        check_features(Path(config.features.path or ""), identity_of(target, drafter, index, config))
    notes = [*corpus.notes, *_notes(config, index, chosen)]
    if start is not None:
        notes += start_notes(start, target.raw)
    base, replanned = (Base(), None) if chosen is None else _base(config, index, target, chosen)
    if replanned is not None:
        notes.append(replanned)
    plan = Plan(index.ids, index.lengths, config.train.seed, config.data.batch_size, config.buckets, base)
    cursor, step = (0, 0) if chosen is None else (chosen.batches, chosen.step)
    drafters = len(config.workers.drafter_devices)
    if config.train.steps is not None:
        total = cursor + max(0, config.train.steps - step) * drafters
    else:
        assert config.epochs is not None
        total = max(cursor, plan.total(config.epochs))
    return Prepared(config, target, drafter, layout, index, plan, chosen, cursor, step, total, tuple(notes))


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0  # the scan says what is wrong with it


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


def drafter_parameters(drafter: DrafterConfig) -> int:
    """Number of trained parameters, by formula."""
    h, i, d = drafter.hidden_size, drafter.intermediate_size, drafter.head_dim
    q, kv = drafter.num_attention_heads * d, drafter.num_key_value_heads * d
    layer = 2 * h * q + 2 * h * kv + 3 * h * i + 2 * h + 2 * d
    return drafter.num_hidden_layers * layer + len(drafter.target_layer_ids) * h * h + 2 * h


def needs(prepared: Prepared) -> dict[str, Any]:
    """Bytes and devices that the run will take; `deploy`'s preflight compares them with what is there.

    A target: its weights as stored, and one batch of features. A drafter: fp32 weights, gradients and two moments, the
    target's embedding and head, one batch of features, one chunk of logits twice; activations are not counted.
    """
    config, drafter, target = prepared.config, prepared.drafter, prepared.target
    parameters = drafter_parameters(drafter)
    item = ITEM_BYTES[config.dtype]
    embeddings = target.vocab_size * target.hidden_size * item * (1 if target.tied else 2)
    features = prepared.layout.batch * prepared.layout.length * prepared.layout.width * item
    return {
        "ring_bytes": prepared.layout.total_bytes,
        "ring_dir": config.ring.dir,
        "average_bytes": 2 * parameters * 12,
        "target_bytes_per_worker": target.weight_bytes + features,
        "drafter_bytes_per_worker": parameters * 16 + embeddings + features + 8 * config.loss.chunk * target.vocab_size,
        "checkpoint_bytes": parameters * 12,
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
