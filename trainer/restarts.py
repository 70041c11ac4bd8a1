"""How often drafters may be started again. Pure.

A new commit is progress: it forgives everything before it. Without progress the same fault twice ends the run, and so
does the budget. A kill from outside (SIGKILL: the out-of-memory killer, an operator) says nothing about the run itself,
so for it only the budget counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass
class Restarts:
    """
    Args:
        budget: restarts without a commit between them.
    """

    budget: int
    used: int = 0
    seen: set[str] = field(default_factory=set)

    def progress(self) -> None:
        """A commit: the counts begin anew."""
        self.used = 0
        self.seen.clear()

    def refusal(self, fault: str, *, from_outside: bool) -> str:
        """Takes one restart for a fault. Returns why there is none, empty if there is."""
        if self.used >= self.budget:
            return f"{self.used} restarts without a new average, workers.drafter_restarts = {self.budget}"
        fingerprint = re.sub(r"\d+", "#", fault)
        if not from_outside and fingerprint in self.seen:
            return "the same fault twice without a new average between"
        self.used += 1
        self.seen.add(fingerprint)
        return ""
