"""run.toml or run.json -> frozen dataclasses. Every fault names the file, the key and the fix; all are told at once.

The dataclasses are the only list of keys: docs/run-config.md is held to them by a test. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, ConfigErrors

SCHEMA = 1
DEFAULT_EPOCHS = 6
#: The same lists as in trainer.loss and trainer.attention, which import torch.
OBJECTIVES = ("dflash", "dpace")
LOSS_MODES = ("fused", "checkpoint")
ATTENTION = ("auto", "structured", "sdpa", "flex")
DTYPES = ("auto", "float32", "bfloat16")
SCHEDULES = ("ready", "fixed")
SYNCS = ("average", "step")
TURNS = ("all", "last")
MOMENTS = ("averaged", "local")
ON_LOSS = ("wait", "go_on")


def key(default: Any = dataclasses.MISSING, *, doc: str, **rule: Any) -> Any:
    """A config key. `rule` may hold `least`, `above`, `most` (numbers) and `one_of` (texts)."""
    metadata = {"doc": doc, **rule}
    if isinstance(default, list):
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TargetConfig:
    """[target]"""

    path: str = key(doc="folder of the target (config.json and safetensors weights), or its hub id")
    dtype: str = key("auto", doc="dtype of the target, of features and of the head", one_of=DTYPES)
    revision: str | None = key(None, doc="branch, tag or commit of a hub id")


@dataclass(frozen=True)
class DrafterTable:
    """[drafter]"""

    mask_token_id: int = key(doc="token of the target's vocabulary that stands for 'to be predicted'", least=0)
    layers: int = key(5, doc="drafter layers", least=1)
    block_size: int = key(16, doc="tokens of a block, its anchor included", least=2)
    taps: int | None = key(None, doc="how many target layers are read", least=1)
    layer_ids: tuple[int, ...] | None = key(None, doc="the tapped layers themselves, 0-based", least=0)
    sliding_window: int | None = key(None, doc="window of the sliding layers, in positions", least=1)
    full_layers: int | None = key(None, doc="last layers with full attention when there is a window", least=0)
    init_from: str | None = key(None, doc="folder of a drafter whose weights a fresh run starts from")
    attention: str = key("auto", doc="how training attention is computed", one_of=ATTENTION)


@dataclass(frozen=True)
class DataConfig:
    """[data]"""

    path: str = key(doc="JSONL file of conversations, or of tokenised samples")
    max_length: int = key(3072, doc="longer samples are cut here, in tokens", least=2)
    buckets: tuple[int, ...] = key([], doc="padded lengths, ascending, the last one max_length", least=2)
    batch_size: int = key(4, doc="sequences of a batch", least=1)
    max_bad_lines: int = key(0, doc="bad lines that are skipped; one more and the data is refused", least=0)
    tokenizer: str | None = key(None, doc="folder or hub id of the tokenizer, if not the target's")
    chat_template: str | None = key(None, doc="file of a chat template, if not the tokenizer's")
    template_options: str | None = key(None, doc="what the chat template is called with, as a JSON object")
    turns: str = key("all", doc="which turns of the assistant have a loss", one_of=TURNS)
    cache: str | None = key(None, doc="folder for the tokens made from conversations")


@dataclass(frozen=True)
class TrainConfig:
    """[train]"""

    epochs: int | None = key(None, doc="passes over the data; 6 if `steps` is not given either", least=1)
    steps: int | None = key(None, doc="optimiser steps of one drafter, instead of `epochs`", least=1)
    lr: float = key(6e-4, doc="peak learning rate", above=0.0)
    warmup: float = key(0.04, doc="share of the run with a rising learning rate", least=0.0, most=1.0)
    clip: float = key(1.0, doc="largest norm of the gradient", above=0.0)
    weight_decay: float = key(0.01, doc="AdamW's decay; norm weights have none", least=0.0)
    anchors: int = key(512, doc="blocks of a sequence", least=1)
    gamma: float | None = key(None, doc="decay of the slot weights, in slots", above=0.0)
    objective: str = key("dflash", doc="which loss", one_of=OBJECTIVES)
    alpha: float = key(0.5, doc="floor of the d-pace weights", least=0.0, most=1.0)
    seed: int = key(0, doc="of the order, the anchors and the first weights", least=0, most=2**63 - 1)
    sync: str = key("average", doc="when the drafters become equal again", one_of=SYNCS)
    average_every: int = key(50, doc="steps between two averagings of the drafters", least=1)
    moments: str = key("averaged", doc="what averaging does with AdamW's moments", one_of=MOMENTS)
    log_every: int = key(10, doc="steps between two progress lines", least=1)
    schedule: str = key("ready", doc="which drafter gets a batch", one_of=SCHEDULES)
    tensorboard: bool = key(False, doc="also write event files for TensorBoard")


@dataclass(frozen=True)
class LossConfig:
    """[loss]"""

    mode: str = key("fused", doc="how the loss avoids full logits", one_of=LOSS_MODES)
    reentrant: bool = key(False, doc="which of torch's two gradient checkpointings")
    chunk: int = key(2048, doc="rows whose logits exist at one time", least=1)


@dataclass(frozen=True)
class WorkersConfig:
    """[workers]"""

    target_devices: tuple[str, ...] = key(["cpu"], doc="one target worker on each")
    drafter_devices: tuple[str, ...] = key(["cpu"], doc="one drafter worker on each")
    threads: int = key(1, doc="CPU threads of each worker", least=1)
    restarts: int = key(3, doc="times a target worker that died is started anew without being of use between", least=0)
    drafter_restarts: int = key(3, doc="times drafters are started anew without a new average between", least=0)
    timeout_s: float = key(1800.0, doc="longest silence of a worker that loads or compiles, in seconds", above=0.0)
    step_timeout_s: float = key(
        120.0,
        doc="longest silence within a batch or averaging, in seconds; at least 10 x what they take",
        above=0.0,
    )
    spare_drafters: bool = key(True, doc="beside each drafter a process that has loaded its code waits to take over")


@dataclass(frozen=True)
class RingConfig:
    """[ring]"""

    slots: int | None = key(None, doc="batches that may wait between targets and drafters", least=1)
    dir: str = key("/dev/shm", doc="folder on whose file system the ring's and the averages' memory is taken")
    debug: bool = key(False, doc="slots are checksummed by targets and checked by drafters")


@dataclass(frozen=True)
class FeaturesConfig:
    """[features]"""

    path: str | None = key(None, doc="folder written by `features`; read in place of targets when there are none")
    readers: int = key(1, doc="processes that read it", least=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]"""

    every: int = key(500, doc="steps between checkpoints, taken at the next averaging", least=1)
    keep_last: int = key(3, doc="newest checkpoints that stay", least=1)
    keep_every: int | None = key(None, doc="steps; the first checkpoint at or behind each multiple stays", least=1)
    grace_s: float = key(600.0, doc="longest time for writing one checkpoint, in seconds", above=0.0)


