"""docs/schemas/all.schema.json: one document for everything that `--json` prints, made from the parts beside it.

The rule here: a part is written by hand, for one command; the whole is only ever made (`make docs`). It holds each part
under `$defs`, by its own `$id`, and picks the one that the object's `kind` names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "all.schema.json"


def kinds_of(part: dict[str, Any]) -> list[str]:
    """The kinds that one part describes."""
    said = part["properties"]["kind"]
    return [said["const"]] if "const" in said else list(said["enum"])


def whole(folder: Path) -> str:
    """The text of the one document.

    Raises:
        KeyError, ValueError: a part has no kind, no `$id` of its file's name, or a kind that another one has.
    """
    parts: dict[str, dict[str, Any]] = {}
    kinds: dict[str, str] = {}
    for path in sorted(folder.glob("*.schema.json")):
        if path.name == NAME:
            continue
        part = json.loads(path.read_text("utf-8"))
        if part["$id"] != path.name:
            raise ValueError(f"{path}: its $id is {part['$id']!r}")
        for kind in kinds_of(part):
            if kind in kinds:
                raise ValueError(f"{path}: the kind {kind!r} is also in {kinds[kind]}")
            kinds[kind] = path.name
        parts[path.name.removesuffix(".schema.json")] = part
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": NAME,
        "title": "everything that dflash-ops prints with --json; made by `make docs` from the files beside it",
        "type": "object",
        "required": ["schema", "kind"],
        "properties": {"schema": {"const": 1}, "kind": {"enum": sorted(kinds)}},
        "allOf": [
            {"if": {"properties": {"kind": {"enum": kinds_of(part)}}}, "then": {"$ref": part["$id"]}}
            for part in parts.values()
        ],
        "$defs": parts,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
