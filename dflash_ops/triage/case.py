"""All that was read, in one place: what predicates and the judge look at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_ops.triage.parse_other import Summary
from dflash_ops.triage.types import Finding, Line, Record, Step

if TYPE_CHECKING:
    from dflash_ops.triage.outlived import Progress
    from dflash_ops.triage.playbook import Kind

_TORCH = re.compile(
    r"\b(?:torch|PyTorch)(?:\s+version)?\s*(?:==|=|:|-|\s)\s*v?(\d+\.\d+(?:\.\d+)?)(?:[+.]\w+)*"
    r"|\btorch-(\d+\.\d+(?:\.\d+)?)[\w+.]*dist-info|\"torch\": \"(\d+\.\d+\.\d+)"
)


@dataclass
class Text:
    """One source after reading."""

    name: str
    kind: str
    index: int
    lines: list[Line] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    steps: list[tuple[Line, Step]] = field(default_factory=list)
    summary: Summary = field(default_factory=Summary)
    total_lines: int = 0
    attempt: dict[str, str] | None = None
    stamp: float | None = None
    exit: Mapping[str, Any] | None = None
    progress: Progress | None = None


@dataclass
class Case:
    """Everything about one diagnosis."""

    texts: list[Text] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    context: Mapping[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def records(self) -> list[Record]:
        return [record for text in self.texts for record in text.records]

    def torch_version(self) -> tuple[int, ...] | None:
        """torch's version: the caller's, else as a line of the text says it."""
        given = self.context.get("torch")
        if isinstance(given, str) and (match := re.match(r"(\d+)\.(\d+)", given)):
            return int(match.group(1)), int(match.group(2))
        for text in self.texts:
            for line in text.lines:
                if "torch" not in line.text and "PyTorch" not in line.text:
                    continue
                if match := _TORCH.search(line.text):
                    parts = next(g for g in match.groups() if g).split(".")
                    if 1 <= int(parts[0]) <= 9:
                        return int(parts[0]), int(parts[1])
        return None

    def says(self, *needles: str) -> bool:
        """Whether one of the texts stands in any line that was read."""
        return any(needle in line.text for text in self.texts for line in text.lines for needle in needles)
