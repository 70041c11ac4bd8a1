"""Numbers and times as people read them. A value that is not known is a dash, never 0."""

from __future__ import annotations

import math

DASH = "–"


def duration(seconds: float | None) -> str:
    """`4 s`, `12 min`, `3 h 05 min`, `2 d 4 h`; a negative one (clocks that differ) is `0 s`, no number a dash."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def age(seconds: float | None) -> str:
    """How old the data is: `0.4 s`, then as `duration`."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    return f"{max(0.0, seconds):.1f} s" if seconds < 10 else duration(seconds)


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.0f} %"


def fixed(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def ktok(value: float | None) -> str:
    """Tokens a second -> thousands: `13.5`, `0.42`, `120`."""
    if value is None:
        return DASH
    thousands = value / 1000
    return f"{thousands:.0f}" if thousands >= 100 else f"{thousands:.1f}" if thousands >= 1 else f"{thousands:.2f}"


def size(count: int) -> str:
    """Bytes: `512 B`, `3.1 MiB`, `20.0 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def clean(text: str) -> str:
    """A foreign text on one line: control characters would move the cursor or change colours."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip()


def bar(share: float | None, width: int) -> str:
    """A bar of `width` cells in eighths of a cell; unknown is an empty one."""
    eighths = 0 if share is None else round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width)
