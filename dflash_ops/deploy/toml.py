"""A small TOML writer: the standard library reads TOML but does not write it.

Only what a run.toml needs: tables of strings, integers, floats, booleans and arrays of these, and tables in tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from dflash_ops.errors import UsageError

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def dump_toml(tables: Mapping[str, object]) -> str:
    """TOML text that reads back as `tables`.

    Raises:
        UsageError: a value that TOML cannot say (None, an object), with its dotted key.
    """
    lines: list[str] = []
    _table(tables, (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(table: Mapping[str, object], path: tuple[str, ...], lines: list[str]) -> None:
    # Plain keys first: after a [header] they would belong to the wrong table.
    inner = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    plain = {k: v for k, v in table.items() if k not in inner}
    if path and (plain or not inner):
        lines.extend(("", f"[{'.'.join(map(_key, path))}]"))
    lines.extend(f"{_key(k)} = {_value(v, (*path, k))}" for k, v in plain.items())
    for key, value in inner.items():
        _table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE.match(key) else _string(key)


def _string(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(c) or (f"\\u{ord(c):04X}" if c < " " or c == "\x7f" else c) for c in text) + '"'


def _value(value: object, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        text = repr(value)
        return text if "." in text or "e" in text else f"{text}.0"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):  # inside an array only
        return "{ " + ", ".join(f"{_key(k)} = {_value(v, (*path, k))}" for k, v in value.items()) + " }"
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return "[" + ", ".join(_value(v, path) for v in value) + "]"
    raise UsageError(
        f"a value of type {type(value).__name__} cannot be written into run.toml",
        ".".join(path),
        "use a string, number, boolean, list or table",
    )
