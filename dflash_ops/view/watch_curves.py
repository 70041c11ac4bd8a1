"""Loss, quality and rates of the watch: the number, and its curve over the attempt where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.text import Text

from dflash_ops.contracts import Progress, Snapshot
from dflash_ops.view.watch_draw import DIM, Pen, chart, ktok, number, sparkline
from dflash_ops.view.watch_fit import Block, Form, Later, block

#: Lines of a curve on a screen that has room for it, and values from which on it is worth them.
TALL, WORTH = (9, 5), 12

_LABEL = 9


def curves(s: Snapshot, p: Progress, width: int, pen: Pen) -> Iterator[Block]:
    """A line each, with a taller curve where there is room."""
    bundled = p.ring_slots is not None or p.block_tok_s is not None or p.ctx_tok_s is not None
    if p.loss is not None or bundled:
        yield _quality("loss", p.loss, s.curves.get("loss", ()), 4, width, pen, (8, 80))
    if p.tau is not None or bundled:
        yield _quality("tau", p.tau, s.curves.get("tau", ()), 2, width, pen, (6, 78))
    if bundled:
        yield _rate("block", "block_tok_s", p.block_tok_s, s, width, pen, (7, 79))
        yield _rate("context", "ctx_tok_s", p.ctx_tok_s, s, width, pen, (5, 55))


def _quality(
    label: str, value: float | None, curve: Sequence[float], digits: int, width: int, pen: Pen, ranks: tuple[int, int]
) -> Block:
    bad = value is not None and not math.isfinite(value)
    head = Text.assemble((f"{label:<{_LABEL}}", DIM), (number(value, digits, 8, pen), "bold red" if bad else ""))
    if bad:
        head.append("  not a finite number", "bold red")
    return _drawn(head, curve, lambda v: number(v, digits, 8, pen).strip(), width, pen, ranks)


def _rate(
    label: str, key: str, value: float | None, s: Snapshot, width: int, pen: Pen, ranks: tuple[int, int]
) -> Block:
    head = Text.assemble((f"{label:<{_LABEL}}", DIM), f"{ktok(value, pen):>8}")
    head.append(" Ktok/s" if width >= 60 else "", DIM)
    if width >= 60:
        for name, end in (("median", "_median"), ("mean", "_mean")):
            head.append(f"  {ktok(s.rates.get(key + end), pen)} ")
            head.append(name, DIM)
    return _drawn(head, s.curves.get(key, ()), lambda v: ktok(v, pen).strip(), width, pen, ranks)


def _drawn(
    head: Text, curve: Sequence[float], say: Callable[[float], str], width: int, pen: Pen, ranks: tuple[int, int]
) -> Block:
    """The line with a small curve; and with a tall one below, between its lowest and highest value."""
    finite = [v for v in curve if math.isfinite(v)]
    room = width - head.cell_len - 2
    if len(finite) < 2 or room < 8:
        return block((ranks[1], [head]))
    low, high = say(min(finite)), say(max(finite))
    line = head.copy()
    ends = f" {low} to {high}"
    small = min(60, room - (24 if room >= 40 else 0))
    line.append("  ")
    line.append_text(sparkline(curve, small, pen))
    if room >= 40:
        line.append(ends, DIM)
    forms: list[Form] = []
    cells = width - _LABEL - 9
    if cells >= 40 and len(finite) >= WORTH:
        for rows in TALL:
            tall = Later(rows + 1, partial(_tall, head, curve, (low, high), cells, rows, pen))
            forms.append((ranks[0] - 4 * (rows == TALL[0]), tall))
    return block(*forms, (ranks[1], [line]))


def _tall(head: Text, curve: Sequence[float], ends: tuple[str, str], width: int, rows: int, pen: Pen) -> list[Text]:
    """The line, and the curve below it in so many lines."""
    low, high = ends
    lines = [Text.assemble(head, (f"   {low} to {high} over this attempt", DIM))]
    for n, drawn in enumerate(chart(curve, width, rows, pen)):
        mark = high if n == 0 else low if n == rows - 1 else ""
        lines.append(Text.assemble((f"{mark:>{_LABEL + 7}} ", DIM), drawn))
    return lines
