"""The loop of `status --watch` on a terminal: looks come from streams, keys from the person, the screen from the view.

The rule here: nothing that is asked of a machine is waited for in this thread. Twice a second, and after each key, the
screen is computed anew; what is written is what changed, which may be nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.color import ColorSystem

from dflash_ops.cli import watch_pages
from dflash_ops.cli.common import colours
from dflash_ops.cli.watch_terminal import Terminal, pen
from dflash_ops.client import JobClient
from dflash_ops.contracts.snapshot import FRESH_S
from dflash_ops.fleet.follow import Look, Watch
from dflash_ops.inventory import Inventory, Job
from dflash_ops.view.nodes import NodeSeen
from dflash_ops.view.paint import Painter
from dflash_ops.view.watch import Choice, Link, Pen, Place, Watched, frame, page_rows
from dflash_ops.view.watch_draw import UNICODE, cut, tame
from dflash_ops.view.watch_seen import blind

if TYPE_CHECKING:
    from dflash_ops.hosts.keys import Keyring

#: Seconds between two looks at what there is to draw.
TICK_S = 0.5

#: Seconds that a new size has to settle: who drags a window's edge sends many.
SETTLE_S = 0.02

#: Seconds in which the first answers may come before the screen is taken, so that a passphrase can be asked for.
FIRST_S = 1.5

#: A job's number, and the rank of one of its machines.
Key = tuple[int, int]


def watched(job: Job, looks: Sequence[Look], now: float) -> Watched:
    """What the streams of a job know, as the view wants it.

    Args:
        looks: one for each machine of the job. now: this machine's clock, since the epoch.
    """
    nodes, lost = [], [(rank, look) for rank, look in enumerate(looks) if _lost(look)]
    heard = any(look.seen is not None for look in looks)
    for rank, (part, look) in enumerate(zip(job.parts, looks, strict=True)):
        seen = look.seen
        if seen is None and not (heard and job.nodes):
            continue  # of one machine among others that is silent its line says so; of all, the whole screen
        seen = look.state(job.name, now) if seen is None else seen
        at = seen.snapshot.t + look.age_s if look.age_s is not None else seen.now
        node = NodeSeen(rank, part.host, part.root, seen.snapshot, at, seen.deployed)
        missing = now - (look.lost_since or now) if _lost(look) and look.seen is not None else None
        nodes.append(node if missing is None else blind(node, missing))
    link = Link()
    if lost:
        rank, first = min(lost, key=lambda item: item[1].lost_since or now)
        why = f"node {rank}: {first.error}" if job.nodes else first.error
        link = Link(now - (first.lost_since or now), max(look.tries for _, look in lost), why)
    return Watched(job.name, ", ".join(job.hosts), tuple(nodes), bool(job.nodes), link)


def _lost(look: Look) -> bool:
    """Whether the link is lost and what was heard last is too old to be believed: a short hiccup alarms nobody."""
    return look.lost_since is not None and (look.age_s is None or look.age_s > FRESH_S)


@dataclass
class Screen:
    """What the person chose, changed by keys; and what is on the screen because of it.

    Args:
        open_page: begins to read a text: (`log` or `triage`, the job's number).
    """

    jobs: Sequence[Job]
    pen: Pen
    open_page: Callable[[str, int], watch_pages.Reading]
    keys: bool = True
    clock: Callable[[], float] = time.monotonic
    place: Place = Place.JOBS
    chosen: int = 0
    over: bool = False
    helping: bool = False
    _reading: watch_pages.Reading | None = None
    _behind: Place = Place.JOBS
    _frozen: tuple[float, Sequence[Watched]] | None = None
    _size: tuple[int, int] = field(default=(80, 24))

    def __post_init__(self) -> None:
        self.place = self._behind = Place.JOBS if len(self.jobs) > 1 else Place.JOB

    def press(self, key: str, known: Sequence[Watched]) -> None:
        """One key; those that mean nothing here do nothing.

        Args:
            known: what is known now; a pause keeps it on the screen.
        """
        if key == "?" or (self.helping and key in ("q", "esc")):
            self.helping = not self.helping
        elif key == "p":
            self._frozen = None if self._frozen is not None else (self.clock(), list(known))
        elif self.helping:
            return
        elif key == "q" and self.place is not Place.PAGE:
            self.over = True
        elif key in ("q", "esc"):
            self._back()
        elif self.place is Place.PAGE and self._reading is not None:
            self._scroll(self._reading, key)
        elif key in ("up", "down") and len(self.jobs) > 1:
            self.chosen = (self.chosen + (1 if key == "down" else -1)) % len(self.jobs)
        elif key in ("home", "end"):
            self.chosen = 0 if key == "home" else len(self.jobs) - 1
        elif key == "enter":
            self.place = Place.JOB
        elif key in ("l", "t"):
            self._behind = self.place
            self._reading = self.open_page("log" if key == "l" else "triage", self.chosen)
            self._reading.start()
            self.place = Place.PAGE

    def _back(self) -> None:
        if self.place is Place.PAGE:
            self.place, self._reading = self._behind, None
        elif len(self.jobs) > 1:
            self.place = Place.JOBS

    def _scroll(self, page: watch_pages.Reading, key: str) -> None:
        if key == "r":
            page.start()
            return
        width, height = self._size
        room = max(1, height - 2)
        last = max(0, len(page_rows(page.page(), width, self.pen)) - room)
        at = last if page.scroll is None else min(page.scroll, last)
        move = {"up": -1, "down": 1, "pgup": 1 - room, "pgdn": room - 1, "home": -last, "end": last}.get(key, 0)
        if move:
            at = max(0, at + move)
            # At its end a log stays there while it grows.
            page.scroll = None if page.again and at >= last else min(at, last)

    def choice(self, width: int, height: int) -> Choice:
        self._size = width, height
        paused = self.clock() - self._frozen[0] if self._frozen is not None else None
        page = self._reading.page() if self._reading is not None else None
        return Choice(Place.HELP if self.helping else self.place, self.chosen, page, paused, self.keys)

    def shown(self, known: Sequence[Watched]) -> Sequence[Watched]:
        """What is to be drawn: what is known, or what was when the pause began."""
        return known if self._frozen is None else self._frozen[1]


def run(loaded: Inventory, jobs: Sequence[Job], clients: Sequence[Sequence[JobClient]], *, until_end: bool) -> int:
    """Watch the jobs until a key ends it, or until all have ended where there are no keys or that is asked for.

    Args:
        clients: of each job, one for each of its machines.

    Returns:
        0; until the end: 1 where one crashed or was never deployed.

    Raises:
        KeyboardInterrupt: Ctrl-C; `q` too, where the caller waits for the end.
    """
    from dflash_ops.hosts.keys import SHARED  # paramiko: only where there is a screen

    marks = pen(os.environ, sys.stdout.encoding)
    colour = ColorSystem.STANDARD if colours(sys.stdout) else None
    terminal = Terminal()
    until_end = until_end or not terminal.keys

    def open_page(kind: str, number: int) -> watch_pages.Reading:
        if kind == "log":
            return watch_pages.log(jobs[number], clients[number], marks)
        return watch_pages.triage(jobs[number], clients[number], loaded, marks)

    screen = Screen(jobs, marks, open_page, terminal.keys)
    streams = {(n, rank): client for n, mine in enumerate(clients) for rank, client in enumerate(mine)}
    with Watch(streams, ends=until_end) as watch:
        _let_ask(watch, SHARED)
        SHARED.may_ask = False
        try:
            with terminal:
                _loop(screen, terminal, watch, jobs, Painter(80, 24, colour), until_end=until_end)
        finally:
            SHARED.may_ask = True
        if terminal.ended is not None:
            signal.signal(terminal.ended, signal.SIG_DFL)
            os.kill(os.getpid(), terminal.ended)
        code = _farewell(_known(watch, jobs), jobs)
    if screen.over and until_end:
        raise KeyboardInterrupt
    return code if until_end else 0


def _let_ask(watch: Watch[Key], keyring: Keyring) -> None:
    """Before the screen is taken: a key's passphrase is asked for while the terminal is still the person's.

    Later none is: two readers of one terminal would tear the words apart.
    """
    end = time.monotonic() + FIRST_S
    while keyring.asking or (
        time.monotonic() < end and any(look.link == "connecting" for look in watch.looks().values())
    ):
        time.sleep(0.02)


def _loop(
    screen: Screen, terminal: Terminal, watch: Watch[Key], jobs: Sequence[Job], painter: Painter, *, until_end: bool
) -> None:
    """Draw, wait for a key or the next tick, until it is over."""
    while terminal.ended is None and not screen.over:
        if terminal.resized:
            time.sleep(SETTLE_S)
            terminal.resized = False
            painter.resize(*terminal.size())
        screen.keys = terminal.keys
        known = _known(watch, jobs)
        lines = frame(
            screen.shown(known), screen.choice(painter.width, painter.height), painter.width, painter.height, screen.pen
        )
        if text := painter.paint(lines):
            terminal.write(text)
        if until_end and watch.over:
            return
        next_tick = time.monotonic() + TICK_S
        while not terminal.resized and terminal.ended is None:
            left = next_tick - time.monotonic()
            keys = terminal.wait(left)
            for key in keys:
                screen.press(key, known)
            if keys or left <= 0:
                break


def _known(watch: Watch[Key], jobs: Sequence[Job]) -> list[Watched]:
    looks: Mapping[Key, Look] = watch.looks()
    now = time.time()
    return [watched(job, [looks[n, rank] for rank in range(len(job.parts))], now) for n, job in enumerate(jobs)]


def _farewell(known: Sequence[Watched], jobs: Sequence[Job]) -> int:
    """What was known last stays on the person's own screen: one line a job. 1 where one crashed or was not deployed."""
    from dflash_ops.cli.live import ENDS
    from dflash_ops.view.nodes import lines
    from dflash_ops.view.status import line

    code = 0
    for job, one in zip(jobs, known, strict=True):
        if one.snapshot is None:
            why = cut(tame(one.link.why), 200, UNICODE)
            print(f"{job.name}  nothing was seen" + (f": {why}" if why else ""))
            code = 1
            continue
        whole = one.nodes[0]
        print(lines(one.nodes) if job.nodes else line(whole.snapshot, whole.now), flush=True)
        code = max([code, *(ENDS.get(n.snapshot.state, 1) for n in one.nodes)])
    return code
