"""An error after which the same worker went on is no crash (law: later progress outranks an earlier error line).

A *run* is progress of one writer without an error's text between: bars that a terminal mixes into a traceback, and the
last steps of other ranks, are no run, and other new text between the steps parts it. Steps must pass the highest step
that stood before the error.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from dflash_ops.triage.case import Text
from dflash_ops.triage.parse_other import ERRORISH
from dflash_ops.triage.types import Line, Record

_OUTSIDE = 10  # steps that outweigh a line of the kernel or of the terminal


@dataclass
class _Run:
    numbers: list[int] = field(default_factory=list)
    steps: list[float | None] = field(default_factory=list)
    others: list[int] = field(
        default_factory=list
    )  # numbers of lines between that are neither progress nor seen before


@dataclass
class _Writer:
    """Progress of one stream: its runs, and the highest step up to each line."""

    runs: list[_Run] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    ended: bool = False


class Progress:
    """Built once for a text; `outlived(record)` answers in a few searches."""

    def __init__(self, text: Text) -> None:
        self._writers: dict[str, _Writer] = {}
        seen: set[str] = set()
        calm = True
        errors = {id(line) for r in text.records if r.form != "loose" and not r.noise for line in r.lines}
        for line in text.lines:
            if line.progress is not None:
                self._add(line)
            elif line.body.strip():
                broken = (
                    id(line) in errors
                    or id(line) in text.marked
                    or line.level in ("E", "F")
                    or ERRORISH.search(line.body) is not None
                )
                shape = "".join(c for c in line.body[:60] if not c.isdigit())
                calm = calm and not broken
                if calm:
                    seen.add(shape)  # what stood between the steps before any error may stand there afterwards
                if not broken and shape in seen:
                    continue
                for name in {line.stream, ""}:
                    writer = self._writers.get(name)
                    if writer is None:
                        continue
                    if broken:
                        writer.ended = True
                    elif writer.runs:
                        writer.runs[-1].others.append(line.no)
        fatal = [r.first for r in text.records if not r.noise and not r.soft and r.form in ("traceback", "group")]
        self._last_fatal = max(fatal, default=0)

    def _add(self, line: Line) -> None:
        step = line.progress
        assert step is not None
        writer = self._writers.setdefault(line.stream, _Writer())
        if step.done:
            writer.done.append(line.no)
        if not writer.runs or writer.ended:
            writer.runs.append(_Run())
        writer.ended = False
        run = writer.runs[-1]
        run.numbers.append(line.no)
        run.steps.append(step.step)
        if step.step is not None:
            top = writer.highest[-1] if writer.highest else step.step
            writer.numbers.append(line.no)
            writer.highest.append(max(top, step.step))

    def outlived(self, record: Record, outside: bool = False) -> bool:
        """Whether its writer went on after the record. `outside`: evidence that no worker wrote (kernel, terminal)."""
        names = [record.stream]
        if record.rank == 0 and record.stream == "rank0":
            names.append("")  # rank 0 prints the progress, its errors come with a prefix
        return any(self._went_on(self._writers[name], record, outside) for name in names if name in self._writers)

    def _went_on(self, writer: _Writer, record: Record, outside: bool) -> bool:
        light = record.soft or record.form in ("loose", "headless")
        if light and writer.done and writer.done[-1] > record.last:
            return True
        need = _OUTSIDE if outside else self._needed(record)
        at = bisect_left(writer.numbers, record.first)
        before = writer.highest[at - 1] if at else None
        for run in writer.runs:
            start = bisect_right(run.numbers, record.last)
            if start >= len(run.numbers):
                continue
            for after in _stretches(run, start, need):
                distinct = {s for s in after if s is not None}
                if before is None and not light and min(distinct, default=2) <= 1:
                    continue  # the whole run's own output, flushed behind the error that ended it
                ahead = {s for s in distinct if before is None or s > before}
                if len(ahead) + sum(1 for s in after if s is None) >= need:
                    return True
                if len(distinct) >= max(6, need) and _rising(after):
                    return True
        return False

    def _needed(self, record: Record) -> int:
        """How many steps in a row it takes to believe it: steps of its peers may stand behind a worker's last words."""
        if record.soft:
            return 1
        if record.mild or (record.form == "loose" and "Warning" in record.lines[0].text):
            return 2
        more = 1 if self._last_fatal > record.last else 0
        return (3 if record.form == "loose" else 5) + more


def _stretches(run: _Run, start: int, need: int) -> Iterator[list[float | None]]:
    """The steps of a run from an index on, parted where other new text stands between them; the long ones only."""
    bounds = [bisect_left(run.numbers, n, start) for n in run.others[bisect_right(run.others, run.numbers[start]) :]]
    edge = start
    for bound in [*bounds, len(run.steps)]:
        if bound - edge >= need:
            yield run.steps[edge:bound]
        edge = max(edge, bound)


def _rising(steps: list[float | None]) -> bool:
    return all(b >= a for a, b in pairwise(steps) if a is not None and b is not None)
