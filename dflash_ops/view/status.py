"""One job's snapshot on a screen, as one line, and many jobs as a table.

The rule here: colours only repeat what the words say already, and what is not known is a dash. Nothing is looked up:
`now` is the time on the job's own machine, so that clocks that differ make no wrong ages.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_ops.contracts import Event, Progress, Snapshot, State, WorkerShares, dumps
from dflash_ops.contracts.snapshot import FRESH_S
from dflash_ops.view.text import DASH, age, bar, clean, duration, fixed, ktok, percent

if TYPE_CHECKING:  # `--json` draws nothing: rich is imported by what does
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

#: Mark and colour of each state; the word itself always stands beside.
STYLES: Mapping[State, tuple[str, str]] = {
    State.LOADING: ("◔", "cyan"),
    State.COMPILING: ("◑", "cyan"),
    State.STEPPING: ("●", "green"),
    State.SLOW: ("●", "yellow"),
    State.HUNG: ("■", "bold red"),
    State.CRASHED: ("✖", "bold red"),
    State.FINISHED: ("✔", "bold green"),
    State.STOPPED: ("■", "blue"),
    State.UNREACHABLE: ("?", "bold magenta"),
    State.UNKNOWN: ("?", "magenta"),
}

#: Parts of a worker's bar, in the order in which they are drawn.
SHARES = (("compute", "█", "green"), ("copy", "▓", "cyan"), ("sync", "▒", "yellow"), ("wait", "░", "bright_black"))

_BAD = frozenset({State.CRASHED, State.HUNG})
_LABEL = 10


def attach_argv(name: str, socket: str) -> list[str]:
    """The tmux command that opens the job's session on its machine."""
    return ["tmux", "-L", socket, "attach", "-t", f"={name}"]


def render(snapshot: Snapshot, now: float, width: int = 80) -> RenderableType:
    """The whole screen for one job; fits 80x24 up to nine workers."""
    from rich.console import Group
    from rich.table import Table

    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=_LABEL, style="bright_black", no_wrap=True)
    grid.add_column(overflow="fold")
    space = max(20, width - _LABEL - 2)
    for label, value in _rows(snapshot, now, space):
        grid.add_row(label, value)
    parts: list[RenderableType] = [_headline(snapshot, now), grid]
    if snapshot.workers:
        parts.append(_workers(snapshot.workers, width))
    return Group(*parts)


def _headline(s: Snapshot, now: float) -> Text:
    from rich.text import Text

    mark, style = STYLES[s.state]
    text = Text.assemble((clean(s.job), "bold"), "  ", (f"{mark} {s.state.value}", style))
    text.append(f"  since {duration(now - s.since)}")
    if s.detail and not _said_below(s):
        text.append(f"  {clean(s.detail)}", "red" if s.state in _BAD else "bright_black")
    return text


def _said_below(s: Snapshot) -> bool:
    """Whether a row says what the detail says: the step, or how it ended."""
    if s.exit is not None:
        return s.exit.describe() in s.detail
    return s.state is State.STEPPING and s.progress is not None and s.progress.step is not None


def _rows(s: Snapshot, now: float, space: int) -> list[tuple[str, RenderableType]]:
    from rich.text import Text

    rows: list[tuple[str, RenderableType]] = []
    p = s.progress
    # Of a job that has ended well its last stage tells nothing; of one that crashed, where it was.
    over = s.state in (State.FINISHED, State.STOPPED)
    stepping = p is not None and p.step is not None
    if s.stage is not None and not over and not (stepping and s.stage.name in ("stepping", s.state.value)):
        count = f" {s.stage.k}/{s.stage.n}" if s.stage.k is not None and s.stage.n is not None else ""
        rows.append(("stage", Text(f"{clean(s.stage.name)}{count} {clean(s.stage.what)}".rstrip())))
    if p is not None:
        rows.append(("step", _step(p, space, over=s.exit is not None)))
        rows += [(k, v) for k, v in (("quality", _numbers(p)), ("rate", _rate(p))) if v]
        if p.ring_slots:
            share = (p.ring_ready or 0) / p.ring_slots
            ring = Text(f"{DASH if p.ring_ready is None else p.ring_ready}/{p.ring_slots} ready  ")
            ring.append(bar(share, 10), "green")
            rows.append(("ring", ring))
    if s.attempt is not None:
        parts = [str(s.attempt), f"life {s.life}" if s.life is not None else ""]
        parts += [f"release {clean(s.release)}" if s.release else ""]
        parts += [f"started {duration(now - s.started)} ago" if s.started is not None else ""]
        rows.append(("attempt", Text(", ".join(filter(None, parts)))))
    if s.error is not None:
        first = Text(f"{clean(s.error.worker)}: ", "bold red")
        first.append(_short(s.error.message, space * 3), "red")
        rows.append(("cause", first))
    if s.exit is not None:
        rows.append(("exit", Text(f"{s.exit.describe()}, {duration(now - s.exit.t)} ago")))
    if s.checkpoint is not None:
        text = f"step {s.checkpoint.step}, {duration(now - s.checkpoint.t)} ago"
        rows.append(("checkpoint", Text(text)))
    if s.last_event is not None:
        rows.append(("last event", Text(f"{event_text(s.last_event)}, {duration(now - s.last_event.t)} ago")))
    if s.session is not None:
        rows.append(("session", _session(s)))
    rows.append(("seen", _seen(s, now)))
    rows += [("warning", Text(clean(w), "yellow")) for w in s.warnings]
    if (hint := next_step(s)) is not None:
        rows.append(("next", Text(hint, "green")))
    return rows


