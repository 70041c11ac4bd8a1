"""All that was read, in one place: what predicates and the judge look at."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_ops.triage.parse_other import Summary
from dflash_ops.triage.types import Finding, Line, Record, Step

_SHAPE = re.compile(
    r"\[\s{0,4}(\d{1,7})\s{0,4},\s{0,4}(\d{1,7})\s{0,4},\s{0,4}(\d{1,7})\s{0,4},\s{0,4}(\d{1,7})\s{0,4}\]"
)

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
    marked: set[int] = field(default_factory=set)  # ids of the lines in which a kind was found
    _numbers: list[int] = field(default_factory=list)

    def after(self, number: int) -> int:
        """Index of the first line behind a line number."""
        if len(self._numbers) != len(self.lines):
            self._numbers = [line.no for line in self.lines]
        return bisect_right(self._numbers, number)


@dataclass
class Case:
    """Everything about one diagnosis."""

    texts: list[Text] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    context: Mapping[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    _shapes: list[tuple[int, ...]] | None = None

    def shapes(self) -> list[tuple[int, ...]]:
        """All `[a, b, c, d]` of the texts, each once."""
        if self._shapes is None:
            found = {
                tuple(int(g) for g in match.groups())
                for text in self.texts
                for line in text.lines
                if "[" in line.text
                for match in _SHAPE.finditer(line.text)
            }
            self._shapes = sorted(found)[:500]
        return self._shapes

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
