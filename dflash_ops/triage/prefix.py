"""Prefixes taken off a line and remembered: rank, writer, time, level, and whether the kernel wrote it."""

from __future__ import annotations

import re
from collections.abc import Callable

from dflash_ops.triage.types import Line

_Match = re.Match[str]


def _rank(line: Line, match: _Match) -> None:
    line.rank = int(match["n"])
    line.stream = (
        match["role"] + match["n"] if match["role"] not in ("rank", "default", "Rank") else f"rank{match['n']}"
    )


def _labelled(line: Line, match: _Match) -> None:
    line.rank = int(match["n"])
    line.stream = f"rank{match['n']}"


def _actor(line: Line, match: _Match) -> None:
    line.stream = f"{match['who']} {match['n']}"


def _container(line: Line, match: _Match) -> None:
    line.stream = match["who"]


def _stamp(line: Line, match: _Match) -> None:
    if line.stamp is None:
        y, mo, d, h, mi, s = (int(match[k] or 0) for k in ("y", "mo", "d", "h", "mi", "s"))
        fraction = float("0." + match["f"]) if match["f"] else 0.0
        days = y * 372 + mo * 31 + d  # an order, not a calendar
        line.stamp = days * 86400.0 + h * 3600 + mi * 60 + s + fraction


def _level(line: Line, match: _Match) -> None:
    level = match["level"]
    line.level = {"CRITICAL": "F", "FATAL": "F"}.get(level, level[0])


def _c10d(line: Line, match: _Match) -> None:
    line.level = match["level"]
    if match["n"] is not None and line.rank is None:
        line.rank = int(match["n"])


def _kernel(line: Line, match: _Match) -> None:
    line.kernel = True
    if "up" in match.re.groupindex and match["up"]:
        line.stamp = float(match["up"])


def _nothing(line: Line, match: _Match) -> None:
    return


_TABLE: tuple[tuple[str, Callable[[Line, _Match], None], str], ...] = (
    # first characters, what to remember, the prefix
    ("[", _rank, r"\[(?P<role>[A-Za-z_][A-Za-z_-]{0,30}?)(?P<n>\d{1,5})\]:\x20?(?=.)"),
    ("[", _labelled, r"\[\d{1,3},(?P<n>\d{1,5})\]<std(?:err|out|diag)>:\x20?"),
    ("(", _actor, r"\((?P<who>[\w][\w .:+-]{0,60}?)\s+pid=(?P<n>\d+)(?:, ip=[\d.:a-f]+)?(?:, [\w =]{1,30})?\)\x20?"),
    (
        "0123456789[(",
        _stamp,
        r"[\[(]?(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)[T ](?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)"
        r"(?:[.,:](?P<f>\d{1,9}))?"
        r"(?:Z|\x20?[+-]\d\d:?\d\d|\x20UTC)?(?:[\])](?:\x20|:\x20?)?|,?\x20(?:-\x20|\|\x20)?|:\x20|(?=$))",
    ),
    (
        "0123456789[",
        _stamp,
        r"\[?(?P<y>)(?P<mo>\d\d)[-/](?P<d>\d\d) (?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)"
        r"(?:[.,](?P<f>\d{1,9}))?\]?\x20(?:-\x20)?",
    ),
    (
        "0123456789[",
        _stamp,
        r"\[?(?P<y>)(?P<mo>)(?P<d>)(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?\]?\x20(?:-\x20|\|\x20)?",
    ),
    ("[", _kernel, r"\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] "),
    ("[", _kernel, r"\[\s{0,6}(?P<up>\d{1,9}\.\d{6})\] (?:\[\s*[TC]?\d+\] )?"),
    ("JFMASOND", _kernel, r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,80} kernel: "),
    ("k", _kernel, r"kernel: (?=\S)"),
    ("JFMASOND", _nothing, r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,80} (?=[\w./@-]{1,60}(?:\[\d+\])?: )"),
    (
        "[",
        _c10d,
        r"\[(?P<level>[EWIF])\d{0,4}(?: [\d:.]+)? [\w./-]+:\d+\] (?:\[c10d\] )"
        r"?(?:\[(?:PG[^\]]{0,160}?)?[Rr]ank (?P<n>\d+)\]:?\s)?",
    ),
    (
        "EWIF",
        _c10d,
        r"(?P<level>[EWIF])\d{4} \d\d:\d\d:\d\d(?:\.\d+)?\s+\d+ \S+:\d+\] (?:\[\w+(?:/\w+)*\] )?(?P<n>(?!))?",
    ),
    ("EWICDF", _level, r"(?P<level>ERROR|WARNING|INFO|CRITICAL|DEBUG|FATAL):[\w.]{1,100}:"),
    (">", _nothing, r"> ?"),
    (
        "0123456789",
        _labelled,
        r"(?P<n>\d{1,4}): (?=\s*(?:File \"|Traceback|\w+(?:\.\w+)*(?:Error|Exception)|\[|\d{4}-|[EWIF]\d{4} | ))",
    ),
)
_COMPILED = tuple((frozenset(first), remember, re.compile(pattern)) for first, remember, pattern in _TABLE)
_LEVELS = r"(?P<level>TRACE|DEBUG|INFO|SUCCESS|WARNING|WARN|ERROR|CRITICAL|FATAL)"
#: Loggers' own prefixes: loguru, logging with names, ray, deepspeed, fairseq.
_LOGGERS = re.compile(
    r"(?:\| )?" + _LEVELS + r"\s{0,5}\| [\w.<>]{1,80}(?::[\w.<>]{1,80}:\d{1,6} - | \| )"
    r"|[\w.-]{1,60} - (?P<l2>DEBUG|INFO|WARNING|ERROR|CRITICAL) - "
    r"|\[(?P<l3>DEBUG|INFO|WARNING|ERROR|CRITICAL)\]:? (?:\[[\w.]{1,60}:\d{1,6}(?::[\w<>]{1,60})?\] )?"
    r"|(?P<l4>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w./]{1,60}:\d{1,6} (?:--|-|\|) "
)
_LEVEL_WORD = re.compile(r"DEBUG|INFO|WARN|ERROR|CRITICAL|SUCCESS|TRACE|FATAL")
_COMPOSE = re.compile(r"(?P<who>[A-Za-z][\w.-]{0,50}?[-_.]?\d{0,4})\s{1,20}\| (?=\S|\s{2,})")
_ANY_FIRST = frozenset("".join(first for first, _, _ in _TABLE))
_DIGITS = re.compile(r"\d+")
_LEARN = re.compile(r'Traceback \(most recent call last\):|  File "[^"]+", line \d+, in ')


