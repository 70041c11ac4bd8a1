"""A screen of blocks: all that fits, and what does not is left out in order of importance.

Each block has forms from its fullest to its shortest, each with the rank for which it stands. While the screen is too
small, the form of the lowest rank gives way to the next one of its block. The last form of a block never does: an empty
one means that the block may go altogether.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from dflash_ops.view.watch_draw import Pen, fitted

#: The rank of a form that stays.
ALWAYS = 1000


@dataclass(frozen=True)
class Later:
    """Lines whose number is known, and which are only made where they are shown."""

    count: int
    make: Callable[[], Sequence[Text]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Text]:
        return iter(self.make())


Form = tuple[int, Sequence[Text] | Later]


@dataclass(frozen=True)
class Block:
    """Lines that stand together.

    Attributes:
        forms: (rank, lines) from the fullest to the shortest.
        column: 0 over both columns, 1 left, 2 right, where the screen is wide enough for two.
    """

    forms: Sequence[Form]
    column: int = 1


def block(*forms: Form, stays: bool = False, column: int = 1) -> Block:
    """A block that goes when its last form gives way, unless it `stays`."""
    return Block(list(forms) if stays else [*forms, (ALWAYS, ())], column)


def arrange(blocks: Iterable[Block], height: int) -> list[Text]:
    """The lines of all blocks, at most `height` of them where the shortest forms allow it."""
    blocks = list(blocks)
    chosen = [0] * len(blocks)

    def lines(i: int) -> int:
        return len(blocks[i].forms[chosen[i]][1])

    total = sum(map(lines, range(len(blocks))))
    while total > height:
        able = [i for i, b in enumerate(blocks) if chosen[i] < len(b.forms) - 1]
        if not able:
            break
        least = min(able, key=lambda i: (blocks[i].forms[chosen[i]][0], -i))
        total -= lines(least)
        chosen[least] += 1
        total += lines(least)
    return [line for b, c in zip(blocks, chosen, strict=True) for line in b.forms[c][1]]


def filled(lines: Sequence[Text], width: int, height: int, pen: Pen) -> list[Text]:
    """Exactly `height` lines of exactly `width` cells."""
    shown = [fitted(line, width, pen) for line in lines[:height]]
    return shown + [Text(" " * width) for _ in range(height - len(shown))]


def beside(left: Sequence[Text], right: Sequence[Text], width: int, gap: int, pen: Pen) -> list[Text]:
    """Two columns of lines side by side, the left one `width` cells wide."""
    out = []
    for n in range(max(len(left), len(right))):
        a = fitted(left[n] if n < len(left) else Text(), width, pen)
        out.append(Text.assemble(a, " " * gap, right[n] if n < len(right) else Text()))
    return out
