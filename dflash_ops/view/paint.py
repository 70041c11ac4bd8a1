"""From one screen to the next with as little writing as can be: only the cells that changed.

The rule here: the screen is never cleared between two redraws. A line of which nothing changed is not touched; of one
that changed, the runs of cells that differ are written, each after one movement of the cursor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from dflash_ops.view.watch_draw import cells

#: Equal cells between two changed runs that are written over rather than jumped over: a jump costs about as much.
JUMP = 4

#: Terminals that know it show what stands between these two at once; the others ignore them.
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"

Cell = tuple[str, Style | None]
#: A cell that the one before it covers.
COVERED: Cell = ("", None)
_BLANK: Cell = (" ", None)

#: Characters of one cell each, which is nearly all that is drawn.
_NARROW = re.compile(r"[ -~·±–…\u2500-\u25ff]*\Z")


@dataclass
class Painter:
    """Knows what is on the screen, and writes what has to change.

    Args:
        colour: None: bold and reverse at most. width, height: of the screen, in cells.

    Attributes:
        written: cells that were written. changed: cells that differed. draws: redraws that wrote something.
    """

    width: int
    height: int
    colour: ColorSystem | None = None
    written: int = 0
    changed: int = 0
    draws: int = 0
    _shown: list[list[Cell]] | None = None
    _lines: list[tuple[Text, list[Cell]]] = field(default_factory=list)
    _styles: dict[Style, Style] = field(default_factory=dict)
    _console: Console = field(default_factory=lambda: Console(width=10_000, color_system=None, highlight=False))

    def resize(self, width: int, height: int) -> None:
        """Another size: the terminal has moved things about, so the next screen is written whole."""
        self.width, self.height = width, height
        self._shown, self._lines = None, []

    def paint(self, lines: Sequence[Text]) -> str:
        """What brings these lines to the screen; empty where all of them stand there already."""
        rows = [
            old[1] if old is not None and old[0] == line and old[0].style == line.style else self.cells(line)
            for line, old in zip_longest(lines[: self.height], self._lines[: len(lines)])
        ]
        self._lines = list(zip(lines, rows, strict=False))
        rows += [[_BLANK] * self.width] * (self.height - len(rows))
        out: list[str] = []
        if self._shown is None:
            out.append("\x1b[0m\x1b[H\x1b[2J")
            self._shown = [[_BLANK] * self.width for _ in range(self.height)]
        for y, (old, new) in enumerate(zip(self._shown, rows, strict=True)):
            for start, end in self._runs(old, new):
                out.append(f"\x1b[{y + 1};{start + 1}H")
                out.append(self._written(new[start:end]))
                self.written += end - start
        self._shown = rows
        if not out:
            return ""
        self.draws += 1
        return f"{BEGIN}{''.join(out)}{END}"

    def cells(self, line: Text) -> list[Cell]:
        """One line as cells, exactly as many as the screen is wide."""
        row: list[Cell] = []
        base = self._console.get_style(line.style)
        for segment in line.render(self._console, end=""):
            # A text of one style alone is rendered without it.
            style = self._plain(base if segment.style is None else segment.style) or None
            if style is not None:
                style = self._styles.setdefault(style, style)  # one object each: comparing cells is then cheap
            text = segment.text
            if _NARROW.match(text):
                row += [(c, style) for c in text]
                continue
            for c in text:
                wide = cells(c)
                if wide == 0 or len(row) + wide > self.width:
                    continue
                row.append((c, style))
                row += [COVERED] * (wide - 1)
        return row[: self.width] + [_BLANK] * (self.width - len(row))

    def _plain(self, style: Style) -> Style:
        return style if self.colour is not None else style.without_color

    def _runs(self, old: list[Cell], new: list[Cell]) -> list[tuple[int, int]]:
        """Where the rows differ, from and up to; never half of a wide character."""
        if old is new:
            return []
        runs: list[tuple[int, int]] = []
        for x in range(self.width):
            if old[x] is new[x] or old[x] == new[x]:
                continue
            self.changed += 1
            if runs and x - runs[-1][1] <= JUMP:
                runs[-1] = (runs[-1][0], x + 1)
            else:
                runs.append((x, x + 1))
        whole: list[tuple[int, int]] = []
        for start, end in runs:
            # A cell that is half of a wide character, now or before, is written with its other half.
            while start > 0 and COVERED in (old[start], new[start]):
                start -= 1
            while end < self.width and COVERED in (old[end], new[end]):
                end += 1
            if whole and start <= whole[-1][1]:
                whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
            else:
                whole.append((start, end))
        return whole

    def _written(self, part: Sequence[Cell]) -> str:
        out: list[str] = []
        at = 0
        while at < len(part):
            style = part[at][1]
            end = at
            while end < len(part) and (part[end][1] == style or part[end] is COVERED):
                end += 1
            text = "".join(c for c, _ in part[at:end])
            system = self.colour if self.colour is not None else ColorSystem.STANDARD
            out.append(style.render(text, color_system=system) if style else text)
            at = end
        return "".join(out)
