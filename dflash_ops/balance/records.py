"""One object of metrics.jsonl, checked: what is not a finite number at least 0 never reaches the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_ops.errors import UsageError

SHARES = ("wait", "compute", "copy", "sync")
#: Seconds and tokens beyond this are no measurement.
_MOST = 1e15


@dataclass(frozen=True)
class Sums:
    """Count, sum and sum of squares of seconds."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.count + other.count, self.total + other.total, self.squares + other.squares)


@dataclass(frozen=True)
class Totals:
    """`stages` of one record, or of several together: stage -> padded length (0: of any) -> sums."""

    seconds: float = 0.0
    batches: int = 0
    block_tokens: float = 0.0
    ctx_tokens: float = 0.0
    stages: Mapping[str, Mapping[int, Sums]] = field(default_factory=dict)

    def of(self, stage: str) -> Sums:
        """Over all lengths."""
        return sum(self.stages.get(stage, {}).values(), Sums())

    def __add__(self, other: Totals) -> Totals:
        stages: dict[str, dict[int, Sums]] = {name: dict(lengths) for name, lengths in self.stages.items()}
        for name, lengths in other.stages.items():
            mine = stages.setdefault(name, {})
            for length, sums in lengths.items():
                mine[length] = mine.get(length, Sums()) + sums
        return Totals(
            self.seconds + other.seconds,
            self.batches + other.batches,
            self.block_tokens + other.block_tokens,
            self.ctx_tokens + other.ctx_tokens,
            stages,
        )


@dataclass(frozen=True)
class Record:
    """What the model needs of a record. lives: worker -> its life. shares: worker -> wait, compute, copy, sync."""

    number: int
    t: float
    step: int
    total: int
    block_tok_s: float
    ctx_tok_s: float
    lives: Mapping[str, int]
    shares: Mapping[str, Mapping[str, float]]
    stages: Totals | None


def check(raw: Any, number: int) -> Record:
    """
    Args:
        raw: one decoded object. number: its line, from 1.

    Raises:
        UsageError: names the record and the key.
    """
    where = f"metrics.jsonl, record {number}"
    if not isinstance(raw, Mapping):
        raise _bad("is no object", where)
    workers = _mapping(raw, "workers", where)
    shares: dict[str, dict[str, float]] = {}
    lives: dict[str, int] = {}
    for name in workers:
        worker = _mapping(workers, name, f"{where}: workers")
        shares[name] = {kind: _number(worker, kind, f"{where}: workers.{name}", most=1.5) for kind in SHARES}
        lives[name] = int(_number(worker, "life", f"{where}: workers.{name}"))
    return Record(
        number=number,
        t=_number(raw, "t", where),
        step=int(_number(raw, "step", where)),
        total=int(_number(raw, "total", where)),
        block_tok_s=_number(raw, "block_tok_s", where),
        ctx_tok_s=_number(raw, "ctx_tok_s", where),
        lives=lives,
        shares=shares,
        stages=None if raw.get("stages") is None else _stages(_mapping(raw, "stages", where), f"{where}: stages"),
    )


def _stages(raw: Mapping[str, Any], where: str) -> Totals:
    plain = ("seconds", "batches", "block_tokens", "ctx_tokens")
    stages: dict[str, dict[int, Sums]] = {}
    for name, value in raw.items():
        if name in plain:
            continue
        if isinstance(value, Mapping):
            stages[name] = {_length(k, f"{where}.{name}"): _sums(v, f"{where}.{name}.{k}") for k, v in value.items()}
        else:
            stages[name] = {0: _sums(value, f"{where}.{name}")}
    seconds, batches, block, ctx = (_number(raw, name, where) for name in plain)
    return Totals(seconds, int(batches), block, ctx, stages)


def _length(text: Any, where: str) -> int:
    if not str(text).isdigit():
        raise _bad(f"has the length {text!r}", where)
    return int(text)


def _sums(value: Any, where: str) -> Sums:
    if not isinstance(value, list) or len(value) != 3:
        raise _bad("is not [count, sum, sum of squares]", where)
    count, total, squares = (_checked(v, where) for v in value)
    if count != int(count) or (count == 0 and total > 0) or squares * count < total * total * (1 - 1e-6):
        raise _bad(f"{value} cannot be count, sum and sum of squares of seconds", where)
    return Sums(int(count), total, squares)


def _mapping(raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = raw.get(key)
    if not isinstance(value, Mapping):
        raise _bad(f"has no table {key!r}", where)
    return value


def _number(raw: Mapping[str, Any], key: str, where: str, most: float = _MOST) -> float:
    if key not in raw:
        raise _bad(f"lacks {key!r}", where)
    return _checked(raw[key], f"{where}.{key}" if ":" in where else f"{where}: {key}", most)


def _checked(value: Any, where: str, most: float = _MOST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(f"{value!r} is no number", where)
    if not math.isfinite(value) or value < 0 or value > most:
        raise _bad(f"{value!r} cannot be", where)
    return float(value)


def _bad(what: str, where: str) -> UsageError:
    return UsageError(
        f"what was measured cannot be read: {what}", where, "give the metrics.jsonl that the bundled trainer wrote"
    )


# ---- run.json


def table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of run.json, empty if it is not there.

    Raises:
        UsageError: it is no table.
    """
    found = config.get(name, {}) if isinstance(config, Mapping) else None
    if not isinstance(found, Mapping):
        raise UsageError(f"[{name}] is no table", "run.json", "give the config that the run was started with")
    return found


def whole(found: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number at least 0 of a table; `default` if it is missing or null.

    Raises:
        UsageError: it is something else.
    """
    value = found.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{key} is {value!r}", "run.json", "give the config that the run was started with")
    return value