def next_step(s: Snapshot) -> str | None:
    """The commands that a person would type now, one a line, where there are some."""
    job = shlex.quote(clean(s.job))
    if s.attempt is None:  # nothing that could be deployed again (an adopted session), or nothing yet
        return f"dflash-ops logs {job}" if s.state in _BAD else None
    if s.state is State.CRASHED:
        return f"dflash-ops triage --job {job}\ndflash-ops deploy {job} --resume"
    if s.state is State.STOPPED:
        return f"dflash-ops deploy {job} --resume"
    if s.state is State.HUNG:
        return f"dflash-ops logs {job}\ndflash-ops deploy {job} --replace --resume"
    return None


def _step(p: Progress, space: int, *, over: bool) -> Text:
    from rich.text import Text

    if p.step is None:
        return Text(DASH)
    if not p.total:
        return Text(str(p.step))
    share = p.step / p.total
    tail = f" {percent(share):>5}"
    if p.eta_s is not None and not over:
        tail += f"  ETA {duration(p.eta_s)}"
    count = f"{p.step}/{p.total}  "
    width = max(5, min(40, space - len(count) - len(tail) - 1))
    return Text.assemble(count, (bar(share, width).replace(" ", "·"), "green"), tail)


def _bundled(p: Progress) -> bool:
    """Whether the bundled trainer said this: a dash is for what it might have told, not for what a job cannot have."""
    return p.ring_slots is not None or p.block_tok_s is not None or p.ctx_tok_s is not None


def _numbers(p: Progress) -> Text:
    from rich.text import Text

    known = {"loss": fixed(p.loss, 4), "acc": percent(p.acc), "tau": fixed(p.tau, 2)}
    parts = [(k, v) for k, v in known.items() if v != DASH or _bundled(p)]
    if p.epoch is not None:
        parts.append(("epoch", fixed(p.epoch, 2)))
    if p.lr is not None:
        parts.append(("lr", f"{p.lr:.2g}"))
    return Text("   ").join(Text.assemble((f"{k} ", "bright_black"), v) for k, v in parts)


def _rate(p: Progress) -> Text:
    from rich.text import Text

    if p.rate is not None and p.block_tok_s is None:
        return Text(f"{p.rate:g} (as the trainer says)")
    if not _bundled(p):
        return Text()
    return Text(f"block {ktok(p.block_tok_s)} Ktok/s   context {ktok(p.ctx_tok_s)} Ktok/s")


def _session(s: Snapshot) -> Text:
    from rich.text import Text

    assert s.session is not None
    if not s.session.alive:
        return Text(f"{clean(s.session.name)} is gone (the trainer does not need it)", "yellow")
    return Text(f"{clean(s.session.name)}  (dflash-ops attach {shlex.quote(clean(s.job))})")


def _seen(s: Snapshot, now: float) -> Text:
    from rich.text import Text

    old = now - s.t
    text = Text(f"{age(old)} ago", "yellow" if old > FRESH_S else "")
    if s.resident is not None and not s.resident.alive:
        text.append("  the resident does not run: nobody watches between your questions", "yellow")
    return text


def _workers(workers: Mapping[str, WorkerShares], width: int) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bright_black", pad_edge=False)
    table.add_column("worker", min_width=_LABEL, no_wrap=True, overflow="ellipsis")
    table.add_column("busy", no_wrap=True)
    for name, _, _ in SHARES:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("life", justify="right", no_wrap=True)
    cells = 30 if width >= 100 else 20
    for worker, shares in workers.items():
        values = [getattr(shares, name) for name, _, _ in SHARES]
        table.add_row(clean(worker), _share_bar(values, cells), *map(percent, values), str(shares.life))
    return table


