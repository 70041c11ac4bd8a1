"""What the watch is drawn with: bars, sparklines, stacked shares, fixed-width numbers; each with an ASCII form.

The rules here: a number has the same width whatever its value, so that nothing beside it moves; a share that is not
known is an empty bar and a dash; every character is one that terminals agree about the width of.
"""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from dflash_ops.contracts import State
from dflash_ops.view.status import SHARES, STYLES

DIM = "bright_black"


@dataclass(frozen=True)
class Pen:
    """The characters of one kind of terminal.

    Attributes:
        parts: an empty cell, then a cell filled by one more step each, a full one last. levels: as `parts`, of a curve.
        shares: compute, copy, sync, wait. gap: the part of a curve that is not known.
    """

    dash: str
    dot: str
    more: str
    plus: str
    parts: str
    levels: str
    shares: str
    shade: str
    states: Mapping[State, str] = field(default_factory=dict)
    ascii: bool = False


UNICODE = Pen(
    dash="–", dot="·", more="…", plus="±", parts="·▏▎▍▌▋▊▉█", levels="▁▂▃▄▅▆▇█", shade="░",
    shares="".join(mark for _, mark, _ in SHARES),
    states={state: mark for state, (mark, _) in STYLES.items()},
)  # fmt: skip
ASCII = Pen(
    dash="-", dot="-", more="~", plus="+-", parts=".#", levels="_.-=+*%#", shares="#=~.", shade=".", ascii=True,
    states={
        State.LOADING: "o", State.COMPILING: "o", State.STEPPING: ">", State.SLOW: "~", State.HUNG: "!",
        State.CRASHED: "X", State.FINISHED: "+", State.STOPPED: "#", State.UNREACHABLE: "?", State.UNKNOWN: "?",
    },
)  # fmt: skip

#: The parts of a worker's time, in the order of `Pen.shares`, and their colours.
SHARE_NAMES = tuple(name for name, _, _ in SHARES)
SHARE_STYLES = tuple(style for _, _, style in SHARES)


def bar(share: float | None, width: int, pen: Pen, style: str = "green") -> Text:
    """A bar of `width` cells; what is not known is empty. It is full only where all is done."""
    steps = len(pen.parts) - 1
    known = share is not None and math.isfinite(share)
    filled = min(1.0, max(0.0, share or 0.0)) if known else 0.0
    full, part = divmod(int(filled * width * steps), steps)
    done = pen.parts[-1] * full + (pen.parts[part] if part else "")
    return Text.assemble((done, style), (pen.parts[0] * (width - len(done)), DIM))


def stacked(values: Sequence[float | None], width: int, pen: Pen) -> Text:
    """Shares side by side in `width` cells; each ends where the sum so far says, so that rounding adds nothing."""
    text, at, total = Text(), 0, 0.0
    for value, mark, style in zip(values, pen.shares, SHARE_STYLES, strict=True):
        total += min(1.0, max(0.0, value)) if value is not None and math.isfinite(value) else 0.0
        end = min(width, round(total * width))
        text.append(mark * (end - at), style)
        at = max(at, end)
    text.append(" " * (width - at))
    return text


