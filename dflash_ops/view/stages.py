"""Progress of a command that has stages: a spinner and a bar on a terminal, one plain line a stage elsewhere.

The rule here: nothing is silent for more than 2 s. On a terminal the spinner turns; elsewhere a stage that is not done
after 2 s says so, and again after 4, 8, 16 ... s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dflash_ops.view.text import clean, size

#: Seconds after which a plain stage speaks up for the first time.
PATIENCE_S = 2.0


class Stage(Protocol):
    """One stage while it runs."""

    def say(self, text: str) -> None:
        """What it is doing now."""

    def bytes(self, done: int, total: int) -> None:
        """How far a transfer is."""

    def done(self, text: str) -> None:
        """What came of it: shown when the stage ends, and kept."""


class Stages(Protocol):
    def stage(self, name: str, text: str) -> AbstractContextManager[Stage]:
        """Begin a stage; it ends with the `with` block, well or by the exception that leaves it."""
        ...

    def note(self, text: str) -> None:
        """A line of its own, kept."""
        ...


class Silent:
    """For callers that want the result only."""

    class _Stage:
        def say(self, text: str) -> None: ...
        def bytes(self, done: int, total: int) -> None: ...
        def done(self, text: str) -> None: ...

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[Stage]:
        yield self._Stage()

    def note(self, text: str) -> None: ...


class _PlainStage:
    def __init__(self, name: str, text: str) -> None:
        self.name, self.text, self.result = name, text, ""

    def say(self, text: str) -> None:
        self.text = text

    def bytes(self, done: int, total: int) -> None:
        self.text = f"{size(done)} of {size(total)} sent"

    def done(self, text: str) -> None:
        self.result = text


class Plain:
    """One line a stage on `stream`."""

    def __init__(self, stream: IO[str], patience: float = PATIENCE_S) -> None:
        self._stream = stream
        self._patience = patience

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[Stage]:
        stage = _PlainStage(name, text)
        begin, ended = time.monotonic(), threading.Event()

        def speak_up() -> None:
            pause = self._patience
            while not ended.wait(pause):
                passed = time.monotonic() - begin
                self._print(f"{name}: ... {stage.text} ({passed:.0f} s)")
                pause = passed  # 2, 4, 8, 16 s: doubling from the start

        speaker = threading.Thread(target=speak_up, daemon=True)
        speaker.start()
        try:
            yield stage
        except BaseException:
            ended.set()
            speaker.join()
            self._print(f"{name}: failed ({stage.text})")
            raise
        ended.set()
        speaker.join()
        self._print(f"{name}: {stage.result or stage.text} ({time.monotonic() - begin:.1f} s)")

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        print(clean(text), file=self._stream, flush=True)


class Labelled(Plain):
    """As `Plain`, each line with a label in front: several jobs tell their stages on one stream."""

    def __init__(self, stream: IO[str], label: str, patience: float = PATIENCE_S) -> None:
        super().__init__(stream, patience)
        self._label = clean(label)

    def _print(self, text: str) -> None:
        lines = [f"[{self._label}] {clean(line)}" for line in text.splitlines() or [""]]
        self._stream.write("\n".join(lines) + "\n")  # one write: lines of different jobs do not mix
        self._stream.flush()


class Held:
    """As `inner`, but notes wait until `release`: what is said of several machines at one time stays in order."""

    def __init__(self, inner: Stages) -> None:
        self._inner = inner
        self._notes: list[str] = []

    def stage(self, name: str, text: str) -> AbstractContextManager[Stage]:
        return self._inner.stage(name, text)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def release(self) -> None:
        """Say what waited."""
        while self._notes:
            self._inner.note(self._notes.pop(0))


class _RichStage:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task, self.result, self.text = progress, task, "", ""

    def say(self, text: str) -> None:
        self.text = text
        self._progress.update(self._task, what=clean(text))

    def bytes(self, done: int, total: int) -> None:
        text = f"{size(done)} of {size(total)}"
        self._progress.update(self._task, completed=done, total=total, what=text)

    def done(self, text: str) -> None:
        self.result = text


class Live:
    """A spinner for the stage at work, a line with a mark for each one that is done."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[Stage]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<10}", markup=False),
            BarColumn(bar_width=24, pulse_style="bright_black"),
            TextColumn("{task.fields[what]}", markup=False),
            TimeElapsedColumn(),
        )
        begin = time.monotonic()
        progress = Progress(*columns, console=self._console, transient=True)
        stage = _RichStage(progress, progress.add_task(name, total=None, what=clean(text)))
        stage.text = text
        try:
            with progress:
                yield stage
        except BaseException:
            self._line("✖", "bold red", name, stage.text, begin)
            raise
        self._line("✔", "bold green", name, stage.result or stage.text, begin)

    def _line(self, mark: str, style: str, name: str, text: str, begin: float) -> None:
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True, min_width=10)
        row.add_column()  # a long text is wrapped in its own column, and the seconds stay in one piece
        row.add_column(no_wrap=True)
        passed = Text(f"{time.monotonic() - begin:.1f} s", "bright_black")
        row.add_row(Text(mark, style), Text(name), Text(clean(text)), passed)
        self._console.print(row)

    def note(self, text: str) -> None:
        self._console.print(Text(clean(text)))
