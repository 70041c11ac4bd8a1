"""Curves, stacked shares and a time line as SVG, by nothing but arithmetic; colours are classes of the page. Pure.

The rule here: a line is drawn only where there are numbers on both sides; what lies outside the drawn range is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 12.0, 20.0, 26.0

#: Numbers beyond are drawn as this one: differences of larger ones are no numbers any more.
_FAR = 1e150

#: Numbers that are nearer to each other are drawn as one: nothing may be divided by their difference.
_NEAR = 1e-200

#: Marks of one kind that are drawn in one chart; of more, evenly chosen ones.
_MARKS = 120


@dataclass(frozen=True)
class At:
    """A point of a curve: mean, least and most of the lines that it stands for."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """`parts`: stretches of points that are joined. `style`: 1 to 4, the colour."""

    name: str
    parts: Sequence[Sequence[At]]
    style: int = 1


@dataclass(frozen=True)
class Mark:
    """A vertical line or a small sign at `x`. `kind`: attempt, life, checkpoint, incident, odd."""

    x: float
    kind: str
    text: str


class Scale:
    """From numbers to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        low, high = max(low, -_FAR), min(high, _FAR)
        if high - low < _NEAR:
            pad = max(abs(low) * 0.05, _NEAR) if abs(low) > _NEAR else 1.0
            low, high = low - pad, high + pad
        self.low, self.high, self._begin = low, high, begin
        self._factor = (end - begin) / (high - low)

    def __call__(self, value: float) -> float:
        return self._begin + (min(max(value, -_FAR), _FAR) - self.low) * self._factor


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    span = high - low
    if not _NEAR <= span < math.inf:
        return [low]
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)][:20]


def number(value: float) -> str:
    """As on an axis: `1.5k`, `0.002`, `3.2e-05`."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * 0.9999:
            return f"{value / limit:.4g}{letter}" if size < 1e15 else f"{value:.2g}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.2g}"


def chart(
    title: str,
    curves: Sequence[Curve],
    xs: tuple[float, float],
    marks: Sequence[Mark] = (),
    *,
    whole: bool = False,
    x_text: Callable[[float], str] = number,
) -> tuple[str, int]:
    """One chart, and how many points lie outside of what is drawn.

    Args:
        whole: all is drawn; else a few points that are far off do not flatten the rest.
    """
    points = [p for c in curves for part in c.parts for p in part]
    low, high, outside = _range([p.y for p in points], whole)
    x, y = Scale(*xs, LEFT, WIDTH - RIGHT), Scale(low, high, HEIGHT - BOTTOM, TOP)
    ident = "clip-" + "".join(c for c in title.lower() if c.isascii() and c.isalnum())
    out = [_open(title, WIDTH, HEIGHT), f'<clipPath id="{ident}"><rect x="{LEFT:g}" y="{TOP:g}" '
           f'width="{WIDTH - LEFT - RIGHT:g}" height="{HEIGHT - TOP - BOTTOM:g}"/></clipPath>']  # fmt: skip
    out += _grid(x, y, x_text)
    out.append(f'<g clip-path="url(#{ident})">')
    for curve in curves:
        out += [_band(part, x, y, curve.style) for part in curve.parts if any(p.high > p.low for p in part)]
    for curve in curves:
        out += [_line(part, x, y, curve.style) for part in curve.parts if part]
    out.append("</g>")
    out += _signs(marks, x)
    names = [c for c in curves if len(curves) > 1 and any(c.parts)]
    out += [_words(f"legend c{c.style}", LEFT + 6 + 150 * at, TOP - 7, c.name) for at, c in enumerate(names)]
    out.append("</svg>")
    return "\n".join(out), outside


def _range(values: Sequence[float], whole: bool) -> tuple[float, float, int]:
    """What is drawn: all, unless a few values are so far off that the others would be one flat line."""
    if not values:
        return 0.0, 1.0, 0
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    edge = max(1, len(ordered) // 50)
    inner_low, inner_high = ordered[min(edge, len(ordered) - 1)], ordered[max(0, len(ordered) - 1 - edge)]
    span = inner_high - inner_low
    if not whole and len(ordered) >= 20 and span > 0:
        low = max(low, inner_low - 3 * span)
        high = min(high, inner_high + 3 * span)
    outside = sum(not low <= v <= high for v in values)
    pad = (high - low) * 0.04
    return low - pad, high + pad, outside


def _open(title: str, width: float, height: float) -> str:
    label = plain(title)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}"><title>{label}</title>'


def plain(text: str) -> str:
    """Any text for html and SVG: escaped, and what cannot be printed replaced. The one place that does it."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "�" for c in text), quote=True)


def _words(style: str, x: float, y: float, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{plain(text)}</text>'


def _stroke(style: str, x: float, top: float, bottom: float, told: str = "") -> str:
    """A vertical line; `told` is shown where a pointer rests on it."""
    return f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}">{_told(told)}</line>'


def _level(style: str, y: float) -> str:
    """A line across the plot."""
    return f'<line class="{style}" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _box(style: str, x: float, y: float, width: float, height: float, told: str = "") -> str:
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2">'
        f"{_told(told)}</rect>"
    )


def _told(text: str) -> str:
    return f"<title>{plain(text)}</title>" if text else ""


