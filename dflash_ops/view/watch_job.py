"""One job on the whole screen. What does not fit goes by importance; the state, an error and a lost link never do."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence

from rich.text import Text

from dflash_ops.contracts import ENDED_STATES, LIVE_STATES, Progress, Snapshot, State
from dflash_ops.view.nodes import WORST, NodeSeen
from dflash_ops.view.status import STYLES, event_text, next_step
from dflash_ops.view.text import age, duration, size
from dflash_ops.view.watch_curves import curves
from dflash_ops.view.watch_draw import DIM, Pen, bar, clock, cut, fitted, folded, number, percent, tame
from dflash_ops.view.watch_fit import ALWAYS, Block, arrange, beside, block, filled
from dflash_ops.view.watch_parts import gpus, workers
from dflash_ops.view.watch_seen import Watched

#: From this width on there are two columns.
WIDE = 150

LABEL = 9

#: What stands in front of what the supervisor did: when, by UTC.
_WHEN = re.compile(r"^(node \d+: )?(\d{4})-(\d\d-\d\d)[T ](\d\d:\d\d):(\d\d)Z? ")
_BAD = frozenset({State.CRASHED, State.HUNG, State.UNREACHABLE})

#: Stages before the first step, in their order, and how each is called on the screen. The last is what follows
#: compiling until a step has come.
STAGES = (("loading", "loading"), ("compiling", "compile"), ("warm-up", "warm-up"))


def screen(job: Watched, width: int, height: int, pen: Pen) -> list[Text]:
    """Exactly `height` lines of exactly `width` cells."""
    blocks = list(_blocks(job, width if width < WIDE else (width - 3) // 2, width, pen))
    if width < WIDE:
        return filled(arrange(blocks, height), width, height, pen)
    head = [b for b in blocks if b.column == 0]
    top = arrange(head, height)
    room = height - len(top)
    half = (width - 3) // 2
    left, right = (arrange([b for b in blocks if b.column == c], room) for c in (1, 2))
    return filled([*top, *beside(left, right, half, 3, pen)], width, height, pen)


def row(label: str, *value: Text | str | tuple[str, str]) -> Text:
    """`label    value`."""
    return Text.assemble((f"{label:<{LABEL}}", DIM), *value)


def state_text(state: State, pen: Pen) -> Text:
    return Text(f"{pen.states[state]} {state.value}", STYLES[state][1])


def link_text(job: Watched, pen: Pen, width: int) -> list[Text]:
    """That the link is lost, since when, how often it was tried, how old this is; and what was said."""
    lost = job.link.lost_s
    if lost is None:
        return []
    tried = f", tried {job.link.tries} times" if job.link.tries > 1 else ""
    shown = f"; what is shown is {age(job.age_s)} old" if job.nodes else ""
    lines = [Text(cut(f"LINK LOST {duration(lost)} ago{tried}{shown}", width, pen), "bold magenta")]
    if job.link.why:
        lines.append(Text(cut(tame(job.link.why, pen), width, pen), "magenta"))
    return lines


def _blocks(job: Watched, width: int, whole_width: int, pen: Pen) -> Iterator[Block]:
    seen = job.whole
    if job.link.lost_s is not None:
        lines = link_text(job, pen, whole_width)
        yield block((93, lines), (ALWAYS, lines[:1]), stays=True, column=0)
    if seen is None:
        title = Text.assemble((cut(tame(job.name, pen), max(8, whole_width - 34), pen), "bold"), "  ")
        if job.link.lost_s is not None:
            title.append_text(state_text(State.UNREACHABLE, pen)).append(f"  {duration(job.link.lost_s)}")
            title.append(f"   on {tame(job.host, pen)}", DIM)
        else:
            title.append(f"asking {tame(job.host, pen)} ...")
        yield block((ALWAYS, [title]), stays=True, column=0)
        return
    s, now = seen.snapshot, seen.now
    yield from _head(job, s, now, whole_width, pen)
    yield from _bad_news(job, s, now, whole_width, pen)
    yield from _stages(s, width, pen)
    yield from _progress(s, now, width, pen)
    if job.several:
        yield nodes(job.nodes, width, pen)
    yield from _deeds(s, now, width, pen)
    yield from _rest(s, now, width, pen)
    if (found := workers(s.workers, width, pen)) is not None:
        yield found
    if (cards := gpus(job.gpus, job.gpus_note, width, pen)) is not None:
        yield cards
    yield from _disk(s, width, pen)


def _head(job: Watched, s: Snapshot, now: float, width: int, pen: Pen) -> Iterator[Block]:
    """The title: what it is and how it is; the rest of it where there is room."""
    name = cut(tame(s.job, pen), max(8, width - 34), pen)
    title = Text.assemble((name, "bold"), "  ", state_text(s.state, pen), f"  {duration(now - s.since)}")
    more = [f"attempt {s.attempt}" if s.attempt is not None else ""]
    more += [f"life {s.life}" if s.life else "", f"on {tame(job.host, pen)}"]
    more += [f"release {tame(s.release, pen)[:12]}" if s.release else ""]
    more += [f"started {duration(now - s.started)} ago" if s.started is not None and width >= 100 else ""]
    for part in filter(None, more):
        if title.cell_len + 3 + len(part) <= width:
            title.append(f"   {part}", DIM)
    yield block((ALWAYS, [title]), stays=True, column=0)
    detail = tame(s.detail, pen)
    if detail and not _said_elsewhere(s):
        style = "red" if s.state in _BAD else ""
        lines = [Text(x, style) for x in folded(detail, width, 2, pen)]
        rank = 92 if s.state in _BAD or s.state is State.UNKNOWN else 41
        yield block((rank - 60, lines), (rank, lines[:1]), column=0)


def _said_elsewhere(s: Snapshot) -> bool:
    """Whether another line says what the detail says: how it ended, the step, or the stage."""
    if s.exit is not None:
        return s.exit.describe() in s.detail
    stepping = s.progress is not None and s.progress.step is not None
    if s.state is State.STEPPING:
        return stepping or (s.stage is not None and s.stage.name == "stepping")
    return s.state in (State.LOADING, State.COMPILING) and s.stage is not None


def _bad_news(job: Watched, s: Snapshot, now: float, width: int, pen: Pen) -> Iterator[Block]:
    """The cause, the end, warnings, and what a person would type now."""
    if s.error is not None:
        who = f"{tame(s.error.worker, pen)}: "
        said = folded(who + tame(s.error.message, pen), width - LABEL, 5, pen)
        lines = [row("cause" if n == 0 else "", (text, "red")) for n, text in enumerate(said)]
        yield Block([(11, lines), (73, lines[:2]), (ALWAYS, _cut_one(lines, who, s, width, pen))], 0)
    if s.exit is not None:
        text = f"{s.exit.describe()}, {duration(now - s.exit.t)} ago, after {duration(s.exit.duration_s)}"
        yield block((91, [row("exit", tame(text, pen))]), column=0)
    if s.warnings:
        lines = [row("warning" if n == 0 else "", (tame(w, pen), "yellow")) for n, w in enumerate(s.warnings)]
        more = [] if len(lines) == 1 else [row("", (f"+{len(lines) - 1} more", DIM))]
        yield block((21, lines[:8]), (64, [lines[0], *more]), column=0)
    if s.resident is not None and not s.resident.alive and s.attempt is not None and s.state not in ENDED_STATES:
        text = "the resident does not run: nobody watches there but this screen"
        yield block((77, [row("warning", (text, "yellow"))]), column=0)
    if (hint := next_step(s)) is not None:
        lines = [row("next" if n == 0 else "", (tame(x, pen), "green")) for n, x in enumerate(hint.splitlines())]
        yield block((51, lines), column=0)


def _cut_one(lines: Sequence[Text], who: str, s: Snapshot, width: int, pen: Pen) -> list[Text]:
    assert s.error is not None
    if len(lines) < 2:
        return list(lines)
    return [row("cause", (cut(who + tame(s.error.message, pen), width - LABEL, pen), "red"))]


def _stages(s: Snapshot, width: int, pen: Pen) -> Iterator[Block]:
    """What comes before the first step: a bar each, as far as it is."""
    stepping = s.progress is not None and s.progress.step is not None
    # A save among the steps comes and goes with every checkpoint; only one that hangs is worth a line.
    quiet = ("stepping", "saving") if s.state is State.STEPPING else ("stepping",)
    if s.stage is None or s.state in (State.FINISHED, State.STOPPED) or (stepping and s.stage.name in quiet):
        return
    k, n = s.stage.k, s.stage.n
    share = k / n if k is not None and n else None
    now = "warm-up" if s.stage.name == "stepping" else s.stage.name
    count = f"{k} of {n}" if k is not None and n else "..."
    what = tame(s.stage.what, pen)
    cells = max(6, min(30, width - LABEL - 32))
    names = [name for name, _ in STAGES]

    def one(name: str, called: str, value: float | None, said: str) -> Text:
        return row(cut(called, LABEL - 1, pen), bar(value, cells, pen), f" {said}")

    if now == "warm-up" or stepping:
        count, share = "the first step is awaited" if not stepping else count, None if not stepping else share
        what = "" if not stepping else what
    if now not in names:
        yield block((86, [one(now, tame(now, pen), share, f"{count:<10} {what}")]))
        return
    at = names.index(now)
    lines = [one(names[i], STAGES[i][1], 1.0, "done") for i in range(at)]
    lines.append(one(now, STAGES[at][1], share, f"{count:<10} {what}".rstrip()))
    lines += [one(names[i], STAGES[i][1], 0.0, pen.dash) for i in range(at + 1, len(STAGES))]
    yield block((43, lines), (86, lines[at : at + 1]))


def _progress(s: Snapshot, now: float, width: int, pen: Pen) -> Iterator[Block]:
    p = s.progress
    if p is None:
        return
    yield block((90, [row("step", _step(p, s, width - LABEL, pen))]))
    if p.epoch is not None and math.isfinite(p.epoch):
        part = p.epoch % 1.0 if p.epoch % 1.0 or not p.epoch else 1.0
        cells = max(5, min(40, width - LABEL - 34))
        text = Text.assemble(f"{p.epoch:8.2f}  ", bar(part, cells, pen), f" {percent(part, pen)} % of epoch ")
        text.append(str(max(1, math.ceil(p.epoch))))
        yield block((57, [row("epoch", text)]))
    yield from curves(s, p, width, pen)
    parts = [f"acc {percent(p.acc, pen).strip()} %"] if p.acc is not None else []
    parts += [f"lr {p.lr:.2e}"] if p.lr is not None else []
    parts += [f"{p.rate:g} (rate as the trainer says)"] if p.rate is not None and p.block_tok_s is None else []
    if p.ring_slots:
        ready = number(p.ring_ready, 0, len(str(p.ring_slots)), pen)
        share = p.ring_ready / p.ring_slots if p.ring_ready is not None else None
        yield block((53, [row("ring", f"{ready}/{p.ring_slots} ready  ", bar(share, 16, pen))]))
    if parts:
        yield block((33, [row("also", "   ".join(parts))]))


def _step(p: Progress, s: Snapshot, width: int, pen: Pen) -> Text:
    if p.step is None:
        return Text(pen.dash)
    if not p.total:
        return Text(f"{p.step:>8}")
    count = f"{p.step:>{len(str(p.total))}}/{p.total}"
    going = s.exit is None and s.state in LIVE_STATES and s.state is not State.HUNG
    eta = "" if p.eta_s is None or not going else f"  ETA {duration(p.eta_s)}"
    error = s.rates.get("eta_error_s")
    if eta and error is not None and math.isfinite(error) and width >= 60:
        eta += f" {pen.plus} {duration(error)}"
    cells = max(5, min(40, width - max(8, len(count)) - 8 - max(len(eta), 24 if width >= 60 else 15)))
    share = p.step / p.total
    return Text.assemble(f"{count:>8}  ", bar(share, cells, pen), f" {percent(share, pen)} %", eta)


def nodes(found: Sequence[NodeSeen], width: int, pen: Pen) -> Block:
    """A line for each machine of the job; the first to go are those that are well."""

    def one(n: NodeSeen) -> Text:
        s = n.snapshot
        p = s.progress or Progress(t=s.t)
        line = Text(f"node {n.rank:<4}{cut(tame(n.host, pen), 14, pen):<15}")
        line.append_text(fitted(state_text(s.state, pen), 14, pen))
        line.append(f"{duration(n.now - s.since):<11}")
        line.append(f"step {number(p.step, 0, 7, pen)}  loss {number(p.loss, 4, 7, pen)}")
        said = s.exit.describe() if s.exit is not None else s.detail if p.step is None else ""
        line.append(f"  {tame(said, pen)}" if said else "", DIM)
        return line

    bad_first = sorted(found, key=lambda n: (WORST.index(n.snapshot.state), n.rank))
    forms = [(46, [one(n) for n in found])]
    for shown in range(len(found) - 1, 1, -1):
        more = Text(f"         +{len(found) - shown + 1} more nodes", DIM)
        forms.append((56 if shown > 2 else 87, [*(one(n) for n in bad_first[: shown - 1]), more]))
    forms.append((87, [one(bad_first[0])]))
    return block(*forms)


def deed_text(deed: str, now: float) -> str:
    """What was done with its time; with its day, too, where that is another one."""
    match = _WHEN.match(deed)
    if match is None:
        return deed
    node, year, day, clock, seconds = match.groups("")
    today = 0 <= now < 1e11 and time.strftime("%Y-%m-%d", time.gmtime(now)) == f"{year}-{day}"
    return f"{node}{f'{clock}:{seconds}' if today else f'{day} {clock}'} {deed[match.end() :]}"


def _deeds(s: Snapshot, now: float, width: int, pen: Pen) -> Iterator[Block]:
    """What the supervisor did or told, newest last; without any the last event."""
    said = [tame(deed_text(d, now), pen) for d in s.deeds]
    if said:
        lines = [row("done" if n == 0 else "", text) for n, text in enumerate(said)]
        last = [row("done", said[-1])]
        forms = [(32, lines)] + ([(48, lines[-2:])] if len(lines) > 2 else [])
        forms = [(rank, [row("done", said[-len(part)]), *part[1:]]) for rank, part in forms]
        yield block(*forms, (76, last))
    if s.last_event is not None:
        text = f"{event_text(s.last_event)}, {duration(now - s.last_event.t)} ago"
        yield block((35, [row("event", tame(text, pen))]))


def _rest(s: Snapshot, now: float, width: int, pen: Pen) -> Iterator[Block]:
    if s.checkpoint is not None:
        text = f"step {s.checkpoint.step}, {duration(now - s.checkpoint.t)} ago ({clock(s.checkpoint.t)} UTC)"
        yield block((47, [row("saved", text)]))
    if s.session is not None and not s.session.alive and s.state not in ENDED_STATES:
        gone = f"{tame(s.session.name, pen)} is gone (the trainer does not need it)"
        yield block((31, [row("session", (gone, "yellow"))]))


def _disk(s: Snapshot, width: int, pen: Pen) -> Iterator[Block]:
    d = s.disk
    if d is None:
        return
    share = 1 - d.free / d.total if d.total else None
    text = Text.assemble(bar(share, 10, pen), f" {size(d.free)} free of {size(d.total)}")
    soon = d.full_in_s is not None and d.full_in_s < 86400
    if d.full_in_s is not None:
        text.append(
            f", full in {duration(d.full_in_s)}", "bold red" if d.full_in_s < 3600 else "yellow" if soon else ""
        )
    if text.cell_len + LABEL + len(d.path) + 3 <= width:
        text.append(f"   {tame(d.path, pen)}", DIM)
    yield block((88 if soon else 49, [row("disk", text)]), column=2)
