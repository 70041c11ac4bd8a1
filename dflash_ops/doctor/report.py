"""What doctor says: one `Check` a line, in sections, with a versioned JSON form (docs/schemas/doctor.schema.json)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One thing looked at. `next` is what to do about a warn or a fail; a skip says why it could not be judged."""

    name: str
    status: Status
    what: str
    next: str = ""


@dataclass(frozen=True)
class Section:
    """Checks of one place: `this machine`, `host gpu`, `job demo`."""

    place: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Report:
    sections: tuple[Section, ...]
    job: str | None = None
    host: str | None = None

    @property
    def ok(self) -> bool:
        """Nothing fails; warnings do not count."""
        return not self.count("fail")

    def count(self, status: Status) -> int:
        return sum(c.status == status for s in self.sections for c in s.checks)

    def to_dict(self) -> dict[str, Any]:
        checks = [
            {"place": s.place, "name": c.name, "status": c.status, "what": c.what, "next": c.next or None}
            for s in self.sections
            for c in s.checks
        ]
        return {
            "schema": 1,
            "kind": "doctor",
            "ok": self.ok,
            "job": self.job,
            "host": self.host,
            "failed": self.count("fail"),
            "warnings": self.count("warn"),
            "checks": checks,
        }


def ok(name: str, what: str) -> Check:
    return Check(name, "ok", what)


def warn(name: str, what: str, next: str) -> Check:
    return Check(name, "warn", what, next)


def fail(name: str, what: str, next: str) -> Check:
    return Check(name, "fail", what, next)


def skip(name: str, what: str) -> Check:
    return Check(name, "skip", what)
