"""The stream of `resident evidence`: an attempt's texts, framed by length so that any bytes survive.

{"schema":1,"kind":"evidence","attempt":2,"alive":false,...}\\n      the head
{"name":"log","kind":"log","status":"ok","packed":812,...}\\n       a part: its line, `packed` bytes, a newline
<812 bytes>\\n
{"end":true,"parts":7}\\n                                           without this line the stream was cut
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_ops.errors import ContractError

SCHEMA = 1
#: What became of a text: it is here; there is none of it, and that is no fault; it could not be had.
STATUS = ("ok", "none", "missing")
#: One text is never longer, whatever its frame says: a damaged one must not fill our memory.
MOST = 1 << 30


@dataclass(frozen=True)
class Part:
    """One text of an attempt.

    `kind` as in triage.SOURCE_KINDS, or `facts` for what only people read. `note`: why it is missing, or how it was
    cut. `total` = bytes of the whole file, where `data` is only its end; `first_line` = 1-based number in the file of
    the first line of `data`, None where it is not known.
    """

    name: str
    kind: str
    data: bytes = b""
    status: str = "ok"
    note: str = ""
    total: int | None = None
    first_line: int | None = 1


@dataclass(frozen=True)
class Evidence:
    """All texts of one attempt, and when it was: seconds since the epoch of the job's own machine.

    `ended` is None while it lives and where nobody wrote it down; `progressed` is when the last progress line came.
    """

    attempt: int
    alive: bool
    now: float
    parts: tuple[Part, ...]
    started: float | None = None
    ended: float | None = None
    progressed: float | None = None
    launcher: int | None = None
    release: str | None = None

    def part(self, name: str) -> Part | None:
        return next((p for p in self.parts if p.name == name), None)


def encode(evidence: Evidence) -> Iterator[bytes]:
    """The stream, a piece a time."""
    head = {k: v for k, v in vars(evidence).items() if k != "parts"}
    yield _line({"schema": SCHEMA, "kind": "evidence", **head})
    for part in evidence.parts:
        packed = zlib.compress(part.data, 1) if part.data else b""
        yield _line({**{k: v for k, v in vars(part).items() if k != "data"}, "packed": len(packed)})
        yield packed + b"\n"
    yield _line({"end": True, "parts": len(evidence.parts)})


def decode(stream: bytes, where: str = "") -> Evidence:
    """The texts of a stream.

    Raises:
        ContractError: it is cut, damaged, or of a newer schema.
    """
    head, at = _take(stream, 0, where)
    if head.get("kind") != "evidence":
        raise ContractError(f"the answer is no evidence: {stream[:200]!r}", where, "see `dflash-ops logs`")
    schema = head.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ContractError(
            f"the evidence is of schema {schema}; this dflash-ops reads {SCHEMA}", where, "install a newer dflash-ops"
        )
    parts: list[Part] = []
    while True:
        said, at = _take(stream, at, where)
        if said.get("end") is True:
            break
        size = said.get("packed")
        if not isinstance(size, int) or not 0 <= size <= len(stream) - at:
            raise _cut(where)
        try:
            data = _unpacked(stream[at : at + size])
        except zlib.error as error:
            raise ContractError(f"the text {said.get('name')!r} arrived damaged: {error}", where, "ask again") from None
        at += size + 1
        parts.append(_part(said, data, where))
    if said.get("parts") != len(parts):
        raise _cut(where)
    return _evidence(head, tuple(parts), where)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _take(stream: bytes, at: int, where: str) -> tuple[dict[str, Any], int]:
    end = stream.find(b"\n", at)
    if end < 0:
        raise _cut(where)
    try:
        value = json.loads(stream[at:end])
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ContractError(f"no JSON object where one should be: {stream[at : at + 200]!r}", where, "ask again")
    return value, end + 1


def _cut(where: str) -> ContractError:
    return ContractError("the stream of evidence ended early", where, "ask again; see whether the connection holds")


def _unpacked(packed: bytes) -> bytes:
    return zlib.decompressobj().decompress(packed, MOST) if packed else b""


def _part(said: dict[str, Any], data: bytes, where: str) -> Part:
    name, kind, status = (str(said.get(k) or "") for k in ("name", "kind", "status"))
    if not name or not kind or status not in STATUS:
        raise ContractError(f"a text without name, kind or status: {said!r}", where, "ask again")
    return Part(
        name, kind, data, status, str(said.get("note") or ""), _whole(said, "total"), _whole(said, "first_line")
    )


def _evidence(head: dict[str, Any], parts: tuple[Part, ...], where: str) -> Evidence:
    attempt, now = _whole(head, "attempt"), _number(head, "now")
    if attempt is None or now is None:
        raise ContractError(f"the head of the evidence lacks attempt or now: {head!r}", where, "ask again")
    release = head.get("release")
    return Evidence(
        attempt,
        bool(head.get("alive")),
        now,
        parts,
        started=_number(head, "started"),
        ended=_number(head, "ended"),
        progressed=_number(head, "progressed"),
        launcher=_whole(head, "launcher"),
        release=release if isinstance(release, str) else None,
    )


def _number(said: dict[str, Any], key: str) -> float | None:
    value = said.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(said: dict[str, Any], key: str) -> int | None:
    value = said.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