def peel(line: Line) -> None:
    """Take known prefixes off `line.body`, one after the other, and fill rank, stream, stamp, level and kernel."""
    body = _table(line, line.text)
    if _LEVEL_WORD.search(body, 0, 90) and (match := _LOGGERS.match(body)) is not None:
        level = next(g for g in match.groups() if g is not None)
        line.level = line.level or {"CRITICAL": "F", "FATAL": "F", "SUCCESS": "I", "TRACE": "D"}.get(level, level[0])
        body = _table(line, body[match.end() :])
    line.body = body


def _table(line: Line, body: str) -> str:
    for _ in range(8):
        first = body[:1]
        if first not in _ANY_FIRST:
            break
        for firsts, remember, pattern in _COMPILED:
            if first in firsts and (match := pattern.match(body)):
                remember(line, match)
                body = body[match.end() :]
                break
        else:
            break
    return body


class Learned:
    """Prefixes that no table knows (a launcher's own), learned from traceback lines that stand behind them.

    `2023-.. [177/train/578 (pid 28936)] [uuid] Traceback (most recent call last):` teaches its prefix, digits aside.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def learn(self, body: str) -> None:
        match = _LEARN.search(body)
        if match is None or match.start() < 3:
            return
        prefix = body[: match.start()]
        if (
            prefix.isspace()
            or len(prefix) > 200
            or prefix.rstrip().endswith(("traceback :", "Original", "|", "+", '"'))
        ):
            return
        if "Exception Group" in prefix or "│" in prefix:
            return
        if match.group().startswith("Traceback"):
            self._known.setdefault(_DIGITS.sub("0", prefix), 0)

    def strip(self, line: Line) -> None:
        """Take a learned prefix off; its text without digits names the writer."""
        for shape in self._known:
            if line.body[:1] != shape[:1] and not (shape[:1] == "0" and line.body[:1].isdigit()):
                continue
            pattern = _shape(shape)
            if (match := pattern.match(line.body)) is not None:
                if not line.stream:
                    line.stream = (
                        f"~{match.group().strip()[-60:]}"
                        if _DIGITS.search(shape) is None
                        else "~" + shape.strip()[-40:]
                    )
                line.body = line.body[match.end() :]
                return

    def __bool__(self) -> bool:
        return bool(self._known)


_SHAPES: dict[str, re.Pattern[str]] = {}


def _shape(shape: str) -> re.Pattern[str]:
    if shape not in _SHAPES:
        if len(_SHAPES) > 500:
            _SHAPES.clear()
        bare = shape.rstrip(" ")
        tail = len(shape) - len(bare)
        _SHAPES[shape] = re.compile(
            r"\d+".join(re.escape(p) for p in bare.split("0")) + (f" {{0,{tail}}}" if tail else "")
        )
    return _SHAPES[shape]


def strip_compose(lines: list[Line]) -> None:
    """docker compose and pm2 style `name-1  | text`, where most lines have it."""
    found = [(line, _COMPOSE.match(line.body)) for line in lines]
    hits = [(line, m) for line, m in found if m is not None]
    if len(hits) >= 2 and len(hits) * 2 >= len([line for line in lines if line.body.strip()]):
        for line, m in hits:
            line.stream = line.stream or m["who"]
            line.body = line.body[m.end() :]
