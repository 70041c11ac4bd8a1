"""Python tracebacks of one writer's lines: 3.8 to 3.14, whole or cut at either end.

Knows carets, repeated lines, chains in both directions, notes, multi-line messages, SyntaxError without frames,
`Exception in thread`, remote and nested tracebacks, exception groups, faulthandler and py-spy dumps, rich's boxes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_ops.triage.frames import is_user
from dflash_ops.triage.types import Frame, Line, Record, Segment

HEADER = re.compile(r"Traceback \(most recent call last\):")
FRAME = re.compile(r'^(?P<indent>[\s|]*)File "(?P<path>[^"]+)", line (?P<n>\d+)(?:,? in (?P<f>.*))?\s*$')
FRAME_CUT = re.compile(r'^[\s|]*File "[^"]*(?:"(?:, ?[line ]{0,5})?\s*)?$')
EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Group|Timeout|Full|Empty|Iteration|Failure|Abort|Rejected|Exceeded|Hit|Died|Mismatch|Limit\w*|OutOfResources|Unsupported|NotFound\w*|Invalid|Killed|Lost|Cancelled|Mode\w*|Unavailable|Failed|Disconnected|Refused|Denied|Closed|Offline\w*|Problem)|(?:[A-Za-z_]\w*\.)+(?:Full|Empty|Error|Timeout|ArrowInvalid|error|timeout|herror|gaierror)|MemoryError|StopIteration|GeneratorExit|Exception|BaseException|OutOfResources))"
    r"(?P<sub>\([\w.]+\))?(?::(?:\s(?P<message>.*))?|\s*)$"
)
_ANY_TYPE = re.compile(r"^(?P<type>[A-Za-z_][\w.<>]{1,120})(?::(?:\s(?P<message>.*))?|\s*)$")
CAUSE = "The above exception was the direct cause of the following exception"
CONTEXT = "During handling of the above exception, another exception occurred"
THREAD = re.compile(r"^Exception in thread (?P<name>.*?):?(?:Traceback|$)|^Process (?P<process>[\w-]+(?::\d+)*):\s*$")
IGNORED = re.compile(
    r"Exception ignored (?:in|on|while)\b|^-{3} Logging error -{3}|^Call stack:|^Error in atexit\._run_exitfuncs"
    r"|^Traceback \(most recent call last\): \(ignored\)"
)
_CARETS = re.compile(r"^\s*[\^~ ]*[\^~][\^~ ]*$")
_REPEATED = re.compile(r"^\s*\[Previous line repeated \d+ more times?\]")
_NESTED = re.compile(r"Original Traceback|\(RANK \d+\)|traceback :")
_INNER_HINT = re.compile(
    r'RemoteTraceback|^\s*"""|in a subprocess:|RayTaskError|Caught \w+ in |CheckpointException'
    r"|the following traceback|from user code|worker (?:process|thread)"
)
_GROUP_MARGIN = re.compile(r"^\s*[|+](?:-[-+]*(?: [\d.]+ -+)?)?\s?")
_GROUP_BREAK = re.compile(r"^\s*\+-[-+]*(?: ?[\d.]+ -+|-+)\s*$")
_FAULT = re.compile(
    r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[[^\]]*\])? \(most recent call first\):"
    r"|^Stack \(most recent call first\):"
)
_PYSPY = re.compile(r"^Thread (?:0x)?[0-9A-Fa-f]+ \((?:active|idle|active\+gil|idle\+gil)[^)]*\)(?:: .*)?$")
_PYSPY_FRAME = re.compile(r"^\s+(?P<f>[\w<>.]+) \((?P<path>[^():]+):(?P<n>\d+)\)\s*$")
_RANK = re.compile(r"\(RANK (\d+)\)")
#: A log line of its own: ends a message.
_OWN_LINE = re.compile(
    r"^(?:\[[EWIF]\d{3,4} |[EWIF]\d{4} \d\d:|\*{3}|-{6}|={6}|frame #\d|terminate called"
    r"|Fatal Python error|srun: |slurmstepd: |Root Cause|"
    r"Exception raised from |Set the environment variable |wandb: |NVRM: |(?:ERROR|WARNING|INFO"
    r"|CRITICAL|DEBUG)[:\s]|[\w.@-]{1,40}[:~][\w/~.-]{0,80}[#$] |"
    r"C\+\+ CapturedTraceback|_{6}|\x60{3})"
)
_MESSAGE_LIMIT = 60


