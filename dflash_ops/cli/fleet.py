"""What `status` needs for many jobs: the options that choose among them, one pass over all, and the table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import console, is_plain, render_error
from dflash_ops.cli.watching import asking, person_asked, waiting

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dflash_ops.client import Seen
    from dflash_ops.fleet.jobs import Filters, JobSeen
    from dflash_ops.hosts.factory import Hosts
    from dflash_ops.inventory import Inventory, Job

#: As contracts.State has them, which is not imported for a mere `--help` (a test holds them to it).
STATES = (
    "loading", "compiling", "stepping", "slow", "hung", "crashed", "finished", "stopped", "unreachable", "unknown",
)  # fmt: skip

StateOption = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="STATES",
        help="Only jobs in these states, as crashed,hung.",
        autocompletion=complete.one_of(*STATES),
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="PATTERNS",
        help="Only jobs on these hosts (or on containers of these), as 'gpu*,old'.",
        autocompletion=complete.hosts,
    ),
]
JobOption = Annotated[
    str | None,
    typer.Option("--job", metavar="PATTERNS", help="Only jobs so called, as 'main*'.", autocompletion=complete.jobs),
]
SortOption = Annotated[
    str | None,
    typer.Option(
        "--sort",
        metavar="ORDER",
        help="trouble (as the table has it), name, host, since, eta, file (as --json has it).",
        autocompletion=complete.one_of("trouble", "name", "host", "since", "eta", "file"),
    ),
]
NodesOption = Annotated[bool, typer.Option("--nodes", help="Each node of a job on several machines, too.")]
DeadlineOption = Annotated[
    float,
    typer.Option("--deadline", metavar="SECONDS", min=1, max=600, help="For each machine's answer."),
]

#: Seconds before a terminal is told who is waited for, and most of those who are named.
_PATIENCE_S = 1.0
_NAMED = 4

#: Machines that could not be asked of which it is told why.
_REASONS = 10


def look_all(loaded: Inventory, jobs: Sequence[Job], *, deadline: float, quiet: bool = False) -> list[JobSeen]:
    """One pass over all jobs, in their order; meanwhile a terminal is shown what is known. `quiet`: it is not."""
    from dflash_ops.fleet.jobs import JobSeen, look
    from dflash_ops.hosts.factory import Hosts

    hosts = Hosts(loaded)
    screen = _Screen(len(jobs)) if not quiet and not is_plain(sys.stdout) else None
    known: dict[str, JobSeen] = {}
    stack = contextlib.ExitStack()
    stage = stack.enter_context(waiting().stage("status", asking(jobs))) if screen is None else None
    try:
        for event in look(loaded, jobs, asker(loaded, hosts, jobs), deadline=deadline):
            if isinstance(event, JobSeen):
                known[event.job.name] = event
                if stage is not None and len(jobs) > 1:
                    stage.count(len(known), len(jobs), "jobs")
            if screen is not None:
                screen.draw(list(known.values()), [] if isinstance(event, JobSeen) else event)
    finally:
        stack.close()
        if screen is not None:
            screen.close()
        hosts.close()
    return [known[job.name] for job in jobs]


def asker(loaded: Inventory, hosts: Hosts, jobs: Sequence[Job]) -> Callable[[Job, float], Seen]:
    """How one job or node is looked at. Clients are kept: a machine that is away is so since its first silence."""
    from dflash_ops.cli.adopted import client_at

    clients = {id(part): client_at(loaded, hosts, part) for job in jobs for part in job.parts}
    return lambda part, deadline: clients[id(part)].snapshot(deadline=deadline)


class _Screen:
    """The rows that are known and who is waited for, gone when the pass is over."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._live: Any = None
        self._rows: list[JobSeen] = []

    def draw(self, known: list[JobSeen], waiting: Sequence[tuple[Job, float]]) -> None:
        self._rows = known
        if person_asked():
            return
        longest = max((silent for _, silent in waiting), default=0.0)
        if self._live is None:
            if longest < _PATIENCE_S:
                return
            from rich.live import Live

            self._live = Live(console=console(), auto_refresh=False, transient=True, vertical_overflow="ellipsis")
            self._live.start()
        if waiting:
            self._live.update(self._shown(waiting), refresh=True)

    def _shown(self, waiting: Sequence[tuple[Job, float]]) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from dflash_ops.fleet.jobs import ordered
        from dflash_ops.view.fleet import table
        from dflash_ops.view.text import clean, duration

        rows = ordered(self._rows, "trouble", [one.job for one in self._rows])
        slow = sorted(waiting, key=lambda item: -item[1])
        names = [f"{clean(job.host)} ({duration(silent)})" for job, silent in slow[:_NAMED]]
        more = f" and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
        line = Text(f"waiting for {', '.join(names)}{more}", "bright_black")
        return Group(line, table([(o.job.name, o.nodes, False) for o in rows])) if rows else line

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def show(seen: Sequence[JobSeen], filters: Filters, *, order: str, jobs: Sequence[Job], nodes: bool) -> None:
    """The table of those that are meant, and the sentence below it."""
    from dflash_ops.fleet.jobs import counts, ordered, summary, told
    from dflash_ops.view.fleet import table

    out = console()
    rows = ordered(filters.shown(seen), order, jobs)
    if not rows:
        words = " or ".join(sorted(state.value for state in filters.states))
        out.print(f"no job is {words}; {len(seen)} asked: {told(counts(seen))}", markup=False)
        return
    out.print(table([(o.job.name, o.nodes, nodes or len(rows) == 1) for o in rows]))
    out.print(summary(rows, len(seen)), style="bright_black", markup=False)
    _why_away(rows)


def _why_away(rows: Sequence[JobSeen]) -> None:
    """Why machines could not be asked, one line each, on standard error: the table has no room for it."""
    from dflash_ops.contracts import State
    from dflash_ops.view.text import clean

    away = [(o.job.name, n) for o in rows for n in o.nodes if n.snapshot.state is State.UNREACHABLE]
    for name, node in away[:_REASONS]:
        print(f"{clean(name)} on {clean(node.host)}: {clean(node.snapshot.detail)[:300]}", file=sys.stderr)
    if len(away) > _REASONS:
        print(f"and {len(away) - _REASONS} more that could not be asked", file=sys.stderr)


def show_errors(seen: Sequence[JobSeen]) -> None:
    """Errors of several jobs, each in full; a machine that could not be asked has its row."""
    for one in seen:
        for part, error in zip(one.job.parts, one.errors, strict=True):
            if error is not None:
                label = one.job.name if part.node is None else f"{one.job.name} {part.label}"
                print(f"{label}:", file=sys.stderr)
                render_error(error, sys.stderr)
