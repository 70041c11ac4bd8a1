"""The whole screen of `status --watch`: jobs or one job, a text to read, and the last line with keys and age.

Nothing is looked up here: what was seen, how old it is and what the person chose comes in, lines of text come out, as
many and as long as the screen has. docs/watch.md says what each line means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich.text import Text

from dflash_ops.view import watch_job, watch_jobs
from dflash_ops.view.text import age, duration
from dflash_ops.view.watch_draw import ASCII, DIM, UNICODE, Pen, cut, fitted, folded, plainly, tame
from dflash_ops.view.watch_fit import filled
from dflash_ops.view.watch_seen import Link, Watched

__all__ = ["ASCII", "UNICODE", "Choice", "Link", "Page", "Pen", "Place", "Watched", "frame", "page_rows"]


class Place(Enum):
    """What the screen shows."""

    JOBS = "jobs"
    JOB = "job"
    PAGE = "page"
    HELP = "help"


@dataclass(frozen=True)
class Page:
    """A text to read: a log's end, a diagnosis.

    Attributes:
        lines: what is there; None: it is being read, since `reading_s` seconds.
        scroll: lines above the first one that is shown; None: the end is shown, and stays shown.
    """

    title: str
    lines: Sequence[Text] | None = None
    reading_s: float = 0.0
    error: str = ""
    scroll: int | None = 0


@dataclass(frozen=True)
class Choice:
    """What the person chose."""

    place: Place = Place.JOBS
    chosen: int = 0
    page: Page | None = None
    paused_s: float | None = None
    keys: bool = True


HELP = (
    ("q", "leave (Ctrl-C too); the jobs go on"),
    ("down j / up k", "next and previous job; in a text one line"),
    ("Enter", "the chosen job on the whole screen"),
    ("Esc", "back: from a text to the job, from the job to all jobs"),
    ("l", "the end of the job's log, read again every few seconds"),
    ("t", "triage: the cause of a failure, and what to do"),
    ("p", "pause: the screen stands still and says how old it is; p goes on"),
    ("r", "in a text: read it again"),
    ("PgUp PgDn g G", "in a text: a page up or down, to its begin or end"),
    ("?", "this help"),
)


def frame(jobs: Sequence[Watched], choice: Choice, width: int, height: int, pen: Pen) -> list[Text]:
    """The screen: exactly `height` lines of exactly `width` cells, the last one with keys and age."""
    width, height = max(1, width), max(1, height)
    room = height - 1
    job = jobs[choice.chosen]
    if choice.place is Place.HELP:
        lines = _help(width, pen)
    elif choice.place is Place.PAGE and choice.page is not None:
        lines = _page(choice.page, width, room, pen)
    elif choice.place is Place.JOBS:
        lines = watch_jobs.screen(jobs, choice.chosen, width, room, pen)
    else:
        lines = watch_job.screen(job, width, room, pen)
    shown = [*filled(lines, width, room, pen), _foot(jobs, choice, width, pen)]
    return [plainly(line) for line in shown] if pen.ascii else shown


def _help(width: int, pen: Pen) -> list[Text]:
    lines = [Text("Keys", "bold")]
    for key, what in HELP:
        rows = folded(what, max(10, width - 17), 3, pen)
        lines += [Text.assemble((f"  {key if n == 0 else '':<14} ", "bold"), text) for n, text in enumerate(rows)]
    return [*lines, Text(), Text("What each line means: docs/watch.md", DIM)]


def page_rows(page: Page, width: int, pen: Pen) -> list[Text]:
    """The text's lines as wide as the screen; longer ones go on in the next row."""
    rows: list[Text] = []
    for line in page.lines or ():
        if line.cell_len <= width:
            rows.append(fitted(line, width, pen))
            continue
        rest = line
        while rest.cell_len > width:
            at = len(cut(rest.plain, width + 1, pen)) - 1
            space = rest.plain.rfind(" ", max(1, at * 2 // 3), at)
            at = max(1, space + 1 if space > 0 else at)
            rows.append(rest[:at])
            rest = rest[at:]
        rows.append(rest)
    return rows


def _page(page: Page, width: int, height: int, pen: Pen) -> list[Text]:
    title = Text.assemble((cut(page.title, width, pen), "bold"))
    if page.error:
        said = [x for part in page.error.splitlines() for x in folded(tame(part, pen), width, height, pen)]
        return [title, *(Text(x, "red") for x in said)]
    if page.lines is None:
        return [title, Text(f"reading ... {duration(page.reading_s)}")]
    rows, room = page_rows(page, width, pen), max(0, height - 1)
    last = max(0, len(rows) - room)
    first = last if page.scroll is None else min(page.scroll, last)
    if last:
        title.append(f"   lines {first + 1} to {min(len(rows), first + room)} of {len(rows)}", DIM)
    return [title, *(rows[first : first + room] or [Text("(nothing)", DIM)])]


def _foot(jobs: Sequence[Watched], choice: Choice, width: int, pen: Pen) -> Text:
    """Keys on the left, how old it is on the right; where there is no room the keys go."""
    told = _age(jobs, choice, pen)
    room = width - told.cell_len - 2
    if room < 6:
        return fitted(told, width, pen)
    keys = _keys(jobs, choice, room)
    return Text.assemble(fitted(Text(cut(keys, room, pen), DIM), room, pen), "  ", told)


def _keys(jobs: Sequence[Watched], choice: Choice, room: int) -> str:
    """The keys that do something here, as many as have room; help is the last to go."""
    if not choice.keys:
        return "Ctrl-C leaves (no keys: standard input is no terminal)"
    if choice.place is Place.HELP:
        said = ["Esc back"]
    elif choice.place is Place.PAGE:
        said = ["Esc back", "PgUp/PgDn scroll", "r read again", "p pause", "? help"]
    else:
        said = ["q quit", "up/down job"] if len(jobs) > 1 else ["q quit"]
        said += ["Enter open"] if choice.place is Place.JOBS else ["Esc all jobs"] if len(jobs) > 1 else []
        said += ["l log", "t triage", "p pause", "? help"]
    while len(said) > 1 and len("  ".join(said)) > room:
        said.pop(-2)
    return "  ".join(said)


def _age(jobs: Sequence[Watched], choice: Choice, pen: Pen) -> Text:
    """PAUSED and since when; else how old it is, as soon as it is old."""
    if choice.paused_s is not None:
        return Text(f"PAUSED, {duration(choice.paused_s)} old", "bold yellow")
    shown = jobs if choice.place is Place.JOBS else [jobs[choice.chosen]]
    if any(job.link.lost_s is not None for job in shown):
        lost = sum(job.link.lost_s is not None for job in shown)
        if len(shown) > 1:
            return Text(f"{lost} of {len(shown)} links lost", "bold magenta")
        return Text("link lost", "bold magenta")
    if any(not job.nodes for job in shown):
        return Text("asking ...", DIM)
    oldest = max((job for job in shown if job.old), key=lambda job: job.age_s, default=None)
    if oldest is not None:
        return Text(f"seen {age(oldest.age_s)} ago", "bold yellow")
    if all(job.ended for job in shown):
        return Text("ended", DIM)
    return Text("live", "green")