@dataclass
class _Open:
    """The record being read."""

    record: Record
    segment: Segment
    indent: int
    state: str  # frames | message
    group: bool = False
    blank: bool = False
    next_relation: str = ""


class TracebackParser:
    """Feed the lines of one writer; each is taken (True) or left to others (False). Records gather in `records`."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._open: _Open | None = None
        self._before: list[Line] = []
        self._steps = 0  # progress lines since the last line that was fed

    def feed(self, line: Line) -> bool:
        if line.after_gap:
            self._close(cut=True)
        body = line.body
        taken = self._step(line, body)
        self._steps = 0
        if not taken:
            self._before.append(line)
            del self._before[:-4]
        return taken

    @property
    def opened_at(self) -> int:
        """Number of the line at which the open record began, 0 where none is open."""
        return self._open.record.first if self._open is not None else 0

    def progressed(self) -> None:
        """A progress line of this writer: never part of an error, but several in a row end a message."""
        self._steps += 1

    def mark_sample(self) -> None:
        """The open record follows a model's sample: it may be a part of it."""
        if self._open is not None:
            self._open.record.sample = True

    def finish(self) -> list[Record]:
        self._close(cut=True)
        return self.records

    # ------------------------------------------------------------------------------------------------------------

    def _step(self, line: Line, body: str) -> bool:
        now = self._open
        group = "Exception Group Traceback" in body
        header = HEADER.search(body)
        if header is not None:
            return self._header(line, body, header, group)
        if now is not None and now.group:
            if _GROUP_BREAK.match(body):
                self._group_break(line)
                return True
            if _GROUP_MARGIN.match(body):
                body = _GROUP_MARGIN.sub("", body, count=1)
        frame = FRAME.match(body)
        if frame is not None:
            return self._frame(line, frame)
        if _FAULT.match(body) or _PYSPY.match(body):
            return self._stack(line)
        if now is None:
            if FRAME_CUT.match(body):
                return self._cut_frame(line)
            return self._headless(line, body)
        if now.record.form == "stack":
            return self._stack_line(line, body)
        if now.state == "frames":
            return self._in_frames(line, body)
        return self._in_message(line, body)

    def _header(self, line: Line, body: str, header: re.Match[str], group: bool) -> bool:
        now = self._open
        margin = _GROUP_MARGIN.match(body) if (group or (now is not None and now.group)) else None
        indent = header.start() if not group else header.start() - len("Exception Group ")
        if margin is not None:
            indent = max(0, header.start() - margin.end()) if not group else 0
        if now is not None:
            if now.next_relation:
                self._segment(line, indent, now.next_relation)
                now.group = now.group or group
                return True
            if now.state == "message" and (
                _NESTED.search(body)
                or any(_INNER_HINT.search(x.body) for x in now.segment.lines[-4:])
                or now.record.form == "group"
            ):
                self._segment(line, indent, "inner")
                if match := _RANK.search(body):
                    now.record.rank = int(match.group(1))
                return True
            self._close(cut=True)
        record = Record("group" if group else "traceback", line.stream, line.no, line.no, rank=line.rank)
        self._title(record, line, body[: header.start()])
        segment = Segment(last_no=line.no)
        record.segments.append(segment)
        record.lines.append(line)
        if match := _RANK.search(body):
            record.rank = int(match.group(1))
        self._open = _Open(record, segment, indent, "frames", group)
        return True

    def _title(self, record: Record, line: Line, lead: str) -> None:
        """What stands just before a traceback: a thread, "Exception ignored in", a hook that failed, a logger."""
        for x in reversed([x for x in self._before[-3:] if line.no - x.no <= 4]):
            text = x.body.strip()
            if not text:
                continue
            telling = (
                THREAD.search(text)
                or IGNORED.search(text)
                or "Original exception was" in text
                or "sys.excepthook" in text
                or text.startswith("Fatal Python error")
            )
            if IGNORED.search(text):
                record.noise = True
            if telling and record.title_line is None:
                record.title, record.title_line = text, x
            elif not record.title and len(text) < 300:
                record.title = text
        if IGNORED.search(lead):
            record.noise = True
        if THREAD.search(line.body):
            record.title = line.body
        if line.level == "W" or "WARNING" in lead:
            record.soft = True

    def _segment(self, line: Line, indent: int, relation: str) -> None:
        assert self._open is not None
        segment = Segment(relation=relation, last_no=line.no)
        self._open.record.segments.append(segment)
        self._open.record.lines.append(line)
        self._open.segment = segment
        self._open.indent = indent
        self._open.state = "frames"
        self._open.next_relation = ""
        self._open.record.last = line.no

    def _group_break(self, line: Line) -> None:
        now = self._open
        assert now is not None
        now.record.lines.append(line)
        now.record.last = line.no
        now.record.form = "group"
        if now.state == "message" and re.search(r" \d+ -", line.body):
            now.next_relation = "inner"

    def _frame(self, line: Line, match: re.Match[str]) -> bool:
        now = self._open
        path = match["path"]
        frame = Frame(path, int(match["n"]), (match["f"] or "").strip(), line, user=is_user(path))
        if now is not None and now.record.form == "stack":
            now.segment.frames.append(frame)
            self._take(line)
            return True
        indent = len(match["indent"].replace("|", ""))
        if now is not None and now.state == "message":
            # a frame under a message: ray's and dynamo's nested tracebacks come without a header
            if now.blank and not any(_INNER_HINT.search(x.body) for x in now.segment.lines[-6:]):
                self._close(cut=False)
                now = None
            else:
                self._segment(line, max(0, indent - 2), now.next_relation or "inner")
        if now is None:
            record = Record("traceback", line.stream, line.no, line.no, rank=line.rank)
            self._title(record, line, "")
            segment = Segment(last_no=line.no)
            record.segments.append(segment)
            now = self._open = _Open(record, segment, max(0, indent - 2), "frames")
        now.segment.frames.append(frame)
        now.blank = False
        self._take(line)
        return True

    def _cut_frame(self, line: Line) -> bool:
        """`  File "/long/pa`: the text ends inside a frame."""
        record = Record("traceback", line.stream, line.no, line.no, rank=line.rank)
        segment = Segment(last_no=line.no)
        record.segments.append(segment)
        indent = len(line.body) - len(line.body.lstrip())
        self._open = _Open(record, segment, max(0, indent - 2), "frames")
        self._take(line)
        return True

    def _headless(self, line: Line, body: str) -> bool:
        """An exception's line whose traceback is not in the text: its message and its chain are read all the same."""
        match = EXCEPTION.match(body)
        if match is None or not match["message"] or match["type"].endswith("Warning"):
            return False
        record = Record("headless", line.stream, line.no, line.no, rank=line.rank)
        self._title(record, line, "")
        segment = Segment(head=line, exception=match["type"], message=match["message"].strip(), last_no=line.no)
        record.segments.append(segment)
        self._open = _Open(record, segment, 0, "message")
        self._take(line)
        return True

    def _in_frames(self, line: Line, body: str) -> bool:
        now = self._open
        assert now is not None
        stripped = body.strip()
        if not stripped:
            self._take(line)
            return True
        indent = len(body) - len(body.lstrip())
        if _CARETS.match(body) or _REPEATED.match(body):
            self._take(line)
            return True
        if indent <= now.indent + 1 or (not now.segment.frames and indent <= now.indent + 2):
            match = EXCEPTION.match(stripped)
            if match is None and now.segment.frames and len(stripped) < 4000:
                match = _ANY_TYPE.match(stripped)
                if match is not None and "." not in match["type"] and not match["type"][:1].isupper():
                    match = None
            if match is not None:
                now.segment.head = line
                now.segment.exception = match["type"]
                now.segment.message = (match["message"] or "").strip()
                now.state = "message"
                now.blank = False
                self._take(line)
                return True
            if line.level or _OWN_LINE.match(body):
                return False  # another writer's line amid the frames
            if FRAME_CUT.match(body):
                self._take(line)
                return True
            return False
        if now.segment.frames:
            last = now.segment.frames[-1]
            if not last.code:
                last.code = stripped
            match = EXCEPTION.match(stripped) if indent <= now.indent + 4 and last.code != stripped else None
            if match is not None and match["message"] and indent != now.indent + 4:
                now.segment.head = line
                now.segment.exception = match["type"]
                now.segment.message = match["message"].strip()
                now.state = "message"
        self._take(line)
        return True

    def _in_message(self, line: Line, body: str) -> bool:
        now = self._open
        assert now is not None
        stripped = body.strip()
        if stripped.startswith(CAUSE):
            now.next_relation = "cause"
            self._take(line)
            return True
        if stripped.startswith(CONTEXT):
            now.next_relation = "context"
            self._take(line)
            return True
        if now.next_relation:
            if not stripped:
                self._take(line)
                return True
            self._close(cut=True)
            return False
        if not stripped:
            now.blank = True
            self._take(line)
            return True
        ends = (
            (line.level and line.level != (now.segment.head.level if now.segment.head is not None else ""))
            or line.kernel
            or _OWN_LINE.match(body)
            or THREAD.search(body)
            or IGNORED.search(body)
            or len(now.segment.lines) > _MESSAGE_LIMIT
            or (line.stamp is not None and now.segment.head is not None and now.segment.head.stamp is None)
            or "Original exception was" in body
        )
        if ends:
            self._close(cut=False)
            return False
        indented = body[:1] in (" ", "\t", "│") or len(body) - len(body.lstrip()) > now.indent
        if self._steps > 1 and not indented:
            self._close(cut=False)
            return self._headless(line, body)
        if (
            now.blank
            and not indented
            and not _INNER_HINT.search(body)
            and not stripped.startswith(('"""', "from user code", "Set TORCH"))
        ):
            self._close(cut=False)
            return False
        announced = now.segment.lines and now.segment.lines[-1].body.rstrip().endswith((":", "raised"))
        if not indented and not announced and EXCEPTION.match(stripped) and "Caught " not in now.segment.message:
            # a second exception line straight after the first: an interleaved writer's, or a message of several types
            self._close(cut=False)
            return self._headless(line, body)
        self._take(line)
        return True

    def _stack(self, line: Line) -> bool:
        now = self._open
        if now is not None and now.record.form == "stack":
            segment = Segment(last_no=line.no, reverse=True)
            now.record.segments.append(segment)
            now.segment = segment
            self._take(line)
            return True
        self._close(cut=False)
        record = Record("stack", line.stream, line.no, line.no, rank=line.rank)
        self._title(record, line, "")
        segment = Segment(last_no=line.no, reverse=True)
        record.segments.append(segment)
        self._open = _Open(record, segment, 0, "frames")
        self._take(line)
        return True

    def _stack_line(self, line: Line, body: str) -> bool:
        now = self._open
        assert now is not None
        if (match := _PYSPY_FRAME.match(body)) is not None:
            path = match["path"]
            now.segment.frames.append(Frame(path, int(match["n"]), match["f"], line, user=is_user(path)))
            self._take(line)
            return True
        if not body.strip() or body.startswith(("  ...", "  <no Python frame>", "    ")):
            self._take(line)
            return True
        if line.stream == now.record.stream:
            self._close(cut=False)
        return False

    def _take(self, line: Line) -> None:
        now = self._open
        assert now is not None
        now.record.lines.append(line)
        now.segment.lines.append(line)
        now.segment.last_no = line.no
        now.record.last = line.no

    def _close(self, cut: bool) -> None:
        now = self._open
        if now is None:
            return
        self._open = None
        record = now.record
        frames = record.segments[0].frames
        if frames and (
            frames[0].function == "__del__" or frames[-1].path.endswith("multiprocessing/resource_tracker.py")
        ):
            record.noise = True  # Python prints and ignores what is raised there
        record.cut = record.form != "stack" and record.segments[-1].head is None
        if record.cut and record.segments[-1].relation == "inner" and len(record.segments) > 1 and not cut:
            record.cut = False
        while record.lines and not record.lines[-1].body.strip():
            record.lines.pop()
        if record.lines:
            record.last = record.lines[-1].no
        self.records.append(record)
