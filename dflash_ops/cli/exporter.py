"""`dflash-ops exporter`: what `status` sees, for Prometheus, over HTTP or as a file of node_exporter's collector."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption
from dflash_ops.cli.several import AllOption, JobsArgument, chosen

if TYPE_CHECKING:
    from pathlib import Path

    from dflash_ops.client import Seen
    from dflash_ops.fleet.ask import Asking
    from dflash_ops.hosts.factory import Hosts
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.tell.exporter import Board
    from dflash_ops.tell.metrics import History, Told

LISTEN = "127.0.0.1:9400"

#: Seconds between two readings of one job's journal, which is read only where it has grown.
_JOURNAL_S = 60.0

#: Looks that may be missed before the last one is too old to be told.
_MISSED = 3


def command(
    job: JobsArgument = None,
    every: AllOption = False,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help=f"Where to serve /metrics; else {LISTEN}.")
    ] = None,
    interval: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=1, max=3600, help="Between two looks at a job.")
    ] = 15.0,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=1, max=600, help="For each machine's answer.")
    ] = 10.0,
    textfile: Annotated[
        str | None,
        typer.Option(
            "--textfile",
            metavar="PATH",
            help="Write PATH (*.prom) for node_exporter instead of listening; with --listen, too.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One look, for cron: write the file, or print the metrics; then end.")
    ] = False,
    inventory: InventoryOption = None,
) -> int:
    """Metrics of jobs for Prometheus (docs/exporter.md); all jobs of the inventory where none is named."""
    from dflash_ops.errors import UsageError
    from dflash_ops.fleet.ask import Asking
    from dflash_ops.fleet.jobs import GRACE_S, machine_of
    from dflash_ops.hosts.factory import Hosts
    from dflash_ops.tell import exporter
    from dflash_ops.view.text import counted

    exporter.needed()
    if once and listen is not None:
        raise UsageError("--once ends at once: there is nothing to listen for", "--listen", "leave one of them out")
    path = exporter.textfile(textfile) if textfile is not None else None
    where = exporter.address(LISTEN if listen is None else listen)
    loaded, jobs = chosen(inventory, job, every or not job)
    parts = [part for one in jobs for part in one.parts]
    board = exporter.Board(len(parts), max(_MISSED * interval, interval + deadline + GRACE_S))
    serving = not once and (path is None or listen is not None)
    server = exporter.Server(board, *where) if serving else None
    with Hosts(loaded) as hosts:
        looks = Looks(loaded, hosts, parts, board, deadline)
        asking = Asking(
            parts,
            looks.look,
            machine=lambda part: machine_of(loaded, part),
            name=lambda part: f"host {part.host}",
            every=None if once else interval,
            give_up_s=2 * (deadline + GRACE_S),
        )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: asking.stop())
        said = server.url if server is not None else path
        if not once:
            count = counted(len(jobs), "job")
            print(f"exporter: {count}, every {interval:g} s: {said}", file=sys.stderr, flush=True)
        try:
            return _run(asking, looks, board, path, interval, once=once)
        finally:
            if server is not None:
                server.close()


def _run(
    asking: Asking[Job, Told], looks: Looks, board: Board, path: Path | None, interval: float, *, once: bool
) -> int:
    from dflash_ops.cli.common import render_error
    from dflash_ops.errors import DflashError
    from dflash_ops.fleet.ask import Answer
    from dflash_ops.tell.exporter import write

    written, faulty = time.monotonic(), False
    for event in asking:
        if isinstance(event, Answer):
            looks.take(event)
        if once or path is None or time.monotonic() - written < interval:
            continue
        written = time.monotonic()
        try:
            write(board, path)
            faulty = False
        except DflashError as error:  # a disk that is full now may not be so later
            board.fault(error)
            if not faulty:
                render_error(error, sys.stderr)
            faulty = True
    if once and path is None:
        sys.stdout.write(board.text().decode())
    elif path is not None:
        write(board, path)
    return 0


class Looks:
    """How one job or node is looked at, and what its journal said when it had last grown."""

    def __init__(self, loaded: Inventory, hosts: Hosts, parts: list[Job], board: Board, deadline: float) -> None:
        from dflash_ops.cli.adopted import client_at

        self._board, self._deadline, self._parts = board, deadline, parts
        self._clients = {id(p): client_at(loaded, hosts, p) for p in parts}
        self._journals: dict[int, tuple[int, float, History]] = {}

    def look(self, part: Job) -> Told:
        """One command there; a second one where its journal has grown, at most once a minute.

        Raises:
            DflashError: what it answered cannot be understood.
        """
        from dflash_ops.errors import HostUnreachable
        from dflash_ops.tell.metrics import Told

        began = time.monotonic()
        seen: Seen = self._clients[id(part)].snapshot(deadline=self._deadline)
        if not seen.reachable:
            raise HostUnreachable(seen.snapshot.detail, f"host {part.host}")
        history = self._history(part, seen)
        return Told(*_names(part), seen.snapshot, seen.now, history, time.monotonic() - began)

    def _history(self, part: Job, seen: Seen) -> History | None:
        from dflash_ops.contracts import Event, from_dict
        from dflash_ops.errors import DflashError
        from dflash_ops.tell.metrics import History

        last = seen.snapshot.last_event
        if part.adopted or last is None:
            return None
        known = self._journals.get(id(part))
        now = time.monotonic()
        if known is not None and (known[0] == last.seq or now - known[1] < _JOURNAL_S):
            return known[2]
        try:
            said = self._clients[id(part)].ask("journal", "--json", deadline=self._deadline)
            history = History.of([from_dict(Event, e, "journal") for e in said["events"]])
        except DflashError as error:  # the look itself counts
            self._board.fault(error)
            return known[2] if known is not None else None
        self._journals[id(part)] = (last.seq, now, history)
        return history

    def take(self, event: object) -> None:
        """Puts what came of a look on the board."""
        from dflash_ops.fleet.ask import Answer
        from dflash_ops.tell.metrics import Told

        assert isinstance(event, Answer)
        part = self._parts[event.index]
        told = event.ended.value or Told(*_names(part), None, look_s=event.took_s)
        self._board.put(event.index, told, event.ended.error)


def _names(part: Job) -> tuple[str, str, str]:
    node = part.node
    return part.name, part.host, str(node.rank) if node is not None and node.count > 1 else ""
