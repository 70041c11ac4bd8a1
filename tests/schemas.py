"""Output held to docs/schemas, with no room for keys that a schema does not name."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).resolve().parents[1] / "docs/schemas"


@functools.cache
def whole() -> jsonschema.Draft202012Validator:
    """The one document that describes everything."""
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / "all.schema.json").read_text()))


def valid(kind: str, value: Any) -> None:
    schema = json.loads((SCHEMAS / f"{kind}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(closed(schema)).validate(value)


def closed(schema: Any) -> Any:
    """A reader may meet new keys, a test must not."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    tight = {k: closed(v) for k, v in schema.items()}
    return {"additionalProperties": False, **tight} if isinstance(tight.get("properties"), dict) else tight
