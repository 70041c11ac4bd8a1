"""Many jobs, one line each; below them what is to be said of the chosen one.

The rule here: jobs keep their places, whatever becomes of them; columns keep their widths. Where there is no room for
all columns the last ones of `_ORDER` go first, where there is none for all jobs those around the chosen one are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from dflash_ops.contracts import LIVE_STATES, Progress, State
from dflash_ops.view.nodes import WORST
from dflash_ops.view.status import STYLES
from dflash_ops.view.text import age, duration
from dflash_ops.view.watch_draw import DIM, Pen, cells, cut, fitted, ktok, number, percent, tame
from dflash_ops.view.watch_fit import filled
from dflash_ops.view.watch_job import deed_text, link_text, state_text
from dflash_ops.view.watch_seen import Watched

#: Column -> (heading, cells, right-aligned). The job's name and what was done last take what is there.
_COLUMNS = {
    "host": ("host", 14, False),
    "state": ("state", 13, False),
    "since": ("since", 10, False),
    "step": ("step", 11, True),
    "share": ("%", 3, True),
    "loss": ("loss", 7, True),
    "rate": ("Ktok/s", 6, True),
    "eta": ("ETA", 10, False),
}
#: From the most to the least important.
_ORDER = ("state", "since", "step", "loss", "eta", "rate", "share", "host")
_DONE = 24


def screen(jobs: Sequence[Watched], chosen: int, width: int, height: int, pen: Pen) -> list[Text]:
    """Exactly `height` lines of exactly `width` cells; the job at `chosen` is marked."""
    about = _about(jobs[chosen], width, pen) if height >= 10 and jobs else []
    about = about[: max(0, height - 6)]
    room = max(1, height - 2 - len(about))
    columns, name = _columns(jobs, width, pen)
    first, last = window(len(jobs), chosen, room)
    lines = [_summary(jobs, width, pen), _heading(columns, name, width, pen)]
    above, below = first, len(jobs) - last
    for n in range(first, last):
        if n == first and above and n != chosen:
            lines.append(Text(f"  {above + 1} more above", DIM))
        elif n == last - 1 and below and n != chosen:
            lines.append(Text(f"  {below + 1} more below", DIM))
        else:
            lines.append(_row(jobs[n], n == chosen, columns, name, width, pen))
    if about:
        lines += [Text()] * (height - len(lines) - len(about)) + about
    return filled(lines, width, height, pen)


def window(count: int, chosen: int, room: int) -> tuple[int, int]:
    """Which of `count` are shown in `room` lines: from and up to, the chosen one near the middle."""
    if count <= room:
        return 0, count
    first = min(max(0, chosen - room // 2), count - room)
    return first, first + room


def _summary(jobs: Sequence[Watched], width: int, pen: Pen) -> Text:
    states = Counter(s.state for job in jobs if (s := job.snapshot) is not None)
    silent = [job.link.lost_s is not None for job in jobs if job.snapshot is None]
    states[State.UNREACHABLE] += sum(silent)
    unseen = len(silent) - sum(silent)
    text = Text.assemble((f"{len(jobs)} jobs", "bold"))
    for state in WORST:
        if states[state]:
            text.append(f"  {pen.states[state]} {states[state]} {state.value}", STYLES[state][1])
    if unseen:
        text.append(f"  {unseen} not seen yet", DIM)
    return text


def _columns(jobs: Sequence[Watched], width: int, pen: Pen) -> tuple[list[str], int]:
    """The columns that have room, in the order in which they are drawn, and the cells of the name."""
    longest = max((cells(tame(job.name, pen)) for job in jobs), default=4)
    name = max(6, min(longest, 20 if width < 110 else 32))
    left = width - 2 - name
    kept = []
    for key in _ORDER:
        left -= _COLUMNS[key][1] + _gap(width)
        if left < 0:
            break
        kept.append(key)
    return [key for key in _COLUMNS if key in kept], name


def _gap(width: int) -> int:
    """Cells between two columns."""
    return 2 if width >= 100 else 1


def _heading(columns: Sequence[str], name: int, width: int, pen: Pen) -> Text:
    line = Text("  " + "job".ljust(name), DIM)
    for key in columns:
        head, size, right = _COLUMNS[key]
        line.append(" " * _gap(width) + (head.rjust(size) if right else head.ljust(size)))
    if width - line.cell_len >= _DONE:
        line.append("  last")
    return line


def _row(job: Watched, chosen: bool, columns: Sequence[str], name: int, width: int, pen: Pen) -> Text:
    line = Text.assemble(("> " if chosen else "  ", "bold"))
    line.append_text(fitted(Text(cut(tame(job.name, pen), name, pen), "bold" if chosen else ""), name, pen))
    values = _values(job, pen)
    for key in columns:
        _, size, right = _COLUMNS[key]
        value = values.get(key) or Text(pen.dash)
        before = max(0, size - value.cell_len) if right else 0
        line.append(" " * (_gap(width) + before))
        line.append_text(fitted(value, size - before, pen))
    if (room := width - line.cell_len - 2) >= _DONE - 2:
        line.append(f"  {cut(_last(job, pen), room, pen)}", DIM)
    elif job.old:
        # No column for it: the age takes the end of the line, a number there is old anyhow.
        note = Text(f" {_old(job)}", "bold magenta")
        line.truncate(max(0, width - note.cell_len), pad=True)
        line.append_text(note)
    return line


def _values(job: Watched, pen: Pen) -> dict[str, Text]:
    seen = job.whole
    host = Text(cut(tame(job.host, pen), _COLUMNS["host"][1], pen))
    if seen is None:
        if job.link.lost_s is None:
            return {"host": host, "state": Text("asking ...", DIM)}
        return {
            "host": host,
            "state": state_text(State.UNREACHABLE, pen),
            "since": Text(duration(job.link.lost_s)),
        }
    s = seen.snapshot
    p = s.progress or Progress(t=s.t)
    step = pen.dash if p.step is None else f"{p.step}/{p.total}" if p.total else str(p.step)
    share = p.step / p.total if p.step is not None and p.total else None
    over = s.exit is not None or s.state not in LIVE_STATES or s.state is State.HUNG
    return {
        "host": host,
        "state": state_text(s.state, pen),
        "since": Text(duration(seen.now - s.since)),
        "step": Text(step),
        "share": Text(percent(share, pen)),
        "loss": Text(number(p.loss, 4, 7, pen)),
        "rate": Text(f"{ktok(p.block_tok_s, pen):>6}"),
        "eta": Text(pen.dash if over or p.eta_s is None else duration(p.eta_s)),
    }


def _old(job: Watched) -> str:
    lost = job.link.lost_s
    return f"{age(max(job.age_s, lost or 0.0))} old" if job.nodes else "never seen"


def _last(job: Watched, pen: Pen) -> str:
    """The last thing that the supervisor did; before it, how old all this is if it is old."""
    seen = job.whole
    said = tame(deed_text(seen.snapshot.deeds[-1], seen.now), pen) if seen is not None and seen.snapshot.deeds else ""
    if not job.old:
        return said
    lost = "link lost, " if job.link.lost_s is not None else ""
    return f"{lost}{_old(job)}" + (f"; {said}" if said else "")


def _about(job: Watched, width: int, pen: Pen) -> list[Text]:
    """Of the chosen job what its line has no room for: how it is, the cause, what was done."""
    name = tame(job.name, pen)
    lines = [Text(cut(f"-- {name} " + "-" * width, width, pen) if pen.ascii else f"── {name} ".ljust(width, "─"), DIM)]
    if job.link.lost_s is not None:
        lines += link_text(job, pen, width)
    seen = job.whole
    if seen is None:
        return lines
    s = seen.snapshot
    if s.error is not None:
        cause = f"cause    {tame(s.error.worker, pen)}: {tame(s.error.message, pen)}"
        lines.append(Text(cut(cause, width, pen), "red"))
    said = s.exit.describe() if s.exit is not None else s.detail
    if said and job.link.lost_s is None:
        lines.append(Text(cut(tame(said, pen), width, pen)))
    if s.deeds:
        lines.append(Text(cut(f"done     {tame(deed_text(s.deeds[-1], seen.now), pen)}", width, pen)))
    return lines