def _share_bar(values: Sequence[float | None], cells: int) -> Text:
    """Parts side by side; each ends where the sum so far says, so that rounding never makes the bar too long."""
    from rich.text import Text

    text, at, total = Text(), 0, 0.0
    for value, (_, mark, style) in zip(values, SHARES, strict=True):
        total += value or 0.0
        end = min(cells, round(total * cells))
        text.append(mark * (end - at), style)
        at = max(at, end)
    text.append(" " * (cells - at))
    return text


def event_text(event: Event) -> str:
    """`checkpoint step=100`: the event and its small data; of a change of state the new one."""
    if event.event == "state":
        return f"state {clean(str(event.data.get('state', '')))}"
    data = [f"{k}={v}" for k, v in event.data.items() if isinstance(v, (int, float, str)) and len(str(v)) <= 40]
    return clean(" ".join([event.event, *data[:3]]))


def _short(text: str, limit: int) -> str:
    one = clean(text)
    return one if len(one) <= limit else one[: limit - 1] + "…"


def line(s: Snapshot, now: float) -> str:
    """One plain line, for logs and pipes: `main stepping since 12 min step 120/500 loss 2.3101 ...`."""
    parts = [clean(s.job), s.state.value, f"since {duration(now - s.since)}"]
    if s.stage is not None and s.state in (State.LOADING, State.COMPILING):
        parts.append(clean(f"{s.stage.name} {s.stage.k}/{s.stage.n} {s.stage.what}" if s.stage.n else s.stage.name))
    if (p := s.progress) is not None and p.step is not None:
        parts.append(f"step {p.step}/{p.total}" if p.total else f"step {p.step}")
        parts += [f"loss {p.loss:.4f}"] if p.loss is not None else []
        parts += [f"acc {p.acc:.3f}"] if p.acc is not None else []
        parts += [f"tau {p.tau:.2f}"] if p.tau is not None else []
        parts += [f"{ktok(p.block_tok_s)} Ktok/s"] if p.block_tok_s is not None else []
        parts += [f"ring {p.ring_ready}/{p.ring_slots}"] if p.ring_slots else []
        parts += [f"ETA {duration(p.eta_s)}"] if p.eta_s is not None and s.exit is None else []
    if s.error is not None and s.state is State.CRASHED:
        parts.append(f"cause {clean(s.error.worker)}: {_short(s.error.message, 160)}")
    if s.exit is not None:
        parts.append(s.exit.describe())
    elif s.detail and not _said_below(s) and s.stage is None:
        parts.append(_short(s.detail, 160))
    return "  ".join(parts)


def change_key(s: Snapshot) -> tuple[object, ...]:
    """Two snapshots with the same key need no second line."""
    p = s.progress
    stage = (s.stage.name, s.stage.k, s.stage.what) if s.stage is not None else None
    return (s.state, s.attempt, s.life, stage if p is None or p.step is None else None, p.step if p else None)


@dataclass(frozen=True)
class Row:
    """One line of the table of jobs: a job, or `below` it one of its nodes."""

    name: str
    host: str
    snapshot: Snapshot
    now: float
    below: bool = False


def table(rows: Sequence[Row]) -> Table:
    """Many jobs, one line each."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    for head in ("job", "host", "state", "since"):
        grid.add_column(head, no_wrap=True, overflow="ellipsis")
    for head in ("step", "loss", "tau", "Ktok/s", "ETA"):
        grid.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        s = row.snapshot
        mark, style = STYLES[s.state]
        p = s.progress or Progress(t=s.t)
        step = DASH if p.step is None else f"{p.step}/{p.total}" if p.total else str(p.step)
        grid.add_row(
            Text(clean(row.name), "" if row.below else "bold"),
            Text(clean(row.host)),
            Text(f"{mark} {s.state.value}", style),
            duration(row.now - s.since),
            step,
            fixed(p.loss, 4),
            fixed(p.tau, 2),
            ktok(p.block_tok_s),
            DASH if s.exit is not None else duration(p.eta_s),
        )
    return grid


def job_json(s: Snapshot, now: float, host: str, root: str, *, deployed: bool) -> dict[str, Any]:
    """One entry of `status --json`: the snapshot, and what only the asker knows (docs/schemas/status.schema.json)."""
    known: dict[str, Any] = json.loads(dumps(s))
    return {"host": host, "root": root, "deployed": deployed, "now": now, "age_s": max(0.0, now - s.t), **known}
