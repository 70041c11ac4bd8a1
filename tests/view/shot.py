"""A picture of a real watch, for the documents: what tmux's pipe-pane recorded of it, as SVG.

tmux pipe-pane -t PANE 'cat > raw'; tmux resize-window -t PANE -x 100 -y 30    # a new size is drawn anew, whole
python tests/view/shot.py raw 100x30 docs/images/watch.svg --title "dflash-ops status main --watch"
"""

from __future__ import annotations

import argparse
import io
import re
from itertools import groupby
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from vt import Screen

_WHOLE = "\x1b[?2026h\x1b[0m\x1b[H\x1b[2J"


def last_screen(raw: str, width: int, height: int) -> list[Text]:
    """What stood there at the end, styles and all."""
    screen = Screen(width, height)
    begin = raw.rindex(_WHOLE)
    end = raw.rindex("\x1b[?2026l") + len("\x1b[?2026l")
    screen.feed(raw[begin:end])
    lines = []
    for row in screen.rows:
        line = Text()
        for style, run in groupby(row, lambda cell: cell[1]):
            line.append_text(Text.from_ansi(f"\x1b[{style.strip(';') or 0}m{''.join(c for c, _ in run)}\x1b[0m"))
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    parser.add_argument("size", metavar="WIDTHxHEIGHT")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--title", default="dflash-ops status --watch")
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in last_screen(args.raw.read_bytes().decode("utf-8", "ignore"), width, height):
        console.print(line, soft_wrap=True)
    # rich's own form fetches a font from elsewhere; the reader's own will do.
    own = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
        "Fira Code", "monospace"
    )
    console.save_svg(str(args.svg), title=args.title, code_format=own, unique_id="watch")


if __name__ == "__main__":
    main()
