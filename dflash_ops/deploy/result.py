"""What came of a deploy: the fields of `deploy --json` (docs/schemas/deploy.schema.json)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_ops.contracts import to_dict
from dflash_ops.resident.preflight import Check


@dataclass
class Result:
    """`files`, `bytes` = what travelled, `kept` = files of the release whose content was there; `execs` = commands that
    were run on the machine."""

    job: str
    host: str
    plan: bool
    release: str | None = None
    resident: str = ""
    files: int = 0
    bytes: int = 0
    kept: int = 0
    venv: str | None = None
    checks: tuple[Check, ...] = ()
    refused: list[str] = field(default_factory=list)
    gate: dict[str, Any] | None = None
    replaced: dict[str, Any] | None = None
    aside: dict[str, Any] | None = None
    attempt: int | None = None
    state: str | None = None
    rolled_back: dict[str, Any] | None = None
    removed: list[str] = field(default_factory=list)
    devices: dict[str, list[str]] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    execs: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, "kind": "deploy", **to_dict(self)}
