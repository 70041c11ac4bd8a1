"""The name of an error that stays the same when it happens again: exception type, call site, normalised message."""

from __future__ import annotations

import hashlib
import re

from dflash_ops.triage.types import Finding, Record, Segment

_PUT = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"https?://\S+"), "<url>"),
    (re.compile(r"['\"]?(?:/|[A-Za-z]:\\)[^\s'\",:;)\]]+['\"]?"), "<path>"),
    (re.compile(r"\b[\w.-]+(?:/[\w.-]+)+\b"), "<path>"),
    (re.compile(r"0x[0-9a-fA-F]+|\b(?=\d*[a-f])[0-9a-f]{8,}\b"), "#"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*"), "#"),
    (re.compile(r"\b\d+(?:[.,:]\d+)*\s?(?:[KMGT]i?B|bytes|ms|milliseconds|seconds|s|kB)\b"), "#"),
    (re.compile(r"\[(?:rank|default)\d+\]:?"), ""),
    (re.compile(r"\b[Rr]ank:? ?\d+\b"), "rank #"),
    (re.compile(r"\bcuda:\d+\b"), "cuda:#"),
    (re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)


def normalise(message: str) -> str:
    """A message without ranks, pids, hex, sizes, times and paths; at most 160 characters."""
    for pattern, replacement in _PUT:
        message = pattern.sub(replacement, message[:2000])
    return message.strip().lower()[:160]


def fingerprint(kind: str, exception: str, site: str, message: str) -> str:
    """16 hex digits of kind, exception type, call site and normalised message."""
    text = "\x1f".join((kind, exception.rsplit(".", 1)[-1], site, normalise(message)))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def site_of(record: Record | None, segment: Segment | None) -> str:
    """`file.py:function` of the innermost frame (paths and line numbers out), "" where no frame shows."""
    if segment is None or not segment.frames:
        return ""
    frame = segment.frames[0 if segment.reverse else -1]
    return f"{frame.path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.function}"


def of_finding(finding: Finding) -> str:
    """The fingerprint of a finding; the matched text stands in where there is no exception."""
    segment = finding.segment
    if segment is not None and segment.head is not None:
        return fingerprint(finding.kind.id, segment.exception, site_of(finding.record, segment), segment.message)
    return fingerprint(finding.kind.id, "", site_of(finding.record, segment), finding.line.body)
