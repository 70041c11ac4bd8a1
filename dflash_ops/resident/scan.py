"""What the trainer said: its log and its metrics.jsonl, read piece by piece.

The rule here: no piece of text may cost more than its length. Lines are cut at 64 KiB, a carriage return ends a line
(progress bars), colours are taken out, and only lines that can matter are decoded.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

from dflash_ops.contracts import (
    Progress,
    ProgressLine,
    ProgressPattern,
    StageInfo,
    WorkerShares,
    from_dict,
    parse_line,
)
from dflash_ops.errors import ContractError
from dflash_ops.resident.course import Course

LINE = 1 << 16
#: Intervals kept for median and p99: at one line in 10 s an hour and a half.
KEPT = 512

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ENDS = re.compile(rb"[\r\n]+")


class Lines:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        pieces = _ENDS.split(self._rest + data if self._rest else data)
        self._rest = pieces.pop()
        if self._skipping and pieces:
            pieces.pop(0)  # the tail of a line that was cut
            self._skipping = False
        if self._skipping:
            self._rest = b""
        elif len(self._rest) > LINE:
            pieces.append(self._rest[:LINE])
            self._rest = b""
            self._skipping = True
        return pieces


class Beats:
    """Intervals between successive progress lines: seconds between lines, and seconds a step."""

    def __init__(self) -> None:
        self.gaps: deque[float] = deque(maxlen=KEPT)
        self.step_s: deque[float] = deque(maxlen=KEPT)
        self._last: tuple[float, int] | None = None

    def add(self, t: float, step: int, lines: int = 1) -> None:
        """Progress reached `step` at `t`; `lines` lines came since the last call (they were read together)."""
        if self._last is not None:
            seconds, steps = t - self._last[0], step - self._last[1]
            if steps > 0 and seconds > 0:  # a roll-back, or lines read at once, tell nothing of the pace
                self.gaps.append(seconds / lines)
                self.step_s.append(seconds / steps)
        self._last = (t, step)

    def __len__(self) -> int:
        return len(self.gaps)


@dataclass(frozen=True)
class Said:
    """An `event=` line of the trainer, read at `t`."""

    name: str
    line: ProgressLine
    t: float


def read_line(raw: bytes, pattern: ProgressPattern | None) -> ProgressLine | None:
    """What one raw line says; `pattern`: a foreign trainer's progress lines."""
    if b"\x1b" in raw:
        raw = _ANSI.sub(b"", raw)
    text = raw[:LINE].decode("utf-8", "replace")
    if pattern is not None and (found := pattern.parse(text)) is not None:
        return found
    return parse_line(text)


class LogScanner:
    """State as the log tells it. `pattern`: a foreign trainer's progress lines."""

    def __init__(self, pattern: ProgressPattern | None) -> None:
        self._pattern = pattern
        self._lines = Lines()
        self.stage: StageInfo | None = None
        self.progress: Progress | None = None
        self.life: int | None = None
        self.last_event = ""
        self.output_t: float | None = None
        self.sign_t: float | None = None
        self.beats = Beats()
        self.course = Course()

    def recall(self, stage: StageInfo | None, progress: Progress | None, life: int | None) -> None:
        """Begin from what an earlier observer knew: the log may be too long to be read from its beginning."""
        self.stage, self.progress, self.life = stage, progress, life
        if progress is not None:
            self.sign_t = progress.t

    def feed(self, data: bytes, t: float) -> list[Said]:
        """Take new bytes that were written by time `t`; gives the events among them."""
        if not data:
            return []
        self.output_t = t
        events = []
        steps = 0
        for raw in self._lines.feed(data):
            if self._pattern is None and b"dflash " not in raw:
                continue
            line = self._parse(raw)
            if line is None:
                continue
            self.sign_t = t
            if (life := line.integer("life")) is not None:
                self.life = max(self.life or 0, life)
            if line.kind == "step":
                self.progress = line.progress(t)
                self.stage = StageInfo("stepping")
                steps += 1
            elif line.kind == "stage":
                self._enter(
                    StageInfo(line.fields["stage"], line.integer("k"), line.integer("n"), line.fields.get("what", ""))
                )
            else:
                self.last_event = line.fields["event"]
                events.append(Said(self.last_event, line, t))
        if steps and self.progress is not None:
            self.course.add(self.progress)
            if self.progress.step is not None:
                self.beats.add(t, self.progress.step, steps)
        return events

    def _enter(self, stage: StageInfo) -> None:
        """A worker that has loaded late does not set a run back that steps; `k=0` begins a loading of all."""
        stepping = self.stage is not None and self.stage.name in ("stepping", "saving")
        if not (stepping and stage.name == "loading" and stage.k):
            self.stage = stage

    def _parse(self, raw: bytes) -> ProgressLine | None:
        return read_line(raw, self._pattern)


_PROGRESS_KEYS = frozenset(f.name for f in fields(Progress))


class MetricsScanner:
    """State as metrics.jsonl tells it; its times are the trainer's own, exact ones."""

    def __init__(self) -> None:
        self._lines = Lines()
        self.progress: Progress | None = None
        self.workers: dict[str, WorkerShares] = {}
        self.life: int | None = None
        self.bad_lines = 0
        self.beats = Beats()
        self.course = Course()

    def feed(self, data: bytes) -> None:
        for raw in self._lines.feed(data):
            if not raw.strip():
                continue
            try:
                self._take(json.loads(raw))
            except (ValueError, RecursionError, ContractError, AttributeError):
                self.bad_lines += 1

    def _take(self, record: dict[str, Any]) -> None:
        known = {k: v for k, v in record.items() if k in _PROGRESS_KEYS}
        progress = from_dict(Progress, known, "metrics.jsonl")
        workers = {
            str(name): from_dict(WorkerShares, shares, f"metrics.jsonl.workers.{name}")
            for name, shares in (record.get("workers") or {}).items()
        }
        self.progress, self.workers = progress, workers
        if isinstance(life := record.get("life"), int):
            self.life = life
        self.course.add(progress)
        if progress.step is not None:
            self.beats.add(progress.t, progress.step)
