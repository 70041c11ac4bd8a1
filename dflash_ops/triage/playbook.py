"""Playbooks as decoded dicts (docs/playbooks.md) -> kinds. Regular expressions are compiled when first needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dflash_ops.contracts.diagnosis import Remedy
from dflash_ops.errors import ContractError

ROLES = ("root", "cascade", "confirmation", "either", "noise", "none")
GRADES = ("A", "B", "N", "-")
WHERE = ("any", "exception", "frame", "kernel", "progress", "summary")
ID = re.compile(r"^[a-z][a-z0-9_]*$")


@dataclass
class Signature:
    """One text of a kind: a literal and, where given, a regular expression that must both hold in one line."""

    kind: str
    literal: str
    regex: str = ""
    ignore_case: bool = False
    where: str = "any"
    all: tuple[str, ...] = ()
    any: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    entity: str = ""
    role: str = ""
    advice: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        return re.compile(self.regex, re.IGNORECASE if self.ignore_case else 0) if self.regex else None

    @cached_property
    def entity_pattern(self) -> re.Pattern[str] | None:
        return re.compile(self.entity) if self.entity else None


@dataclass
class Kind:
    """One kind of failure, as the playbook says it; `raw` keeps the whole table for pages and tests."""

    id: str
    family: str
    title: str
    role: str
    grade: str
    priority: int = 50
    since: str = ""
    until: str = ""
    meaning: str = ""
    user_frame: bool = True
    signatures: tuple[Signature, ...] = ()
    predicate: str = ""
    remedies: tuple[Remedy, ...] = ()
    references: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass
class Playbooks:
    """All kinds by id."""

    kinds: dict[str, Kind]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        return tuple(s for kind in self.kinds.values() for s in kind.signatures)


def compile_playbooks(documents: Iterable[Mapping[str, Any]]) -> Playbooks:
    """Kinds of all documents; a later document overrides a kind of the same id.

    Raises:
        ContractError: a table lacks what the schema requires (family, id and the key are named).
    """
    kinds: dict[str, Kind] = {}
    for document in documents:
        family = str(document.get("family", "?"))
        schema = document.get("schema", 1)
        if schema != 1:
            raise ContractError(
                f"playbook {family!r} has schema {schema!r}", family, "install the dflash-ops that knows it"
            )
        for table in document.get("kind", ()):
            kind = _kind(family, table)
            kinds[kind.id] = kind
    return Playbooks(kinds)


def _kind(family: str, table: Mapping[str, Any]) -> Kind:
    name = str(table.get("id", "?"))
    where = f"family {family}, kind {name}"
    for key in ("id", "title", "role", "grade"):
        if not isinstance(table.get(key), str):
            raise ContractError(f"a kind has no {key}", where, f'write {key} = "..." (docs/playbooks.md)')
    signatures = []
    for entry in table.get("signature", ()):
        literal = entry.get("literal")
        if not isinstance(literal, str) or not literal:
            raise ContractError(
                "a signature has no literal", where, 'write literal = "...": text that stands in the line as it is'
            )
        signatures.append(
            Signature(
                kind=name,
                literal=literal,
                regex=str(entry.get("regex", "")),
                ignore_case=bool(entry.get("ignore_case", False)),
                where=str(entry.get("where", "any")),
                all=tuple(entry.get("all", ())),
                any=tuple(entry.get("any", ())),
                none=tuple(entry.get("not", ())),
                entity=str(entry.get("entity", "")),
                role=str(entry.get("role", "")),
                advice=bool(entry.get("advice", False)),
            )
        )
    remedies = tuple(
        Remedy(
            action=str(r.get("action", "tell")),
            grade=str(r.get("grade", "N")),
            text=str(r.get("text", "")),
            command=str(r.get("command", "")),
            when=str(r.get("when", "")),
            proven=str(r.get("proven", "")),
            limit=int(r.get("limit", 1)),
        )
        for r in table.get("remedy", ())
    )
    evidence = table.get("evidence") or {}
    return Kind(
        id=name,
        family=family,
        title=str(table["title"]),
        role=str(table["role"]),
        grade=str(table["grade"]),
        priority=int(table.get("priority", 50)),
        since=str(table.get("since", "")),
        until=str(table.get("until", "")),
        meaning=str(table.get("meaning", "")).strip(),
        user_frame=bool(table.get("user_frame", True)),
        signatures=tuple(signatures),
        predicate=str(evidence.get("predicate", "")) if isinstance(evidence, Mapping) else "",
        remedies=remedies,
        references=tuple(table.get("references", ())),
        raw=table,
    )
