"""Stages on a terminal: a spinner, a bar and the time for the one at work, a line with a mark for each that is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from dflash_ops.view.stages import Stage, Told
from dflash_ops.view.text import clean


class _Now(ProgressColumn):
    """What the stage says, asked at each drawing: rates and the time that is left go on between two words of it."""

    max_refresh = None

    def render(self, task: Task) -> Text:
        told: Told = task.fields["told"]
        return Text(clean(told.now()), overflow="ellipsis", no_wrap=True)


class _Bar(BarColumn):
    """The share that is done, where that is known."""

    def render(self, task: Task):  # type: ignore[no-untyped-def]  # rich's own private bar type
        told: Told = task.fields["told"]
        share = told.pace.share if told.pace is not None else None
        if share is None:
            return Text("")  # the spinner turns; the room is the text's
        task.total, task.completed = 1.0, share
        return super().render(task)


class Live:
    """Stages drawn by rich.

    Args:
        asked: whether a person is being asked something on this terminal: it is left alone meanwhile.
    """

    def __init__(self, console: Console, asked: Callable[[], bool] = lambda: False) -> None:
        self._console, self._asked = console, asked

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[Stage]:
        told = Told(name, text, time.monotonic)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<10}", markup=False),
            _Bar(bar_width=24),
            _Now(table_column=Column(ratio=1)),
            TimeElapsedColumn(),
        )
        progress = Progress(*columns, console=self._console, transient=True)
        progress.add_task(name, total=None, told=told)
        draw = progress.live.refresh
        progress.live.refresh = lambda: None if self._asked() else draw()  # type: ignore[method-assign]
        try:
            with progress:
                yield told
        except BaseException:
            self._line("✖", "bold red", told, told.text)
            raise
        self._line("✔", "bold green", told, told.kept())

    def _line(self, mark: str, style: str, told: Told, text: str) -> None:
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True, min_width=10)
        row.add_column()  # a long text is wrapped in its own column, and the seconds stay in one piece
        row.add_column(no_wrap=True)
        passed = Text(f"{told.clock() - told.begun:.1f} s", "bright_black")
        row.add_row(Text(mark, style), Text(told.name), Text(clean(text)), passed)
        self._console.print(row)

    def note(self, text: str) -> None:
        self._console.print(Text(clean(text)))
