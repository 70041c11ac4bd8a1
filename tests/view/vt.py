"""A terminal that only understands what the watch writes, and counts it: anything else is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rich.cells import cell_len

_TOKEN = re.compile(r"\x1b\[([?]?[0-9;]*)([A-Za-z])|\x1b|([^\x1b])", re.DOTALL)
Cell = tuple[str, str]
BLANK: Cell = (" ", "")


@dataclass
class Redraw:
    """What one redraw (from begin to end of the synchronised output) came to."""

    written: int = 0
    changed: int = 0
    cleared: bool = False
    blank_after: bool = False


@dataclass
class Screen:
    """Cells as (character, style); the second cell of a wide character is empty."""

    width: int
    height: int
    rows: list[list[Cell]] = field(default_factory=list)
    redraws: list[Redraw] = field(default_factory=list)
    modes: set[str] = field(default_factory=set)
    _at: tuple[int, int] = (0, 0)
    _style: str = ""
    _open: tuple[Redraw, list[list[Cell]]] | None = None
    _rest: str = ""

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows = [[BLANK] * self.width for _ in range(self.height)]

    @property
    def text(self) -> str:
        return "\n".join("".join(c for c, _ in row).rstrip() for row in self.rows)

    def feed(self, data: str) -> None:
        data, self._rest = self._rest + data, ""
        at = 0
        while at < len(data):
            match = _TOKEN.match(data, at)
            assert match is not None
            if match.group() == "\x1b":
                if len(data) - at < 16:
                    self._rest = data[at:]  # a sequence that is not here in full
                    return
                raise AssertionError(f"unknown escape {data[at : at + 12]!r}")
            if match.group(3) is not None:
                self._put(match.group(3))
            else:
                self._control(match.group(1), match.group(2))
            at = match.end()

    def _put(self, char: str) -> None:
        assert char.isprintable(), f"control character {char!r}"
        x, y = self._at
        wide = cell_len(char)
        assert x + wide <= self.width and y < self.height, f"{char!r} at {x},{y} is beyond the screen"
        for n in range(wide):
            self.rows[y][x + n] = (char if n == 0 else "", self._style)
        self._at = (x + wide, y)
        if self._open is not None:
            self._open[0].written += wide

    def _control(self, args: str, name: str) -> None:
        if name == "m":
            self._style = "" if args in ("", "0") else f"{self._style};{args}"
        elif name == "H":
            y, x = (int(n or 1) for n in (args.split(";") if args else ("1", "1")))
            self._at = (x - 1, y - 1)
        elif name == "J" and args == "2":
            self.clear()
            if self._open is not None:
                self._open[0].cleared = True
        elif name == "h" and args == "?2026":
            self._open = (Redraw(), [list(row) for row in self.rows])
        elif name == "l" and args == "?2026":
            assert self._open is not None
            redraw, before = self._open
            redraw.changed = sum(
                a != b for old, new in zip(before, self.rows, strict=True) for a, b in zip(old, new, strict=True)
            )
            redraw.blank_after = not self.text.strip()
            self.redraws.append(redraw)
            self._open = None
        elif name in "hl" and args.startswith("?"):
            (self.modes.add if name == "h" else self.modes.discard)(args)
        else:
            raise AssertionError(f"unknown control {args!r} {name!r}")
