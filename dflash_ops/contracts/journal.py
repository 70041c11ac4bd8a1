"""journal.jsonl: one event a line; readable after a kill -9 at any byte."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dflash_ops.contracts.codec import dumps, from_dict
from dflash_ops.errors import ContractError


@dataclass(frozen=True)
class Event:
    SCHEMA: ClassVar[int] = 1

    seq: int
    t: float
    event: str
    actor: str = "resident"
    attempt: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    schema: int = 1


def encode_event(event: Event) -> bytes:
    return dumps(event).encode() + b"\n"


def decode_journal(raw: bytes) -> tuple[list[Event], int]:
    """All whole events in order, and how many lines were torn or not in the agreed form."""
    events: list[Event] = []
    torn = 0
    for line in raw.split(b"\n"):
        if not line.strip():
            continue
        try:
            events.append(from_dict(Event, json.loads(line), "journal.jsonl"))
        except (ValueError, RecursionError, ContractError):
            torn += 1
    return events, torn
