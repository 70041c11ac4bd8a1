"""What triage says: the kind, the line that names the cause, and why (docs/contracts.md, `triage --json`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class EvidenceLine:
    """One line that speaks for the diagnosis; `number` is 1-based in `source`, None where it stands in no text."""

    text: str
    number: int | None = None
    source: str = ""
    role: str = "cause"


@dataclass(frozen=True)
class Remedy:
    """One step of the ladder; `grade` A may be done without asking, B only where allowed, N never."""

    action: str
    grade: str
    text: str
    command: str = ""
    when: str = ""
    proven: str = ""
    limit: int = 1


@dataclass(frozen=True)
class Diagnosis:
    """The judgement over one input.

    `kind` is `healthy` where nothing needs doing and `root_cause_not_shown` where the text does not hold the cause
    (`fetch` then names what to look at next). `root_exception` is the line that names the cause as it stands in the
    log, None where it is not there. `confidence` is 0 to 1. `fingerprint` is stable under ranks, pids, hex, sizes,
    times, paths and wraps; `entity` keeps what was taken out of it (which checkpoint, which port).
    """

    SCHEMA: ClassVar[int] = 1

    kind: str
    title: str = ""
    root_exception: str | None = None
    root_rank: int | None = None
    user_frame: str | None = None
    confidence: float = 0.0
    fingerprint: str = ""
    entity: str | None = None
    meaning: str = ""
    evidence: tuple[EvidenceLine, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    auto_safe: bool = False
    also: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    schema: int = 1
