"""One source -> `Text`: scanned, cleaned, unwrapped, prefixes off, writers apart, errors and progress parsed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_ops.contracts.progress import ProgressPattern
from dflash_ops.triage import progress, wraps
from dflash_ops.triage.case import Text
from dflash_ops.triage.clean import clean, unglue, without_copy_mode_mark
from dflash_ops.triage.match import Matcher
from dflash_ops.triage.parse_other import SAMPLE, embedded, error_json, fences, unbox
from dflash_ops.triage.parse_traceback import TracebackParser
from dflash_ops.triage.prefix import Learned, peel, strip_compose
from dflash_ops.triage.scan import Needles, Scan
from dflash_ops.triage.types import Line, Record, Source

_SLICE = 1 << 20
_NEAR = 10  # lines after the beginning of a model's text in which a traceback may be a part of it
#: Beginnings of kernel lines that were copied without their stamps.
_KERNEL = ("NVRM: ", "Out of memory: Killed", "Memory cgroup out of memory:", "systemd-oomd[")


def read(source: Source, index: int, matcher: Matcher, needles: Needles, own: ProgressPattern | None) -> Text:
    """Everything that stands in one source. Never raises on any bytes."""
    text = Text(source.name, source.kind, index)
    if source.kind == "exit_json":
        text.exit = _exit_json(source.data)
        return text
    if source.kind == "error_json":
        rows, text.stamp = error_json(_whole(source.data))
        lines = [Line(i + 1, row) for i, row in enumerate(rows)]
        text.total_lines = len(rows)
    else:
        lines = _scan(source, text, needles)
    _dedent(lines)
    lines = _apart(wraps.join(lines, matcher.spans_literal, matcher.knows))
    _prefixes(lines, source.kind == "kernel")
    if any("py_callstack" in line.text or line.body.startswith('{"log":') for line in lines):
        lines = list(embedded(lines))
    if any("│" in line.body or "┃" in line.body for line in lines):
        lines = unbox(lines)
    text.lines = lines
    _parse(text, own)
    return text


def _scan(source: Source, text: Text, needles: Needles) -> list[Line]:
    scan = Scan(needles)
    for chunk in _chunks(source.data):
        scan.feed(chunk)
    scan.close()
    text.total_lines = scan.total_lines
    text.attempt = scan.attempt
    lines: list[Line] = []
    first = True
    for number, raw, gap in scan.lines():
        for i, part in enumerate(clean(raw)):
            if first and part.strip():
                part = without_copy_mode_mark(part)
                first = False
            lines.append(Line(number, part, gap and i == 0))
    return lines


def _dedent(lines: list[Line]) -> None:
    """Blanks that stand before every line (a text copied with its indent) taken off."""
    margin = min((len(line.text) - len(line.text.lstrip(" ")) for line in lines if line.text.strip()), default=0)
    if margin:
        for line in lines:
            line.text = line.body = line.text[margin:]


def _apart(lines: list[Line]) -> list[Line]:
    out: list[Line] = []
    for line in lines:
        parts = unglue(line.text)
        if len(parts) == 1:
            out.append(line)
        else:
            out.extend(Line(line.no, part, line.after_gap and i == 0) for i, part in enumerate(parts))
    return out


def _chunks(data: bytes | Iterable[bytes]) -> Iterable[bytes]:
    if isinstance(data, (bytes, bytearray, memoryview)):
        whole = bytes(data)
        for at in range(0, len(whole), _SLICE):
            yield whole[at : at + _SLICE]
    else:
        yield from data


def _whole(data: bytes | Iterable[bytes]) -> bytes:
    return bytes(data) if isinstance(data, (bytes, bytearray)) else b"".join(data)[: 1 << 22]


def _exit_json(data: bytes | Iterable[bytes]) -> Mapping[str, Any] | None:
    try:
        document = json.loads(_whole(data).decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _prefixes(lines: list[Line], kernel: bool) -> None:
    for line in lines:
        peel(line)
        if kernel or line.body.startswith(_KERNEL) or "NVRM: Xid (" in line.body:
            line.kernel = True
    strip_compose(lines)
    learned = Learned()
    for line in lines:
        learned.learn(line.body)
    if learned:
        for line in lines:
            learned.strip(line)


def _parse(text: Text, own: ProgressPattern | None) -> None:
    """Progress first (a progress line is never part of an error), then tracebacks, each writer's lines apart."""
    parsers: dict[str, TracebackParser] = {}
    steps = progress.Reader(own)
    samples: dict[str, int] = {}  # writer -> the line at which it last began to print a model's text
    for line in text.lines:
        if (step := steps.read(line.body)) is not None or (
            line.body is not line.text and line.stamp is not None and (step := steps.read(line.text)) is not None
        ):
            line.progress = step
            text.steps.append((line, step))
            samples.pop(line.stream, None)
            if line.stream in parsers:
                parsers[line.stream].progressed()
            continue
        if SAMPLE.match(line.body):
            samples[line.stream] = line.no
        parser = parsers.setdefault(line.stream, TracebackParser())
        parser.feed(line)
        if parser.opened_at == line.no and line.no - samples.get(line.stream, -_NEAR) < _NEAR:
            parser.mark_sample()
    for parser in parsers.values():
        text.records.extend(parser.finish())
    text.records.sort(key=lambda r: r.first)
    written = _written(text)
    for record in text.records:
        record.source = text.index
        # a model writes frames of its own, hardly ever a whole stack through installed packages
        through = any("-packages/" in frame.path for segment in record.segments for frame in segment.frames)
        record.noise = record.noise or record.first in written or (record.sample and not through)
    _hooks(text)
    _loose(text, written)


def _written(text: Text) -> set[int]:
    """Numbers of the lines of fenced text after which training went on."""
    if not any("```" in line.body or "~~~" in line.body for line in text.lines):
        return set()
    last = text.steps[-1][0].no if text.steps else 0
    return {n for first, end in fences(text.lines) if end < last for n in range(first, end + 1)}


def _hooks(text: Text) -> None:
    """`Error in sys.excepthook`, then `Original exception was`: the hook's own failure only masked the second."""
    hooks = [r for r in text.records if "sys.excepthook" in r.title]
    for record in text.records:
        if "Original exception was" in record.title:
            for hook in hooks:
                hook.noise = hook.noise or hook.first < record.first


def _loose(text: Text, written: set[int]) -> None:
    """Lines that belong to no traceback, each a record of its own with the indented lines under it."""
    taken = {id(line) for record in text.records for line in record.lines}
    taken |= {id(record.title_line) for record in text.records if record.title_line is not None}
    open_by: dict[str, Record] = {}
    loose: list[Record] = []
    for line in text.lines:
        if id(line) in taken or line.progress is not None or not line.body.strip():
            open_by.pop(line.stream, None)
            continue
        record = open_by.get(line.stream)
        if (
            record is not None
            and line.body[:1] in (" ", "\t")
            and len(record.lines) < 12
            and not line.kernel
            and not line.after_gap
        ):
            record.lines.append(line)
            record.last = line.no
            continue
        record = Record("loose", line.stream, line.no, line.no, text.index, lines=[line], rank=line.rank)
        record.noise = line.no in written or (SAMPLE.match(line.body) is not None and not line.level)
        open_by[line.stream] = record
        loose.append(record)
    text.records.extend(loose)
