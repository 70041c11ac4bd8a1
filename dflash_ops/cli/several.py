"""Commands for several jobs: hosts side by side, the jobs of one host one after the other.

The rule here: one bad host never hides the others. Every job gets its own line and its own exit code; the command's is
the largest of them (docs/contracts.md, Exit codes).
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli.common import load_inventory, render_error
from dflash_ops.errors import DflashError, UsageError

if TYPE_CHECKING:
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.view.stages import Stages

JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB]...", help="Jobs of the inventory; not needed where it has only one."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All jobs of the inventory.")]

#: Hosts that are worked on at one time.
SIDE_BY_SIDE = 8


@dataclass
class Outcome:
    """What came of one job: `result` is what `--json` prints of it."""

    job: Job
    code: int = 0
    result: Any = None
    error: DflashError | None = None
    lines: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        error = None
        if self.error is not None:
            error = {"type": type(self.error).__name__, "what": self.error.what, "where": self.error.where,
                     "next": self.error.next}  # fmt: skip
        return {"job": self.job.name, "host": self.job.host, "exit": self.code, "error": error, "result": self.result}


#: Does one job; gives what `--json` prints, or raises.
Work = Callable[["Job", "Host", str, "Stages"], Any]


def chosen(inventory: Path | None, names: Sequence[str] | None, every: bool) -> tuple[Inventory, list[Job]]:
    """The jobs that are meant, each once, in the order in which they are named (of the file, with `--all`).

    Raises:
        InventoryError, UsageError: no inventory, no such job, or names and `--all` together.
    """
    loaded = load_inventory(inventory)
    if every and names:
        raise UsageError("--all and names of jobs exclude each other", "--all", "give one of them")
    if every:
        if not loaded.jobs:
            raise UsageError("the inventory has no job", loaded.file, "add a [jobs.NAME] table")
        return loaded, list(loaded.jobs.values())
    return loaded, [loaded.job(name) for name in dict.fromkeys(names)] if names else [loaded.job(None)]


def each(
    loaded: Inventory, jobs: Sequence[Job], work: Callable[[Job, Host, str], Any], *, accept_new: bool = False
) -> list[Outcome]:
    """`work(job, host, python)` for every job, hosts side by side; outcomes in the order of `jobs`.

    Ctrl-C leaves at once: the workers are daemons, and what they began on a machine is left in a state that the next
    command understands.
    """
    from dflash_ops.hosts.factory import Hosts

    outcomes = {job.name: Outcome(job) for job in jobs}
    hosts = Hosts(loaded, accept_new=accept_new)
    opened = {name: hosts[name] for name in dict.fromkeys(job.host for job in jobs)}
    by_host: dict[str, list[Job]] = {}
    for job in jobs:
        by_host.setdefault(job.host, []).append(job)
    todo: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
    for group in by_host.values():
        todo.put(group)
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def one_host(group: list[Job]) -> None:
        for job in group:
            outcome = outcomes[job.name]
            try:
                outcome.result = work(job, opened[job.host], loaded.host_of(job).python)
            except DflashError as error:
                outcome.error, outcome.code = error, error.exit_code
                outcome.result = getattr(error, "result", None)
            except Exception as error:  # noqa: BLE001  # a fault of one job's thread must not be lost with it
                outcome.code = 1
                outcome.error = DflashError(
                    f"unexpected {type(error).__name__}: {error}",
                    f"job {job.name}",
                    "this is a fault of dflash-ops; name this job alone with --debug to see the traceback",
                )

    def worker() -> None:
        try:
            while True:
                one_host(todo.get_nowait())
        except queue.Empty:
            pass
        finally:
            ended.put(None)

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(min(SIDE_BY_SIDE, len(by_host)))]
    for thread in threads:
        thread.start()
    for _ in threads:
        ended.get()
    hosts.close()
    return [outcomes[job.name] for job in jobs]


def perform(loaded: Inventory, jobs: Sequence[Job], kind: str, work: Work, *, as_json: bool) -> int:
    """One job as ever; several with labelled lines, a line for each at the end, and the largest exit code.

    Raises:
        DflashError: of a single job.
    """
    from dflash_ops.cli.watching import print_json, stages
    from dflash_ops.hosts.factory import open_host
    from dflash_ops.view.stages import Labelled

    if len(jobs) == 1:
        job = jobs[0]
        host = open_host(loaded, job.host)
        try:
            result = work(job, host, loaded.host_of(job).python, stages())
        except DflashError as error:
            if as_json and getattr(error, "result", None):
                print_json(error.result)  # type: ignore[attr-defined]
            raise
        finally:
            host.close()
        if as_json:
            print_json(result)
        return 0

    def labelled(job: Job, host: Host, python: str) -> Any:
        mine = Labelled(sys.stderr, job.name)
        try:
            return work(job, host, python, mine)
        except DflashError as error:
            mine.note(f"error: {error}")
            raise

    outcomes = each(loaded, jobs, labelled)
    width = max(len(o.job.name) for o in outcomes)
    for outcome in outcomes:
        text = "done" if outcome.error is None else f"exit code {outcome.code}: {outcome.error.what.splitlines()[0]}"
        print(f"{outcome.job.name:<{width}}  {outcome.job.host}  {text}", file=sys.stderr)
    if as_json:
        code = worst(outcomes)
        print_json({"schema": 1, "kind": f"{kind}.all", "exit": code, "jobs": [o.to_json() for o in outcomes]})
    return worst(outcomes)


def worst(outcomes: Sequence[Outcome]) -> int:
    return max((o.code for o in outcomes), default=0)


def show_errors(outcomes: Sequence[Outcome]) -> None:
    """Errors of several jobs, each in full."""
    for outcome in outcomes:
        if outcome.error is not None:
            print(f"{outcome.job.name}:", file=sys.stderr)
            render_error(outcome.error, sys.stderr)
