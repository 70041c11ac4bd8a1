"""What is no Python traceback: launcher summaries, JSON in the text, kernel lines, boxes, fences of model text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from dflash_ops.triage.types import Line

_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)")
_FAILURES = re.compile(r"^\s*(?:Other )?[Ff]ailures:")
_RULE = re.compile(r"^\s*={10,}\s*$")
_RANK_FIELD = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: (\d+)\)")
_ERROR_FILE = re.compile(r"error_file\s*:\s*(/\S+)")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
SUMMARY_WORDS = (
    "(exitcode:",
    "exitcode  :",
    "error_file",
    "ChildFailedError",
    "FAILED",
    "Signal ",
    "Root Cause",
    "traceback :",
    "exited with",
    "exit status",
    "died with",
    "Killed",
    "Aborted",
    "core dumped",
    "Segmentation fault",
    "got signal",
)
_BOX = re.compile(r"^\s*[│┃]\s?(?P<inner>.*?)\s*[│┃]?\s*$")
_BOX_FRAME = re.compile(r"^(?P<path>/?[\w./~-]+\.py):(?P<n>\d+) in (?P<f>\S+)\s*$")
_CALLSTACK = re.compile(r'"py_callstack": "((?:[^"\\]|\\.)*)')
_FENCE_LINES = 80
_FENCE = re.compile(r"^\s*(?:```|~~~)")
SAMPLE = re.compile(
    r"^\W*(?:\[?\w{0,12}\]?\s)?(?:sample|samples|generated|generation|completion|completions|prompt"
    r"|response|answer|output text|model output|assistant|decoded|prediction|text)"
    r"\b[\w \t#/().-]{0,30}[:=>]",
    re.IGNORECASE,
)
ERRORISH = re.compile(
    r"[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Full|Empty|OutOfResources|Timeout|Hit)\b|\b[Ee]rror\b"
    r"|\bERROR\b|what\(\)|[Ff]ailed|FAILED|[Ff]atal|NCCL WARN|terminate"
)


class Summary:
    """torchelastic's report: which section a line stands in, and the first failure's rank, exit code and error file."""

    def __init__(self) -> None:
        self.section = ""
        self.rank: int | None = None
        self.root_rank: int | None = None
        self.error_file: str | None = None
        self.exitcode: int | None = None
        self.failed_rank: int | None = None

    def tags(self, line: Line) -> frozenset[str]:
        """`summary` for a line of the report; also `other` for failures that are not the first."""
        body = line.body
        if _ROOT_CAUSE.search(body):
            self.section = "root"
        elif _FAILURES.match(body):
            self.section = "other"
        elif _RULE.match(body) and self.section == "root":
            self.section = ""
            return frozenset(("summary",))
        if (match := _RANK_FIELD.match(body)) is not None:
            self.rank = int(match.group(1))
            if self.section == "root" and self.root_rank is None:
                self.root_rank = self.rank
        if self.section == "root" and (match := _ERROR_FILE.search(body)) is not None:
            self.error_file = match.group(1)
        if (match := _FAILED.search(body)) is not None and self.failed_rank is None:
            self.failed_rank = int(match.group(2))
            self.exitcode = int(match.group(1))
        if self.section:
            if line.rank is None and self.rank is not None:
                line.rank = self.rank
            return frozenset(("summary", "other")) if self.section == "other" else frozenset(("summary",))
        if any(word in body for word in SUMMARY_WORDS):
            return frozenset(("summary",))
        return frozenset()


def unbox(lines: list[Line]) -> list[Line]:
    """rich's boxes: borders off, broken paths joined, its frames written as Python writes them."""
    out: list[Line] = []
    pending: Line | None = None
    for line in lines:
        match = _BOX.match(line.body) if line.body.lstrip()[:1] in ("│", "┃") else None
        if match is None:
            pending = None
            out.append(line)
            continue
        inner = match["inner"]
        if pending is not None and inner and not inner.startswith(("/", "│", "❱")):
            pending.body += inner
            inner = pending.body
            line = pending
            pending = None
        frame = _BOX_FRAME.match(inner)
        if frame is not None:
            line.body = f'  File "{frame["path"]}", line {frame["n"]}, in {frame["f"]}'
            pending = None
        else:
            line.body = "      " + inner  # source or decoration: never an exception's own line
            if inner.startswith("/") and len(inner) > 20:
                line.body = inner
                pending = line
        if not out or out[-1] is not line:
            out.append(line)
    return out


def embedded(lines: list[Line]) -> Iterator[Line]:
    """Lines with JSON opened: docker's `{"log": ...}`, torch's `"py_callstack": "Traceback..."`."""
    for line in lines:
        text = line.body
        if text.startswith('{"log":') and text.rstrip().endswith("}"):
            inner = _json_text(text, ("log",))
            if inner is not None:
                line.body = line.text = inner
                yield line
                continue
        match = _CALLSTACK.search(text) if "py_callstack" in text else None
        if match is None:
            yield line
            continue
        message = _json_field(text[: match.start()], "message")
        if message:
            yield _copy(line, message)
        else:
            head = text[: match.start()].strip(" ,{")
            if head:
                yield _copy(line, head)
        for part in _unescape(match.group(1)).split("\n"):
            yield _copy(line, part)
        yield _copy(line, "")


def error_json(data: bytes) -> tuple[list[str], float | None]:
    """torch's error.json: the lines of its traceback (or message), and its timestamp in seconds."""
    try:
        document = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace").splitlines(), None
    message = document.get("message") if isinstance(document, dict) else None
    if isinstance(message, str):
        return message.splitlines(), None
    if not isinstance(message, dict):
        return data.decode("utf-8", "replace").splitlines(), None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack = extra.get("py_callstack")
    text = stack if isinstance(stack, str) and stack.strip() else str(message.get("message", ""))
    try:
        stamp = float(extra.get("timestamp", ""))
    except (TypeError, ValueError):
        stamp = None
    return text.splitlines(), stamp


def _copy(line: Line, body: str) -> Line:
    other = Line(line.no, body, line.after_gap)
    other.stream, other.rank, other.stamp, other.level = line.stream, line.rank, line.stamp, line.level
    return other


def _json_text(text: str, keys: tuple[str, ...]) -> str | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for key in keys:
        value = document.get(key) if isinstance(document, dict) else None
        if isinstance(value, str):
            return value.rstrip("\n")
    return None


def _json_field(text: str, key: str) -> str:
    match = re.search(rf'"{key}": "((?:[^"\\]|\\.)*)"', text)
    return _unescape(match.group(1)) if match else ""


def _unescape(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"').replace("\\\\", "\\")


def fences(lines: list[Line]) -> list[tuple[int, int]]:
    """First and last line number of each short ``` fence with text before it: what a model or a person wrote.

    A report that was copied with the fence around it is no such text: nothing stands before its first fence.
    """
    found: list[tuple[int, int]] = []
    start: int | None = None
    for i, line in enumerate(lines):
        if not _FENCE.match(line.body):
            continue
        if start is None:
            start = i
        else:
            if i - start <= _FENCE_LINES and any(x.body.strip() for x in lines[max(0, start - 5) : start]):
                found.append((lines[start].no, line.no))
            start = None
    return found
