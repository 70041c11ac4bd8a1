"""The table of splits: what each would do, which one runs, which one is best, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflash_ops.balance import Row, Split
from dflash_ops.view.text import clean, duration, ktok, percent


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
    exact: bool = True


def render(shown: Shown) -> RenderableType:
    """The table of splits, and the sentence under it; the best one stands in green, refused ones with their reason."""
    title = Text.assemble((clean(shown.job), "bold"), f" on {clean(shown.host)}: {shown.current} (targets + drafters)")
    if shown.measured is not None:
        title.append(f", {ktok(shown.measured)} block Ktok/s measured")
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for head, right in _COLUMNS:
        table.add_column(head, justify="right" if right else "left", no_wrap=head != "limited by", overflow="fold")
    for row in shown.rows:
        table.add_row(*_cells(row, shown), style="green" if row.split == shown.best else "")
    parts: list[RenderableType] = [title, Text(""), table, Text("")]
    parts += [Text(clean(shown.why))] if shown.why else []
    if not shown.exact:
        parts.append(Text("Stage times are worked out from shares of time: the intervals are wide.", "bright_black"))
    return Group(*parts)


_COLUMNS = (
    ("split", True), ("block Ktok/s", True), ("from - to", True), ("targets busy", True), ("drafters busy", True),
    ("time left", True), ("limited by", False), ("", False),
)  # fmt: skip


def _cells(row: Row, shown: Shown) -> list[Text]:
    found = row.prediction
    marks = [
        word
        for word, split in (("now", shown.current), ("best", shown.best), ("asked for", shown.asked))
        if split == row.split
    ]
    mark = Text(", ".join(marks), "bold" if marks else "")
    if found is None:
        return [Text(str(row.split)), *(Text("–", "bright_black") for _ in range(5)),
                Text(f"refused: {clean(row.refused or '')}", "yellow"), mark]  # fmt: skip
    memory = "" if row.memory.state != "unknown" else " (memory not known)"
    return [
        Text(str(row.split)),
        Text(ktok(found.block_tok_s)),
        Text(f"{ktok(found.low)} - {ktok(found.high)}"),
        Text(percent(found.target_busy)),
        Text(percent(found.drafter_busy)),
        Text(duration(found.eta_s)),
        Text(f"{found.limit}{memory}"),
        mark,
    ]
