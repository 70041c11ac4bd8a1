"""Attempts on disk: numbers that are never used twice, and what is recorded of each.

The rule here: reading never fails as a whole. A damaged file is named in `damaged`, and what it would have said is
unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.contracts import AttemptLayout, Event, ExitRecord, JobSpec, Layout, StartRecord, State, StopRecord
from dflash_ops.errors import ContractError, StateError
from dflash_ops.resident import proc
from dflash_ops.resident.files import load


@dataclass(frozen=True)
class Attempt:
    """One attempt as its files say it."""

    number: int
    layout: AttemptLayout
    spec: JobSpec | None
    start: StartRecord | None
    exit: ExitRecord | None
    stop: StopRecord | None
    damaged: tuple[str, ...]

    @property
    def rebooted(self) -> bool:
        return bool(self.start and self.start.boot_id and self.start.boot_id != proc.boot_id())

    @property
    def launcher_alive(self) -> bool:
        return self.start is not None and not self.rebooted and proc.alive(self.start.launcher)

    @property
    def wrapper_alive(self) -> bool:
        return self.start is not None and not self.rebooted and proc.alive(self.start.wrapper)

    def ended_well(self) -> bool:
        """Finished, or stopped with its state saved."""
        rcs = self.spec.finished_rc if self.spec else (0,)
        return self.exit is not None and self.exit.state(rcs) in (State.FINISHED, State.STOPPED)


def numbers(layout: Layout) -> list[int]:
    """Numbers of all attempts that have a folder, ascending."""
    try:
        names = [entry.name for entry in layout.attempts.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def read(layout: Layout, number: int) -> Attempt:
    at = layout.attempt(number)
    damaged: list[str] = []

    def one(cls: type, path: Path) -> object:
        try:
            return load(cls, path)
        except (StateError, ContractError, OSError) as error:
            damaged.append(f"{path.relative_to(layout.root)} ({error})".replace("\n", ";"))
            return None

    # exit.json last: whoever read "the launcher lives" before may still find how it ended.
    spec, start, stop = one(JobSpec, at.job), one(StartRecord, at.start), one(StopRecord, at.stop)
    exit = one(ExitRecord, at.exit)
    assert spec is None or isinstance(spec, JobSpec)
    assert start is None or isinstance(start, StartRecord)
    assert stop is None or isinstance(stop, StopRecord)
    assert exit is None or isinstance(exit, ExitRecord)
    return Attempt(number, at, spec, start, exit, stop, tuple(damaged))


def last(layout: Layout) -> Attempt | None:
    """The newest attempt, None when nothing was ever started."""
    found = numbers(layout)
    return read(layout, found[-1]) if found else None


def next_number(layout: Layout, journal: Sequence[Event]) -> int:
    """One more than any number that a folder or the journal ever had."""
    used = [*numbers(layout), *(e.attempt for e in journal if e.attempt is not None)]
    return max(used, default=0) + 1
