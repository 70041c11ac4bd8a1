"""Typed reading of one TOML file with all its faults gathered: what the loader is written in.

The rule here: a fault never stops the reading. A getter notes it and gives the default, so that one look at the
file says everything that is wrong with it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomllib

from dflash_ops.errors import InventoryError, did_you_mean
from dflash_ops.inventory.lines import Path as KeyPath
from dflash_ops.inventory.lines import key_lines, line_of
from dflash_ops.inventory.model import quote_key

_AT = re.compile(r" \(at line (\d+), column (\d+)\)$")
_END = " (at end of document)"

#: Bytes of the largest inventory that is read; what is larger is something else (/dev/zero, a checkpoint).
LIMIT = 4 << 20

_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
}


class Faults:
    """The faults of one file, each placed by key and line."""

    def __init__(self, file: str, lines: dict[KeyPath, int] | None = None) -> None:
        self.file = file
        self.lines = lines or {}
        self.found: list[InventoryError] = []

    def add(self, what: str, path: KeyPath, fix: str) -> None:
        key = ""
        for part in path:
            if isinstance(part, int):
                key += f"[{part}]"
            else:
                key += ("." if key else "") + quote_key(part)
        if any(e.what == what and e.key == key for e in self.found):
            return  # a key of the job that is read once for each of its nodes
        line = line_of(self.lines, path)
        self.found.append(InventoryError(what, file=self.file, key=key, line=line, fix=fix))


class Table:
    """One table of the file. Every key must be asked for: `close()` calls the others unknown."""

    def __init__(self, faults: Faults, path: KeyPath, values: Mapping[str, Any]) -> None:
        self.faults = faults
        self.path = path
        self.values = values
        self.asked: dict[str, None] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fault(self, what: str, key: str | None, fix: str) -> None:
        self.faults.add(what, self.path if key is None else (*self.path, key), fix)

    def close(self) -> None:
        """Every key that nobody asked for is a fault."""
        for key in self.values:
            if key not in self.asked:
                near = did_you_mean(key, list(self.asked)).removeprefix("; ")
                known = ", ".join(self.asked)
                self.fault(
                    f"unknown key {quote_key(key)}",
                    key,
                    near.replace("'", "`") if near else f"remove it; known here: {known}",
                )

    def _get(self, key: str, kind: type, example: str) -> Any:
        """The value, or None where it is missing or of another kind (which is noted)."""
        self.asked[key] = None
        value = self.values.get(key)
        if value is None:
            return None
        right = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not right or (isinstance(value, bool) and kind is not bool):
            self.fault(f"{quote_key(key)} must be {_KINDS[kind]}, not {describe(value)}", key, f"write {example}")
            return None
        return value

    def text(
        self, key: str, default: str | None = None, *, example: str | None = None, needed: bool = False
    ) -> str | None:
        """A string that is not empty and holds no control characters; `needed`: not advised to be removed."""
        example = example or f'{quote_key(key)} = "{default or "..."}"'
        value = self._get(key, str, example)
        if value is None:
            return default
        if not value.strip():
            self.fault(
                f"{quote_key(key)} is empty", key, f"write {example}" if needed else f"write {example}, or remove it"
            )
            return default
        if not self.clean(value, key):
            return default
        return str(value)

    def clean(self, value: str, key: str, index: int | None = None) -> bool:
        """Whether `value` holds no control characters (which no path, name or argument of ours may)."""
        bad = next((c for c in value if unicodedata.category(c) in ("Cc", "Zl", "Zp")), None)
        if bad is None:
            return True
        path = (*self.path, key) if index is None else (*self.path, key, index)
        self.faults.add(f"{quote_key(key)} holds the control character U+{ord(bad):04X}", path, "take it out")
        return False

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, bool, f"{quote_key(key)} = {str(default).lower()}")
        return default if value is None else bool(value)

    def integer(self, key: str, default: int, *, least: int, most: int) -> int:
        value = self._get(key, int, f"{quote_key(key)} = {default}")
        if value is None:
            return default
        if not least <= value <= most:
            self.fault(f"{quote_key(key)} must lie between {least} and {most}, not {value}", key, f"write {default}")
            return default
        return int(value)

    def number(self, key: str, default: float, *, most: float) -> float:
        """A number above 0, at most `most`."""
        value = self._get(key, float, f"{quote_key(key)} = {default:g}")
        if value is None:
            return default
        if not 0 < value <= most:  # also where it is no number at all (nan)
            self.fault(f"{quote_key(key)} must be above 0 and at most {most:g}, not {value}", key, f"write {default:g}")
            return default
        return float(value)

    def texts(self, key: str, *, example: str) -> tuple[str, ...] | None:
        """A list of strings; None where the key is missing. An element of another type is noted and left out."""
        value = self._get(key, list, example)
        if value is None:
            return None
        found: list[str] = []
        for index, item in enumerate(value):
            if isinstance(item, str):
                found.append(item)
            else:
                self.faults.add(
                    f"{quote_key(key)} must be a list of strings; element {index + 1} is {describe(item)}",
                    (*self.path, key, index),
                    f"write {example}",
                )
        return tuple(found)

    def items(self, key: str, *, example: str) -> list[Any] | None:
        value = self._get(key, list, example)
        return None if value is None else list(value)

    def table(self, key: str, *, example: str = "") -> Table | None:
        """A table below this one; None where the key is missing."""
        value = self._get(key, dict, example or f"a table: [{'.'.join(map(str, (*self.path, key)))}]")
        return None if value is None else Table(self.faults, (*self.path, key), value)

    def tables(self, key: str) -> dict[str, Table]:
        """Named tables below this one, as in [hosts.NAME]."""
        below = self.table(key)
        if below is None:
            return {}
        return {
            name: table for name in below.values if (table := below.table(name, example=f"[{key}.{quote_key(name)}]"))
        }


def describe(value: Any) -> str:
    """A value as a fault names it: its kind, and itself where it is short."""
    for kind, name in _KINDS.items():
        if isinstance(value, kind):
            shown = repr(value)
            return f"{name} ({shown})" if len(shown) <= 40 and kind not in (list, dict) else name
    return f"a {type(value).__name__}"


def read_toml(path: Path) -> tuple[dict[str, Any], Faults]:
    """Values of a TOML file and the place to note faults.

    Raises:
        InventoryError: it cannot be read, is no UTF-8 text or no TOML (with the line).
    """
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(LIMIT + 1)
    except FileNotFoundError:
        raise InventoryError("there is no such file", file=file, fix="write one with: dflash-ops init") from None
    except OSError as error:
        raise InventoryError(
            f"it cannot be read: {error.strerror or error}", file=file, fix="make it a file that you may read"
        ) from None
    if len(raw) > LIMIT:
        raise InventoryError(f"it is larger than {LIMIT >> 20} MiB", file=file, fix="name an inventory.toml")
    try:
        # Editors on some systems put a byte order mark in front; TOML has no place for it.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InventoryError(
            f"it is no UTF-8 text (byte {raw[error.start]:#04x})", file=file, line=line, fix="save it as UTF-8"
        ) from None
    try:
        values = tomllib.loads(text)
        lines = key_lines(text)
    except ValueError as error:  # TOMLDecodeError, and what int() says of a number with thousands of digits
        raise _no_toml(str(error), text, file) from None
    except RecursionError:
        raise InventoryError("it is nested too deeply", file=file, fix="write tables as [a.b] headers") from None
    return values, Faults(file, lines)


def _no_toml(said: str, text: str, file: str) -> InventoryError:
    """tomllib's words, with the line they speak of."""
    rows = text.split("\n")
    line: int | None = None
    if match := _AT.search(said):
        line, said = int(match[1]), f"{said[: match.start()]}, column {match[2]}"
    elif said.endswith(_END):
        line, said = len(text.rstrip("\n").split("\n")), said.removesuffix(_END) + " at the end of the file"
    shown = rows[line - 1].strip() if line is not None and line <= len(rows) else ""
    fix = f"correct this line: {shown[:100]}" if shown else "complete or correct the entry"
    return InventoryError(f"it is no TOML: {said[:1].lower()}{said[1:]}", file=file, line=line, fix=fix)
