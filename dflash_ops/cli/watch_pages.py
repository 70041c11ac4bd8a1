"""Texts that the watch shows beside the jobs: the end of a log, a diagnosis; read in a thread, under a deadline."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from dflash_ops.errors import DflashError
from dflash_ops.view.watch import Page
from dflash_ops.view.watch_draw import Pen, tame

if TYPE_CHECKING:
    from dflash_ops.client import JobClient
    from dflash_ops.inventory import Inventory, Job

#: Lines of a log's end that are fetched, and seconds until it is read again while its end is on the screen.
LOG_LINES = 400
LOG_AGAIN_S = 5.0

#: Characters of one line that are shown.
LINE = 2000

#: Seconds after which the screen no longer waits for an answer.
LOG_S, TRIAGE_S = 30.0, 240.0

#: What a trainer writes for its terminal: colours and cursor movements.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")

Read = Callable[[], Sequence[Text]]


@dataclass
class Reading:
    """A text that is being read, or was.

    Args:
        read: gives the lines; called in threads. again: whether to read it anew every LOG_AGAIN_S.
    """

    title: str
    read: Read
    deadline: float
    again: bool = False
    scroll: int | None = 0
    clock: Callable[[], float] = time.monotonic
    _lines: Sequence[Text] | None = None
    _error: str = ""
    _began: float = 0.0
    _done: float | None = None
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Read it (anew); what is there stays on the screen until the answer has come."""
        with self._lock:
            self._number += 1
            self._began, self._done = self.clock(), None
            number = self._number
        threading.Thread(target=self._run, args=(number,), name=f"read {self.title}", daemon=True).start()

    def page(self) -> Page:
        """As it is now; never waits."""
        now = self.clock()
        with self._lock:
            waited = now - self._began
            if self._done is None and waited > self.deadline:
                self._number += 1  # what still comes is of no use any more
                self._done, self._error = now, f"no answer for {self.deadline:.0f} s; r tries again"
            due = self.again and self.scroll is None and self._done is not None and now - self._done >= LOG_AGAIN_S
            page = Page(self.title, self._lines, waited, self._error, self.scroll)
        if due:
            self.start()
        return page

    def _run(self, number: int) -> None:
        lines: Sequence[Text] | None = None
        try:
            lines, error = self.read(), ""
        except DflashError as failed:
            error = "\n".join(filter(None, (failed.what, failed.where, failed.next and f"next: {failed.next}")))
        except Exception as failed:  # noqa: BLE001  a fault of ours is said on the screen and must not end the watch
            error = f"unexpected {type(failed).__name__}: {failed}"
        with self._lock:
            if number != self._number:
                return
            self._done, self._error = self.clock(), error
            if lines is not None:
                self._lines = lines


def log(job: Job, clients: Sequence[JobClient], pen: Pen) -> Reading:
    """The end of the job's log; of several machines one after the other, the node in front of each line."""

    def read() -> list[Text]:
        lines: list[Text] = []
        for rank, client in enumerate(clients):
            front = f"node {rank} | " if len(clients) > 1 else ""
            lines += [Text(f"{front}{plain(raw, pen)}") for raw in client.logs(lines=LOG_LINES)]
        return lines

    return Reading(f"{tame(job.name, pen)}: log, last {LOG_LINES} lines", read, LOG_S, again=True, scroll=None)


def triage(job: Job, clients: Sequence[JobClient], loaded: Inventory, pen: Pen) -> Reading:
    """The diagnosis of the job's newest attempt."""

    def read() -> Sequence[Text]:
        from dflash_ops.collect.job import examine
        from dflash_ops.collect.nodes import examine_nodes
        from dflash_ops.view.triage import lines

        if job.nodes:
            across = examine_nodes(clients, loaded)
            chosen = across.chosen
            where = f"{job.name}, {chosen.label}, attempt {chosen.attempt}"
            return lines(where, across.diagnosis)
        seen = examine(clients[0], loaded)
        still = ", still running" if seen.alive else ""
        return lines(f"{job.name}, attempt {seen.attempt}{still}", seen.diagnosis)

    def tamed() -> list[Text]:
        return [_tamed(line, pen) for line in read()]

    return Reading(f"{tame(job.name, pen)}: triage", tamed, TRIAGE_S)


def plain(raw: bytes, pen: Pen) -> str:
    """One line of a log as text: no colours, no cursor movements, of a rewritten line what stood there last."""
    text = _ESCAPES.sub("", raw.decode("utf-8", "replace")).expandtabs(8)
    shown = [part for part in text.split("\r") if part.strip()]
    line = shown[-1] if shown else ""
    return tame(line[:LINE] + (f" ... {len(line) - LINE} characters more" if len(line) > LINE else ""), pen)


def _tamed(line: Text, pen: Pen) -> Text:
    safe = "".join(c if c.isprintable() else " " for c in line.plain)
    if pen.ascii:
        safe = "".join(c if c.isascii() else "?" for c in safe)
    if safe == line.plain:
        return line
    return Text(safe, spans=line.spans)
