"""Progress of a command that has stages: a spinner and a bar on a terminal (view/live.py), plain lines elsewhere.

The rule here: nothing is silent for more than 2 s. On a terminal the spinner turns; elsewhere a stage that is not done
says every 2 s what it does, how far it is, how fast, and how long it still takes, where that is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Protocol

from dflash_ops.view.pace import Pace
from dflash_ops.view.text import clean, duration

#: Seconds between two plain lines of one stage.
PATIENCE_S = 2.0

Clock = Callable[[], float]

_TURN = "|/-\\"


class Stage(Protocol):
    """One stage while it runs."""

    def say(self, text: str) -> None:
        """What it is doing now."""

    def bytes(self, done: int, total: int) -> None:
        """How far a transfer is."""

    def count(self, done: float, total: float, unit: str) -> None:
        """How far it is in units of its own (plural: `checkpoints`)."""

    def until(self, seconds: float, what: str) -> None:
        """From now on the time that is left of `seconds` is shown: `52 s before KILL` for the `what` "before KILL"."""

    def done(self, text: str) -> None:
        """What came of it: shown when the stage ends, and kept."""


class Stages(Protocol):
    def stage(self, name: str, text: str) -> AbstractContextManager[Stage]:
        """Begin a stage; it ends with the `with` block, well or by the exception that leaves it."""
        ...

    def note(self, text: str) -> None:
        """A line of its own, kept."""
        ...


class Told:
    """What is known of a stage: the one account that every way of showing reads, from another thread too."""

    def __init__(self, name: str, text: str, clock: Clock) -> None:
        self.name, self.text, self.result = name, text, ""
        self.clock = clock
        self.begun = clock()
        self.pace: Pace | None = None
        self._end: tuple[float, str] | None = None

    def say(self, text: str) -> None:
        self.text, self.pace = text, None

    def bytes(self, done: int, total: int) -> None:
        self.count(done, total, "")

    def count(self, done: float, total: float, unit: str) -> None:
        if self.pace is None or self.pace.unit != unit:
            self.pace = Pace(unit, self.clock)
        self.pace.update(done, total)

    def until(self, seconds: float, what: str) -> None:
        self._end = self.clock() + seconds, what

    def done(self, text: str) -> None:
        self.result = text

    def now(self) -> str:
        """What it does, how far it is, and what is left of its time."""
        text = self.text if self.pace is None else self.pace.text()
        if self._end is None:
            return text
        end, what = self._end  # in front: a narrow terminal cuts the end of a line
        return f"{duration(max(0.0, end - self.clock()))} {what}: {text}"

    def kept(self) -> str:
        """The words that stay."""
        return self.result or self.text


class Silent:
    """For callers that want the result only."""

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[Stage]:
        yield Told(name, text, time.monotonic)

    def note(self, text: str) -> None: ...


class Plain:
    """One line a stage on `stream`, and one every `patience` seconds while it lasts."""

    def __init__(self, stream: IO[str], patience: float | None = None, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._patience = PATIENCE_S if patience is None else patience
        self._clock = clock

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[Stage]:
        stage, ended = Told(name, text, self._clock), threading.Event()

        def speak_up() -> None:
            while not ended.wait(self._patience):
                self._print(f"{name}: ... {stage.now()} ({duration(self._clock() - stage.begun)})")

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
        self._print(f"{name}: {stage.kept()} ({self._clock() - stage.begun:.1f} s)")

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        print(clean(text), file=self._stream, flush=True)


class Labelled(Plain):
    """As `Plain`, each line with a label in front: several jobs tell their stages on one stream."""

    def __init__(self, stream: IO[str], label: str, patience: float | None = None) -> None:
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


class Waiting:
    """For commands that ask and answer: nothing is shown where the answer comes at once, and nothing of it is kept.

    After a second a terminal shows a line that turns and counts, and takes it away in the end; elsewhere there is a
    line every `patience` seconds. No rich: a command that is done in 0.2 s must not import it.

    Args:
        asked: whether a person is being asked something on this terminal: it is left alone meanwhile.
    """

    def __init__(
        self,
        stream: IO[str],
        *,
        terminal: bool,
        patience: float | None = None,
        clock: Clock = time.monotonic,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stream, self._terminal, self._asked = stream, terminal, asked
        self._patience, self._clock = PATIENCE_S if patience is None else patience, clock

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[Stage]:
        stage, ended = Told(name, text, self._clock), threading.Event()
        shown = threading.Thread(target=self._turn if self._terminal else self._speak, args=(stage, ended), daemon=True)
        shown.start()
        try:
            yield stage
        finally:
            ended.set()
            shown.join()

    def note(self, text: str) -> None:
        print(clean(text), file=self._stream, flush=True)

    def _speak(self, stage: Told, ended: threading.Event) -> None:
        while not ended.wait(self._patience):
            passed = duration(self._clock() - stage.begun)
            print(clean(f"{stage.name}: ... {stage.now()} ({passed})"), file=self._stream, flush=True)

    def _turn(self, stage: Told, ended: threading.Event) -> None:
        import shutil

        if ended.wait(self._patience / 2):
            return
        turn = 0
        while True:
            if not self._asked():
                passed = duration(self._clock() - stage.begun)
                line = clean(f"{_TURN[turn % 4]} {stage.now()} ({passed})")
                self._stream.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
                self._stream.flush()
                turn += 1
            if ended.wait(self._patience / 8):
                break
        if turn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
