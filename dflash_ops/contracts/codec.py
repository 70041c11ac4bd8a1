"""Dataclass <-> JSON, one way for every contract.

Readers ignore keys that they do not know and give missing ones their default, so that an old file loads for ever.
A wrong type is a ContractError that names the key: a message that cannot be understood is never half-understood.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from dflash_ops.errors import ContractError

T = TypeVar("T")


#: What is its own JSON value: asked first, since most values are.
_PLAIN = frozenset({str, int, float, bool, type(None)})


def to_dict(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings as plain JSON values."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_dict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(v) for v in value]
    return value


def dumps(value: Any) -> str:
    """One line of JSON, without a newline; NaN and infinities become null (JSON has none)."""
    return json.dumps(_finite(to_dict(value)), ensure_ascii=False, separators=(",", ":"))


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _finite(value: Any) -> Any:
    if _not_finite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def from_dict(cls: type[T], data: Any, where: str = "") -> T:
    """Build a dataclass from decoded JSON.

    Args:
        cls: a dataclass; if it has a class attribute `SCHEMA`, a larger `schema` in the data is refused.
        data: the decoded JSON object.
        where: what the data is, for the error text.

    Raises:
        ContractError: not an object, a required key is missing, a value has another type, or a newer schema.
    """
    where = where or cls.__name__
    if not isinstance(data, Mapping):
        raise ContractError(f"expected a JSON object, got {type(data).__name__}", where)
    newest = getattr(cls, "SCHEMA", None)
    schema = data.get("schema")
    if newest is not None and isinstance(schema, int) and schema > newest:
        raise ContractError(
            f"written in schema {schema}, this version reads up to {newest}", where, "use a newer dflash-ops"
        )
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.name in data:
            values[f.name] = _convert(hints[f.name], data[f.name], f"{where}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ContractError(f"key {f.name!r} is missing", where)
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        # Python's own json writes NaN, which JSON has not: where null is allowed, it means the same.
        if (value is None or _not_finite(value)) and type(None) in args:
            return None
        errors = []
        for option in (a for a in args if a is not type(None)):
            try:
                return _convert(option, value, where)
            except ContractError as error:
                errors.append(error)
        raise errors[0]
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ContractError(f"expected a list, got {type(value).__name__}", where)
        items = [_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict or origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            raise ContractError(f"expected an object, got {type(value).__name__}", where)
        return {str(k): _convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, where)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise ContractError(f"{value!r} is none of {', '.join(str(m.value) for m in hint)}", where) from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if _not_finite(value):
        raise ContractError(f"expected a finite number, got {value}", where)
    if isinstance(value, bool) and hint is not bool:
        raise ContractError(f"expected {hint.__name__}, got a boolean", where)
    if not isinstance(value, hint):
        raise ContractError(f"expected {hint.__name__}, got {type(value).__name__} {value!r}", where)
    return value