@dataclass(frozen=True)
class NodesConfig:
    """[nodes]"""

    on_loss: str = key("wait", doc="what the others do when a node is lost", one_of=ON_LOSS)
    wait_s: float = key(1800.0, doc="longest wait for a lost node, in seconds", above=0.0)
    lost_after_s: float = key(15.0, doc="silence after which a node is lost, in seconds", least=1.0)


@dataclass(frozen=True)
class RunConfig:
    """A whole run.toml. Built by `load_config`."""

    target: TargetConfig
    drafter: DrafterTable
    data: DataConfig
    train: TrainConfig
    loss: LossConfig
    workers: WorkersConfig
    ring: RingConfig
    features: FeaturesConfig
    checkpoint: CheckpointConfig
    nodes: NodesConfig

    @property
    def buckets(self) -> tuple[int, ...]:
        """Padded lengths, ascending, the last one max_length. Without `data.buckets`: a quarter, a half, the whole."""
        if self.data.buckets:
            return self.data.buckets
        longest = self.data.max_length
        least = min(longest, max(64, self.drafter.block_size))
        return tuple(sorted({max(least, longest // 4), max(least, longest // 2), longest}))

    @property
    def epochs(self) -> int | None:
        """Passes over the data, None if the run is counted in steps."""
        return self.train.epochs or (None if self.train.steps is not None else DEFAULT_EPOCHS)

    @property
    def readers(self) -> int:
        """Processes that read features from disk: only where there are no targets."""
        return 0 if self.workers.target_devices else self.features.readers

    @property
    def slots(self) -> int:
        """Ring slots: two for each worker if not given, so that nobody waits for a copy."""
        producers = len(self.workers.target_devices) + self.readers
        return self.ring.slots or 2 * (producers + len(self.workers.drafter_devices))

    @property
    def gamma(self) -> float:
        """Slot decay: 7, 5, 4 for blocks of 16, 10, 8, and on the lines between and beyond them."""
        if self.train.gamma is not None:
            return self.train.gamma
        block = self.drafter.block_size
        return max(1.0, 4 + (block - 8) / 2 if block <= 10 else 5 + (block - 10) / 3)

    @property
    def dtype(self) -> str:
        """The target's dtype with "auto" resolved: bfloat16 as soon as a worker is on a GPU."""
        if self.target.dtype != "auto":
            return self.target.dtype
        on_gpu = any(d != "cpu" for d in self.workers.target_devices + self.workers.drafter_devices)
        return "bfloat16" if on_gpu else "float32"

    @property
    def moment_sets(self) -> int:
        """How many sets of moments there are: one that all share, or one for each drafter."""
        return len(self.workers.drafter_devices) if self.train.moments == "local" else 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON would hold it; `load_config` reads it back."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


TABLES: dict[str, type[Any]] = {
    "target": TargetConfig,
    "drafter": DrafterTable,
    "data": DataConfig,
    "train": TrainConfig,
    "loss": LossConfig,
    "workers": WorkersConfig,
    "ring": RingConfig,
    "features": FeaturesConfig,
    "checkpoint": CheckpointConfig,
    "nodes": NodesConfig,
}


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, targets: int | None = None, drafters: int | None = None
) -> RunConfig:
    """Reads run.toml or run.json (by the name's end) and applies `--set table.key=value` overrides.

    Args:
        path: the file. overrides: `table.key=value` texts.
        targets, drafters: keep only so many devices of the lists, from their front.

    Raises:
        ConfigErrors: with every fault found.
    """
    file = Path(path)
    raw = _read(file)
    errors: list[ConfigError] = []
    for override in overrides:
        _override(raw, override, errors)
    for option, role, count in (("--targets", "target_devices", targets), ("--drafters", "drafter_devices", drafters)):
        if count is not None:
            _keep(raw, option, role, count, errors)
    return parse_config(raw, str(file), errors)


def parse_config(raw: Mapping[str, Any], where: str, errors: list[ConfigError] | None = None) -> RunConfig:
    """Builds a config from decoded TOML or JSON.

    Args:
        raw: tables by name. where: the file's name, for messages. errors: faults found before, told with the others.

    Raises:
        ConfigErrors: with every fault found.
    """
    errors = [] if errors is None else errors
    schema = raw.get("schema", SCHEMA)
    if schema != SCHEMA:
        errors.append(ConfigError(f"schema is {schema!r}", f"{where}: schema", f"this trainer reads schema = {SCHEMA}"))
    _unknown([k for k in raw if k != "schema"], list(TABLES), "table", where, errors)
    tables = {name: _table(cls, raw.get(name, {}), f"{where}: {name}", errors) for name, cls in TABLES.items()}
    if errors:
        raise ConfigErrors(errors)
    config = RunConfig(**tables)
    _contradictions(config, where, errors)
    if errors:
        raise ConfigErrors(errors)
    return config


def _read(file: Path) -> dict[str, Any]:
    next_step = "give a run.toml or run.json (docs/run-config.md)"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigErrors([ConfigError(f"the config cannot be read: {error}", str(file), next_step)]) from error
    try:
        if file.suffix == ".json":
            raw = json.loads(text)
        else:
            import tomllib

            raw = tomllib.loads(text)
    except ImportError:
        raise ConfigErrors(
            [ConfigError("this Python reads no TOML", str(file), "give the same keys as run.json, or use Python 3.11")]
        ) from None
    except ValueError as error:  # both decoders' errors, with line and column
        raise ConfigErrors([ConfigError(f"the config cannot be parsed: {error}", str(file), next_step)]) from error
    if not isinstance(raw, dict):
        raise ConfigErrors([ConfigError("the config is not an object of tables", str(file), next_step)])
    return raw


def _override(raw: dict[str, Any], override: str, errors: list[ConfigError]) -> None:
    """One `table.key=value`: the value as JSON (numbers, lists, null), otherwise as plain text."""
    name, equals, text = override.partition("=")
    table, dot, entry = name.strip().partition(".")
    if not equals or not dot or not entry:
        errors.append(ConfigError(f"--set {override}: no table.key=value", "--set", "for example train.lr=3e-4"))
        return
    try:
        value = json.loads(text)
    except ValueError:
        value = text.strip()
    inner = raw.setdefault(table, {})
    if isinstance(inner, dict):
        inner[entry] = value


def _keep(raw: dict[str, Any], option: str, role: str, count: int, errors: list[ConfigError]) -> None:
    """The first `count` devices of a list; it must have as many."""
    workers = raw.setdefault("workers", {})
    devices = workers.get(role, ["cpu"]) if isinstance(workers, dict) else None
    if not isinstance(devices, list):
        return  # told by the table itself
    if not 0 <= count <= len(devices):
        errors.append(
            ConfigError(f"{option} {count}: workers.{role} names {len(devices)}", option, f"0 to {len(devices)}")
        )
    workers[role] = devices[: max(0, count)]


def _unknown(names: Sequence[str], known: Sequence[str], noun: str, where: str, errors: list[ConfigError]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
            errors.append(ConfigError(f"unknown {noun} {name!r}", f"{where}.{name}" if noun == "key" else where, fix))


def _table(cls: type[Any], raw: Any, where: str, errors: list[ConfigError]) -> Any:
    if not isinstance(raw, Mapping):
        errors.append(ConfigError(f"{raw!r} is not a table", where, "see docs/run-config.md"))
        return None
    fields = {f.name: f for f in dataclasses.fields(cls)}
    _unknown(list(raw), list(fields), "key", where, errors)
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    before = len(errors)
    for name, entry in fields.items():
        spot = f"{where}.{name}"
        if raw.get(name) is not None:
            values[name] = _value(hints[name], raw[name], spot, entry.metadata, errors)
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            errors.append(ConfigError(f"{name} is missing", spot, f"give it: {entry.metadata['doc']}"))
    return cls(**values) if len(errors) == before else None


def _value(hint: Any, value: Any, where: str, rule: Mapping[str, Any], errors: list[ConfigError]) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            errors.append(ConfigError(f"{value!r} is not a list", where, f"a list: {rule['doc']}"))
            return None
        inner = typing.get_args(hint)[0]
        return tuple(_value(inner, v, f"{where}[{i}]", rule, errors) for i, v in enumerate(value))
    if where.partition("[")[0].endswith("_devices"):
        return _device(value, where, errors)
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    fits = isinstance(value, hint) or (hint is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and hint is not bool):
        errors.append(ConfigError(f"{value!r} is not {wanted}", where, f"{wanted}: {rule['doc']}"))
        return None
    if hint is str and not value:
        errors.append(ConfigError("it is empty", where, str(rule["doc"])))
    if "one_of" in rule and value not in rule["one_of"]:
        near = difflib.get_close_matches(value, rule["one_of"], n=1, cutoff=0.5)
        fix = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(rule['one_of'])}"
        errors.append(ConfigError(f"{value!r} is not known", where, fix))
    too_small = ("least" in rule and not value >= rule["least"]) or ("above" in rule and not value > rule["above"])
    too_large = ("most" in rule and not value <= rule["most"]) or value == float("inf")
    if too_small or too_large:
        bounds = [f"{word} {rule[name]}" for name, word in _BOUNDS if name in rule]
        errors.append(ConfigError(f"{value!r} is out of range", where, " and ".join(bounds) or "a finite number"))
    return float(value) if hint is float else value


_BOUNDS = (("least", "at least"), ("above", "above"), ("most", "at most"))


def _device(value: Any, where: str, errors: list[ConfigError]) -> str | None:
    """ "cpu", "cuda:N", or the bare number N of a GPU."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return f"cuda:{value}"
    if isinstance(value, str):
        kind, _, number = value.partition(":")
        if value == "cpu" or (kind == "cuda" and number.isascii() and number.isdigit()):
            return value
        if value.isascii() and value.isdigit():
            return f"cuda:{value}"
    errors.append(ConfigError(f"{value!r} is no device", where, 'a GPU\'s number, "cuda:N" or "cpu"'))
    return None


def _contradictions(config: RunConfig, where: str, errors: list[ConfigError]) -> None:
    """What no single key shows."""

    def fault(what: str, spot: str, fix: str) -> None:
        errors.append(ConfigError(what, f"{where}: {spot}", fix))

    data, drafter, workers, train = config.data, config.drafter, config.workers, config.train
    if not workers.target_devices and config.features.path is None:
        fault(
            "there are 0 targets",
            "workers.target_devices",
            "name at least one device, for example [0], or features.path to train from features on disk",
        )
    if not workers.drafter_devices:
        fault("there are 0 drafters", "workers.drafter_devices", "name at least one device, for example [1]")
    gpus = [d for d in workers.target_devices + workers.drafter_devices if d != "cpu"]
    for device in sorted({d for d in gpus if gpus.count(d) > 1}):
        fault(f"{device} is given to two workers", "workers", "one process a GPU: remove it from one of the lists")
    if drafter.block_size > data.max_length:
        fault(
            f"a block of {drafter.block_size} is longer than max_length = {data.max_length}",
            "drafter.block_size",
            "a smaller block, or a larger data.max_length",
        )
    if data.buckets and (list(data.buckets) != sorted(set(data.buckets)) or data.buckets[-1] != data.max_length):
        fault(
            f"buckets {list(data.buckets)} do not ascend to max_length = {data.max_length}",
            "data.buckets",
            "list padded lengths in ascending order, the last one max_length",
        )
    if drafter.taps is not None and drafter.layer_ids is not None and drafter.taps != len(drafter.layer_ids):
        fault(f"taps = {drafter.taps}, but layer_ids names {len(drafter.layer_ids)}", "drafter.taps", "give one")
    if train.sync == "step" and config.slots < len(workers.drafter_devices):
        fault(
            f"{len(workers.drafter_devices)} drafters step together, the ring has {config.slots} slots",
            "ring.slots",
            "at least one slot for each drafter, or remove it",
        )
    if train.epochs is not None and train.steps is not None:
        fault("both epochs and steps are given", "train", "remove one of them")
    if drafter.attention == "flex" and "cpu" in workers.drafter_devices:
        fault(
            "flex attention needs CUDA, a drafter is on the CPU",
            "drafter.attention",
            'use "auto", "structured" or "sdpa"',
        )
