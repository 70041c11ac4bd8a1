"""`adopted-follow`: the state of an adopted session, one line a second, with the machine's GPUs and its curves so far.

The rule here: there is no loop beside such a session, so that whoever watches asks for himself, and what he has not
seen he does not know: curves and rates begin with the watching.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from dflash_ops.contracts import LIVE_STATES, Layout, Process, Snapshot, State, dumps
from dflash_ops.errors import DflashError
from dflash_ops.resident.adopted import Last, look, parser_of
from dflash_ops.resident.cards import Cards
from dflash_ops.resident.course import Course
from dflash_ops.resident.files import load
from dflash_ops.resident.tmux import clean_environment

POLL_S = 1.0


def main(args: list[str]) -> int:
    parser = parser_of("adopted-follow")
    parser.add_argument("--forever", action="store_true", help="go on after the trainer has ended")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    clean_environment()
    cards, seen = Cards(), _Seen()
    try:
        while True:
            snapshot = look(layout)
            trainer = _trainer(layout)
            gpus, note = cards.look(trainer, often=snapshot.state in LIVE_STATES)
            snapshot = seen.add(replace(snapshot, gpus=gpus, gpus_note=note), trainer)
            sys.stdout.write(dumps(snapshot) + "\n")
            sys.stdout.flush()
            if snapshot.state in (State.CRASHED, State.FINISHED, State.STOPPED) and not options.forever:
                return 0
            time.sleep(POLL_S)
    finally:
        cards.close()


class _Seen:
    """Progress of the trainer since it is watched."""

    def __init__(self) -> None:
        self._trainer: Process | None = None
        self._step: int | None = None
        self._course = Course()

    def add(self, snapshot: Snapshot, trainer: Process | None) -> Snapshot:
        """The snapshot with rates, and with the curves where they changed."""
        if trainer != self._trainer:
            self._trainer, self._step, self._course = trainer, None, Course()
        progress, news = snapshot.progress, False
        if progress is not None and progress.step is not None and progress.step != self._step:
            self._step, news = progress.step, True
            self._course.add(replace(progress, t=snapshot.t))
        curves = self._course.curves() if news else {}
        return replace(snapshot, rates={**self._course.rates(), **snapshot.rates}, curves=curves)


def _trainer(layout: Layout) -> Process | None:
    """The trainer as the last look knew it."""
    try:
        last = load(Last, layout.run / "adopted.last.json")
    except (OSError, DflashError):
        return None  # it only names who holds GPU memory, and where a curve begins
    return last.trainer if last is not None else None
