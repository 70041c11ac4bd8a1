"""The table of splits: what each would do, which one runs, which one is best, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_ops.balance import Row, Split
from dflash_ops.view.text import DASH, clean, duration, ktok, percent


@dataclass(frozen=True)
class Shown:
    """What the table is drawn of. `measured` = block tokens a second of what runs; `why` = one sentence."""

    job: str
    host: str
    current: Split
    rows: Sequence[Row]
    best: Split | None
    asked: Split | None
    measured: float | None
    why: str
    notes: Sequence[str] = ()


def render(shown: Shown) -> RenderableType:
    """The table of splits (80 columns), why some are refused, and what limits; the best one is green."""
    title = Text.assemble((clean(shown.job), "bold"), f" on {clean(shown.host)}: {shown.current} (targets + drafters)")
    if shown.measured is not None:
        title.append(f", {ktok(shown.measured)} block Ktok/s measured")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bright_black")
    for head, justify in _COLUMNS:
        table.add_column(head, justify=justify, no_wrap=True)
    for row in shown.rows:
        table.add_row(*_cells(row, shown), style="green" if row.split == shown.best else "")
    parts: list[RenderableType] = [title, Text(""), table, Text("")]
    parts += [Text(f"{row.split} is refused: {clean(row.refused)}") for row in shown.rows if row.refused]
    parts += [Text(f"{row.split}: {clean(row.memory.text)}") for row in shown.rows if _doubtful(row)]
    parts += [Text(clean(shown.why), "bold")] if shown.why else []
    parts += [Text(f"Note: {clean(note)}.", "bright_black") for note in shown.notes]
    return Group(*parts)


_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("split", "right"), ("", "left"), ("Ktok/s", "right"), ("interval", "right"), ("targets\nbusy", "right"),
    ("drafters\nbusy", "right"), ("left", "right"), ("limited\nby", "left"),
)  # fmt: skip


def _doubtful(row: Row) -> bool:
    """Whether something is to be said of the memory of a split that is not refused."""
    return row.refused is None and row.memory.state == "no"


def _cells(row: Row, shown: Shown) -> list[Text]:
    found = row.prediction
    named = (("now", shown.current), ("best", shown.best), ("asked", shown.asked))
    marks = ", ".join(word for word, split in named if split == row.split)
    first = [Text(str(row.split)), Text(marks, "bold")]
    if found is None:
        return [*first, *(Text(DASH, "bright_black") for _ in range(5)), Text("refused", "yellow")]
    return [
        *first,
        Text(ktok(found.block_tok_s)),
        Text(f"{ktok(found.low)}-{ktok(found.high)}"),
        Text(percent(found.target_busy)),
        Text(percent(found.drafter_busy)),
        Text(duration(found.eta_s)),
        Text(found.limit),
    ]