def _grid(x: Scale, y: Scale, x_text: Callable[[float], str]) -> list[str]:
    out = []
    for value in ticks(y.low, y.high):
        out += [_level("grid", y(value)), _words("tick end", LEFT - 6, y(value) + 3.5, number(value))]
    below = HEIGHT - BOTTOM + 16
    out += [_words("tick middle", x(value), below, x_text(value)) for value in ticks(x.low, x.high, 8)]
    return [*out, _level("axis", HEIGHT - BOTTOM)]


def _line(part: Sequence[At], x: Scale, y: Scale, style: int) -> str:
    if len(part) == 1:
        return f'<circle class="dot c{style}" cx="{x(part[0].x):.1f}" cy="{_in(y(part[0].y))}" r="1.8"/>'
    path = " ".join(f"{x(p.x):.1f},{_in(y(p.y))}" for p in part)
    return f'<polyline class="line c{style}" points="{path}"/>'


def _band(part: Sequence[At], x: Scale, y: Scale, style: int) -> str:
    there = [f"{x(p.x):.1f},{_in(y(p.high))}" for p in part]
    back = [f"{x(p.x):.1f},{_in(y(p.low))}" for p in reversed(part)]
    return f'<polygon class="band c{style}" points="{" ".join(there + back)}"/>'


def _in(pixels: float) -> str:
    """A coordinate; one that is far outside stays a number that every reader of SVG can hold."""
    return f"{min(max(pixels, -9999.0), 9999.0):.1f}"


def _signs(marks: Sequence[Mark], x: Scale) -> list[str]:
    out, bottom = [], HEIGHT - BOTTOM
    for kind in ("checkpoint", "life", "attempt", "odd", "incident"):
        for mark in _some([m for m in marks if m.kind == kind and x.low <= m.x <= x.high]):
            at = x(mark.x)
            if kind == "incident":
                out.append(_arrow(at, TOP + 9, mark.text))
            elif kind == "odd":
                out.append(f'<text class="odd middle" x="{at:.1f}" y="{bottom - 8:g}">×{_told(mark.text)}</text>')
            else:
                out.append(_stroke(kind, at, bottom - 6 if kind == "checkpoint" else TOP, bottom, mark.text))
    return out


def _some(marks: Sequence[Mark]) -> Sequence[Mark]:
    return marks[:: max(1, -(-len(marks) // _MARKS))]


def _arrow(x: float, y: float, told: str) -> str:
    return f'<path class="incident" d="M{x:.1f} {y:g} l-5 -9 h10 z">{_told(told)}</path>'


@dataclass(frozen=True)
class Slab:
    """From `begin` to `end` these shares, 0 to 1, from the bottom to the top."""

    begin: float
    end: float
    shares: Sequence[float]


def shares(
    title: str, slabs: Sequence[Slab], xs: tuple[float, float], *, width: float = 372.0, height: float = 92.0
) -> str:
    """Shares of one worker's time, stacked; where there is no slab nothing is known."""
    side, top, bottom = 8.0, 18.0, 4.0
    x = Scale(*xs, side, width - side)
    y = Scale(0.0, 1.0, height - bottom, top)
    out = [_open(title, width, height), _words("name", side, 12.0, title)]
    out.append(_box("empty", side, top, width - 2 * side, height - top - bottom))
    for layer in range(max((len(s.shares) for s in slabs), default=0)):
        paths = []
        for slab in slabs:
            low = min(1.0, sum(slab.shares[:layer]))
            high = min(1.0, low + slab.shares[layer])
            if high > low:
                a, b = x(slab.begin), max(x(slab.end), x(slab.begin) + 0.4)
                paths.append(f"M{a:.1f} {y(low):.1f}H{b:.1f}V{y(high):.1f}H{a:.1f}z")
        if paths:
            out.append(f'<path class="share s{layer + 1}" d="{"".join(paths)}"/>')
    return "\n".join([*out, "</svg>"])


@dataclass(frozen=True)
class Bar:
    """A row's bar from `begin` to `end`; `style` is a class."""

    begin: float
    end: float
    style: str
    text: str


def timeline(
    title: str, bars: Sequence[Bar], marks: Sequence[Mark], xs: tuple[float, float], x_text: Callable[[float], str]
) -> str:
    """Attempts as bars, above them what happened, below them checkpoints and lives, by time."""
    height, top, thick = 96.0, 44.0, 18.0
    x = Scale(*xs, LEFT, WIDTH - RIGHT)
    out = [_open(title, WIDTH, height)]
    for bar in bars:
        a, b = x(bar.begin), max(x(bar.end), x(bar.begin) + 1.5)
        out.append(_box(f"bar {bar.style}", a, top, b - a, thick, bar.text))
        name = bar.text.split(",", 1)[0]
        if b - a > 7.0 * len(name):
            out.append(_words("on middle", (a + b) / 2, top + 13, name))
    for kind in ("checkpoint", "life", "incident"):
        for mark in _some([m for m in marks if m.kind == kind]):
            if kind == "incident":
                out.append(_arrow(x(mark.x), top - 2, mark.text))
                out.append(_words("tick middle", x(mark.x), top - 15, mark.text.split(":", 1)[0]))
            else:
                out.append(_stroke(kind, x(mark.x), top + thick, top + thick + 7, mark.text))
    out += [_words("tick middle", x(value), height - 8, x_text(value)) for value in ticks(x.low, x.high, 8)]
    return "\n".join([*out, "</svg>"])
