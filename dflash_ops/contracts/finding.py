"""What a health detector found: beside the state, never instead of it (docs/supervise.md, Health)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        name: which (`nan_loss`, `ring_starved`, ...; docs/supervise.md has them all).
        text: one sentence for people, with its numbers and units.
        t: when it was found; since: when it began, None where that is not known.
        worker: whom it concerns, empty for the job.
        severity: `note`, `warn` or `alarm`.
        numbers: what it was judged by.
        evidence: lines that show it.
    """

    SCHEMA: ClassVar[int] = 1

    name: str
    text: str
    t: float
    since: float | None = None
    worker: str = ""
    severity: str = "warn"
    numbers: dict[str, float] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    schema: int = 1

    @property
    def key(self) -> str:
        """The same thing of the same worker: told once, not every second."""
        return f"{self.name}:{self.worker}"
