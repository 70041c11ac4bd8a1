"""What passes between the stages of triage: lines, frames, records, findings. Nothing here reads or decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_ops.triage.playbook import Kind, Signature

#: Kinds of source. `log` and `pane` hold any text, `kernel` the host's kernel log, the others one JSON document.
SOURCE_KINDS = ("log", "pane", "kernel", "error_json", "exit_json")


@dataclass(frozen=True)
class Source:
    """One text to read: a name for people, its bytes (whole, or in chunks of any size) and one of SOURCE_KINDS."""

    name: str
    data: bytes | Iterable[bytes]
    kind: str = "log"


class Line:
    """One clean line.

    `no` is the 1-based number of the physical line where it begins, `text` the line without control codes and wraps,
    `body` what is left when prefixes are taken off, `stream` who wrote it ("" where nobody says), `rank` of the writer,
    `stamp` its own time in seconds (any epoch, comparable inside one clock only), `level` one letter of DIWEF or "".
    """

    __slots__ = ("after_gap", "body", "kernel", "level", "no", "progress", "rank", "stamp", "stream", "text")

    def __init__(self, no: int, text: str, after_gap: bool = False) -> None:
        self.no = no
        self.text = text
        self.body = text
        self.stream = ""
        self.rank: int | None = None
        self.stamp: float | None = None
        self.level = ""
        self.kernel = False
        self.progress: Step | None = None
        self.after_gap = after_gap

    def __repr__(self) -> str:
        return f"Line({self.no}, {self.stream!r}, {self.body!r})"


@dataclass(frozen=True)
class Step:
    """What a progress line said: `step` where it counts, `done` where it says that training ended well."""

    step: float | None
    dialect: str
    done: bool = False


@dataclass
class Frame:
    """`File "path", line number, in function` and its source line; `user` = outside libraries."""

    path: str
    number: int
    function: str
    line: Line
    code: str = ""
    user: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


@dataclass
class Segment:
    """One exception with its frames. `relation` to the segment before: "", "cause", "context" or "inner"."""

    frames: list[Frame] = field(default_factory=list)
    head: Line | None = None
    exception: str = ""
    message: str = ""
    lines: list[Line] = field(default_factory=list)
    relation: str = ""
    last_no: int = 0
    reverse: bool = False


@dataclass
class Record:
    """An error: a traceback (chain of segments), or loose lines.

    `form`: traceback | headless (an exception's line without frames) | group (exception group) | stack (a dump without
    exception) | loose. `title`: the line just before it (a thread's name, a hook, a logger).
    `soft`: caught, retried, skipped; `mild`: it may be. `noise`: never an anchor (`Exception ignored in`, model text).
    `cut`: its last line is not in the text.
    """

    form: str
    stream: str
    first: int
    last: int
    source: int = 0
    segments: list[Segment] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    title: str = ""
    title_line: Line | None = None
    rank: int | None = None
    soft: bool = False
    mild: bool = False
    sample: bool = False
    noise: bool = False
    cut: bool = False

    @property
    def text(self) -> str:
        title = [self.title_line.body] if self.title_line is not None else []
        return "\n".join([*title, *(line.body for line in self.lines)])


@dataclass
class Finding:
    """A kind that matched a record at a line."""

    kind: Kind
    signature: Signature
    record: Record
    line: Line
    role: str
    source: int = 0
    segment: Segment | None = None
    entity: str | None = None
    rank: int | None = None
    stamp: float | None = None
    outlived: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)

    @property
    def cause(self) -> Line | None:
        """The line that names the cause, None where the text was cut before it."""
        if self.segment is not None and self.record.form != "stack":
            return self.segment.head
        return self.line
