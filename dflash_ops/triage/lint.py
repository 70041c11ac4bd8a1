"""Faults of playbooks: schema, ids, literals that an expression need not contain, expressions that can blow up."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_ops.contracts import RULES, Action, Remedy, forbidden, worse_grade
from dflash_ops.errors import ContractError
from dflash_ops.triage.playbook import GRADES, ID, ROLES, WHERE, Kind, Signature, compile_playbooks
from dflash_ops.triage.predicates import PREDICATES

# the standard library's own parser of expressions; Python 3.10 has it under its old names
_old = sys.version_info < (3, 11)
_c: Any = importlib.import_module("sre_constants" if _old else "re._constants")
_p: Any = importlib.import_module("sre_parse" if _old else "re._parser")

#: Words that a remedy may name: contracts.Action, and nothing beside it.
ACTIONS = frozenset(action.value for action in Action)
_KIND_KEYS = frozenset(
    [
        "id",
        "title",
        "role",
        "grade",
        "priority",
        "since",
        "until",
        "meaning",
        "user_frame",
        "references",
        "signature",
        "evidence",
        "remedy",
        "example",
        "counterexample",
    ]
)
_SIGNATURE_KEYS = frozenset(
    ["literal", "regex", "ignore_case", "where", "all", "any", "not", "entity", "role", "advice"]
)
_REMEDY_KEYS = frozenset(["action", "grade", "text", "command", "when", "limit", "proven"])
_LONG = 64  # a repeat of more than this counts as without end


@dataclass(frozen=True)
class Fault:
    """`where` names file or family and kind; `what` the fault; `error` False for what only deserves a look."""

    where: str
    what: str
    error: bool = True

    def __str__(self) -> str:
        return f"{'error' if self.error else 'note '} {self.where}: {self.what}"


def lint(documents: Iterable[Mapping[str, Any]], proof_there: Callable[[str], bool] | None = None) -> list[Fault]:
    """All faults of the documents, in their order. Examples are checked by `playbooks test`, not here.

    Args:
        proof_there: whether a `tests/...` path that a remedy names is there; None where no tests are at hand.
    """
    faults: list[Fault] = []
    seen: dict[str, str] = {}
    for document in documents:
        family = str(document.get("_file") or document.get("family", "?"))
        faults.extend(Fault(family, f"no {key}") for key in ("schema", "family", "title") if key not in document)
        for table in document.get("kind", ()):
            name = str(table.get("id", "?"))
            where = f"{family}, {name}"
            if name in seen and seen[name] == family:
                faults.append(Fault(where, "the id stands twice"))
            seen[name] = family
            faults.extend(_table(where, table))
            try:
                kind = compile_playbooks([{"schema": 1, "family": family, "kind": [table]}]).kinds[name]
            except (ContractError, TypeError, ValueError) as error:
                faults.append(Fault(where, str(error).splitlines()[0]))
                continue
            faults.extend(_kind(where, kind, table))
            for remedy in kind.remedies:
                faults.extend(_remedy(where, remedy, proof_there))
    return faults


def _table(where: str, table: Mapping[str, Any]) -> Iterable[Fault]:
    for key in table:
        if key not in _KIND_KEYS:
            yield Fault(where, f"unknown key {key!r}")
    for entry in table.get("signature", ()):
        for key in entry:
            if key not in _SIGNATURE_KEYS:
                yield Fault(where, f"unknown key {key!r} in a signature")
    for entry in table.get("remedy", ()):
        for key in entry:
            if key not in _REMEDY_KEYS:
                yield Fault(where, f"unknown key {key!r} in a remedy")


def _kind(where: str, kind: Kind, table: Mapping[str, Any]) -> Iterable[Fault]:
    if not ID.match(kind.id):
        yield Fault(where, "id must be lower case letters, digits and _")
    if kind.role not in ROLES:
        yield Fault(where, f"role {kind.role!r} is none of {', '.join(ROLES)}")
    if kind.grade not in GRADES:
        yield Fault(where, f"grade {kind.grade!r} is none of {', '.join(GRADES)}")
    if not 0 <= kind.priority <= 100:
        yield Fault(where, f"priority {kind.priority} is not 0 to 100")
    if not kind.meaning:
        yield Fault(where, "no meaning")
    if kind.predicate and kind.predicate not in PREDICATES:
        yield Fault(where, f"no predicate {kind.predicate!r}; there are {', '.join(sorted(PREDICATES))}")
    if kind.signatures and not table.get("example"):
        yield Fault(where, "no example")
    for signature in kind.signatures:
        yield from _signature(where, signature)


def _remedy(where: str, remedy: Remedy, proof_there: Callable[[str], bool] | None) -> Iterable[Fault]:
    place = f"{where}, {remedy.action}"
    if remedy.action not in ACTIONS:
        yield Fault(where, f"unknown action {remedy.action!r}; docs/supervise.md lists the actions")
        return
    if remedy.grade not in GRADES:
        yield Fault(where, f"a remedy's grade {remedy.grade!r} is none of {', '.join(GRADES)}")
        return
    floor = RULES[Action(remedy.action)].floor
    if worse_grade(remedy.grade, floor) != remedy.grade.replace("-", "N"):
        yield Fault(place, f"grade {remedy.grade} is better than the action's own, {floor}")
    if remedy.grade in ("A", "B") and (bad := forbidden(remedy.command)) is not None:
        yield Fault(place, f"its command has {bad!r}, which is never done by itself: grade N, or another command")
    if remedy.limit < 1:
        yield Fault(place, f"limit {remedy.limit} means never; leave the step out")
    if not remedy.proven:
        yield Fault(place, 'no proven: write "reported", or the path of a test that shows it')
    elif remedy.proven != "reported":
        if not remedy.proven.startswith("tests/"):
            yield Fault(place, f'proven {remedy.proven!r} is neither "reported" nor a path in tests/')
        elif proof_there is not None and not proof_there(remedy.proven):
            yield Fault(place, f"the test {remedy.proven!r} is not there")


def _signature(where: str, s: Signature) -> Iterable[Fault]:
    place = f"{where}, {s.literal[:40]!r}"
    if len(s.literal) < 6:
        yield Fault(place, "a literal needs at least 6 characters")
    if s.where not in WHERE:
        yield Fault(place, f"where {s.where!r} is none of {', '.join(WHERE)}")
    if s.role and s.role not in ROLES:
        yield Fault(place, f"role {s.role!r} is none of {', '.join(ROLES)}")
    for name, text in (("regex", s.regex), ("entity", s.entity)):
        if not text:
            continue
        try:
            tree = _p.parse(text)
        except re.error as error:
            yield Fault(place, f"{name} does not compile: {error}")
            continue
        for fault in unsafe(tree):
            yield Fault(place, f"{name}: {fault}")
    if s.entity and "(?P<entity>" not in s.entity:
        yield Fault(place, "entity has no group named entity", error=False)
    if s.regex and not _holds(s):
        yield Fault(
            place, "the regex can match without the literal in the match: both must then stand in the line", error=False
        )


def _holds(s: Signature) -> bool:
    try:
        tree = _p.parse(s.regex)
    except re.error:
        return True
    literal, runs = s.literal, required(tree)
    if s.ignore_case:
        literal, runs = literal.lower(), [r.lower() for r in runs]
    return any(literal.strip() in run for run in runs)


def required(tree: Any) -> list[str]:
    """Runs of text that every match of a parsed expression contains."""
    runs: list[str] = []
    run = ""
    for op, arg in tree:
        if op is _c.LITERAL:
            run += chr(arg)
            continue
        if op is _c.SUBPATTERN:
            inner = required(arg[3])
            plain = _plain(arg[3])
            if plain is not None:
                run += plain
                continue
            runs.append(run)
            runs.extend(inner)
            run = ""
            continue
        runs.append(run)
        run = ""
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT) and arg[0] >= 1:
            runs.extend(required(arg[2]))
        elif op is _c.BRANCH:
            branches = [required(branch) for branch in arg[1]]
            runs.extend(r for r in branches[0] if all(any(r in other for other in b) for b in branches[1:]))
    runs.append(run)
    return [r for r in runs if r]


def _plain(tree: Any) -> str | None:
    text = ""
    for op, arg in tree:
        if op is not _c.LITERAL:
            return None
        text += chr(arg)
    return text


def unsafe(tree: Any, depth: int = 0) -> list[str]:
    """Why an expression could take more than square time: endless repeats inside endless repeats, or in a row."""
    faults: list[str] = []
    wide = 0
    for op, arg in tree:
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            endless = arg[1] is _c.MAXREPEAT or int(arg[1]) > _LONG
            if endless and depth:
                faults.append("an endless repeat inside an endless repeat")
            if arg[1] is _c.MAXREPEAT and _broad(arg[2]):
                wide += 1
            faults.extend(unsafe(arg[2], depth + (1 if endless else 0)))
        elif op is _c.SUBPATTERN:
            faults.extend(unsafe(arg[3], depth))
        elif op is _c.BRANCH:
            for branch in arg[1]:
                faults.extend(unsafe(branch, depth))
        elif op in (_c.ASSERT, _c.ASSERT_NOT):
            faults.extend(unsafe(arg[1], depth))
    if wide > 3:
        faults.append(f"{wide} endless repeats of nearly anything in a row")
    return list(dict.fromkeys(faults))


def _broad(tree: Any) -> bool:
    """Whether the repeated part is `.` or a negated set: something that eats nearly everything."""
    items = list(tree)
    if len(items) != 1:
        return False
    op, arg = items[0]
    return op is _c.ANY or op is _c.NOT_LITERAL or (op is _c.IN and bool(arg) and arg[0][0] is _c.NEGATE)