def sparkline(values: Sequence[float], width: int, pen: Pen, style: str = "cyan") -> Text:
    """The curve in at most `width` cells, its newest value last, from its own lowest to its own highest.

    A value that is not finite is a gap. Fewer values than cells are drawn one a cell, padded on the right.
    """
    if width <= 0:
        return Text()
    cells = [mean(part) for part in _parts(values, width)]
    known = [v for v in cells if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    top = len(pen.levels) - 1
    drawn = "".join(" " if v is None else pen.levels[round(_share(v, low, high) * top)] for v in cells)
    return Text(drawn.ljust(width), style)


def chart(values: Sequence[float], width: int, rows: int, pen: Pen, style: str = "cyan") -> list[Text]:
    """The curve in `rows` lines of at most `width` cells, from its own lowest to its own highest."""
    cells = [mean(part) for part in _parts(values, width)]
    known = [v for v in cells if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    steps = len(pen.levels)
    heights = [0 if v is None else 1 + round(_share(v, low, high) * (rows * steps - 1)) for v in cells]
    lines = []
    for row in reversed(range(rows)):
        line = Text()
        parts = [height - row * steps for height in heights]
        for below, run in groupby(parts, lambda part: part > steps):
            drawn = [pen.shade if below else pen.levels[part - 1] if part > 0 else " " for part in run]
            line.append("".join(drawn), DIM if below else style)
        line.append(" " * (width - len(heights)))
        lines.append(line)
    return lines


def _parts(values: Sequence[float], width: int) -> list[Sequence[float]]:
    """`values` in at most `width` neighbouring groups, none empty."""
    count = min(width, len(values))
    return [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]


def _share(value: float, low: float, high: float) -> float:
    """Where between `low` and `high`; 0 where these are one. Halves, so that no difference is beyond a float."""
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0


def mean(values: Iterable[float | None]) -> float | None:
    """Of what is known and finite; None where nothing is."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(v / len(finite) for v in finite) if finite else None


def number(value: float | None, digits: int, width: int, pen: Pen) -> str:
    """`value` with so many digits, right in `width`; one too large for it has fewer digits, then an exponent."""
    if value is None:
        return pen.dash.rjust(width)
    if not math.isfinite(value):
        return ("NaN" if math.isnan(value) else "inf" if value > 0 else "-inf").rjust(width)
    for fewer in range(digits, -1, -1):
        if len(said := f"{value:.{fewer}f}") <= width:
            return said.rjust(width)
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e").rjust(width)


def ktok(value: float | None, pen: Pen) -> str:
    """Tokens a second in thousands, five wide: ` 13.5`, ` 0.42`, `  120`."""
    if value is None or not math.isfinite(value):
        return number(value, 0, 5, pen)
    thousands = value / 1000
    return number(thousands, 0 if thousands >= 100 else 1 if thousands >= 1 else 2, 5, pen)


def percent(share: float | None, pen: Pen, width: int = 3) -> str:
    """`  7`, `100`, without the sign; a dash where it is not known."""
    known = share is not None and math.isfinite(share)
    return number(100 * share if known and share is not None else None, 0, width, pen)


def gib(count: float | None, pen: Pen) -> str:
    """Bytes in GiB, four wide (` 118`), for cards; below 100 with one digit."""
    if count is None:
        return pen.dash.rjust(4)
    value = count / 2**30
    return number(value, 1 if value < 99.95 else 0, 4, pen)


def tame(text: str, pen: Pen = UNICODE) -> str:
    """A foreign text on one line, of characters whose width terminals agree about.

    Control characters become spaces. What has no width of its own (combining marks, joiners, selectors) is left out:
    what is left of an emoji's sequence is its parts. Without UTF-8 the rest that is not ASCII is `?`.
    """
    if text.isascii() and text.isprintable():
        return text.rstrip()
    kept = "".join(c if c.isprintable() else " " for c in text if unicodedata.category(c) not in _WIDTHLESS)
    return "".join(c if c.isascii() else "?" for c in kept).rstrip() if pen.ascii else kept.rstrip()


_WIDTHLESS = frozenset({"Mn", "Me", "Mc", "Cf"})


@lru_cache(4096)
def cells(text: str) -> int:
    return cell_len(text)


def clock(t: float) -> str:
    """The time of day by UTC, `19:37:30`; of one that no clock shows a dash."""
    return time.strftime("%H:%M:%S", time.gmtime(t)) if 0 <= t < 1e11 else "-"


def plainly(line: Text) -> Text:
    """The line for a terminal without UTF-8, whatever came in from elsewhere."""
    if line.plain.isascii():
        return line
    safe = "".join(_PLAIN.get(c, c if c.isascii() else "?" * cells(c)) for c in line.plain)
    if len(safe) != len(line.plain):  # styles would slip
        return Text(safe)
    return Text(safe, style=line.style, spans=line.spans)


_PLAIN = {"–": "-", "…": "~", "·": "-", "±": "~"}


def cut(text: str, width: int, pen: Pen) -> str:
    """`text` in at most `width` cells; what was cut ends with a sign of it."""
    if cells(text) <= width:
        return text
    kept, used = [], 0
    for c in text:
        if used + cells(c) > width - 1:
            break
        kept.append(c)
        used += cells(c)
    return "".join(kept) + pen.more if width > 0 else ""


def fitted(line: Text, width: int, pen: Pen) -> Text:
    """The line in exactly `width` cells: cut, or filled with spaces."""
    if line.cell_len > width:
        line = line.copy()
        line.truncate(max(0, width - 1))
        line.append(pen.more if width else "", DIM)
    if (room := width - line.cell_len) > 0:
        line = line.copy()
        line.append(" " * room)
    return line


def folded(text: str, width: int, rows: int, pen: Pen) -> list[str]:
    """`text` on at most `rows` lines of at most `width` cells, broken at spaces where one is near."""
    out: list[str] = []
    rest = text.strip()
    while rest and len(out) < rows:
        if cells(rest) <= width or len(out) == rows - 1:
            out.append(cut(rest, width, pen))
            return out
        head = cut(rest, width + 1, pen)[:-1]
        at = head.rfind(" ")
        head = head[:at] if at > len(head) * 2 // 3 else head
        head = head or rest[:1]
        out.append(head.rstrip())
        rest = rest[len(head) :].lstrip()
    return out
