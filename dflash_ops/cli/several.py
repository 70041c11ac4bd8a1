"""Commands for several jobs: hosts side by side, the jobs of one host one after the other.

The rule here: one bad host never hides the others. Every job gets its own line and its own exit code; the command's is
the largest of them (docs/contracts.md, Exit codes).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import load_inventory, render_error
from dflash_ops.errors import DflashError, UsageError
from dflash_ops.parallel import SIDE_BY_SIDE, Ended, side_by_side, tried

if TYPE_CHECKING:
    from dflash_ops.hosts.base import Host
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.view.stages import Stages

JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB]...",
        help="Jobs of the inventory; not needed where it has only one.",
        autocompletion=complete.jobs,
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="All jobs of the inventory.")]


@dataclass
class Outcome:
    """What came of one job: `result` is what `--json` prints of it."""

    job: Job
    code: int = 0
    result: Any = None
    error: DflashError | None = None
    lines: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job.name,
            "host": ", ".join(self.job.hosts),
            "exit": self.code,
            "error": self.error.to_json() if self.error is not None else None,
            "result": self.result,
        }


NodeOption = Annotated[
    int | None, typer.Option("--node", metavar="K", min=0, help="One node of a job on several machines, from 0.")
]

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


def at_node(jobs: list[Job], node: int | None) -> list[Job]:
    """The jobs, or with `--node` that node of the one that is meant.

    Raises:
        UsageError: several jobs are meant, or there is no such node.
    """
    if node is None:
        return jobs
    if len(jobs) != 1:
        raise UsageError("--node is one of one job's nodes", f"--node {node}", "name that job")
    return [jobs[0].at_node(node)]


def each(
    loaded: Inventory,
    jobs: Sequence[Job],
    work: Callable[[Job, Host, str], Any],
    *,
    accept_new: bool = False,
    what: str = "",
) -> list[Outcome]:
    """`work(job, host, python)` for every job or node, hosts side by side; outcomes in the order of `jobs`.

    Args:
        what: said on standard error where it takes long; empty: who is asked.
    """
    from dflash_ops.cli.watching import asking, waiting

    answered = itertools.count(1)
    with waiting().stage("waiting", what or asking(jobs)) as stage:

        def one(job: Job, hosts: Mapping[str, Host]) -> Any:
            try:
                return work(job, hosts[job.host], loaded.host_of(job).python)
            finally:
                if len(jobs) > 1:
                    stage.count(next(answered), len(jobs), "answers")

        return _each(loaded, jobs, one, accept_new=accept_new)


def each_part(
    loaded: Inventory,
    jobs: Sequence[Job],
    work: Callable[[Job, Host, str], Any],
    *,
    accept_new: bool = False,
    what: str = "",
) -> list[list[Outcome]]:
    """As `each`, on every node of jobs that have some: for each job the outcomes of its nodes, or its own."""
    parts = [part for job in jobs for part in job.parts]
    flat = iter(each(loaded, parts, work, accept_new=accept_new, what=what))
    return [[next(flat) for _ in job.parts] for job in jobs]


def each_whole(
    loaded: Inventory,
    jobs: Sequence[Job],
    kind: str,
    work: Callable[[Job, Host, str], Any],
) -> list[Outcome]:
    """As `each_part`, with one outcome for each job: that of all its nodes, as `--json` prints it."""
    from dflash_ops.nodes import gathered

    outcomes = []
    for job, mine in zip(jobs, each_part(loaded, jobs, work), strict=True):
        if not job.nodes:
            outcomes += mine
            continue
        whole = Outcome(job)
        try:
            whole.result = gathered(job, kind, job.nodes, [Ended(o.result, o.error) for o in mine])
        except DflashError as error:
            whole.error, whole.code, whole.result = error, error.exit_code, error.result
        outcomes.append(whole)
    return outcomes


def _each(
    loaded: Inventory,
    jobs: Sequence[Job],
    work: Callable[[Job, Mapping[str, Host]], Any],
    *,
    accept_new: bool = False,
) -> list[Outcome]:
    """`work(job, hosts)` for every job; jobs that share a host are done one after the other."""
    from dflash_ops.hosts.factory import Hosts

    outcomes = [Outcome(job) for job in jobs]
    hosts = Hosts(loaded, accept_new=accept_new)
    opened = {name: hosts[name] for job in jobs for name in job.hosts}

    def in_turn(group: Sequence[Outcome]) -> None:
        for outcome in group:
            ended = tried(outcome.job, lambda job: work(job, opened), lambda job: f"job {job.name}")
            outcome.result = ended.value
            if ended.error is not None:
                outcome.error, outcome.code = ended.error, ended.error.exit_code
                outcome.result = ended.error.result

    side_by_side(_apart(outcomes), in_turn, lambda group: group[0].job.name, most=SIDE_BY_SIDE)
    hosts.close()
    return outcomes


def _apart(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Groups that have no host in common, so that they can be worked on at one time; in order."""
    groups: list[list[Outcome]] = []
    for outcome in outcomes:
        names = set(outcome.job.hosts)
        mine = [g for g in groups if any(names & set(o.job.hosts) for o in g)]
        groups = [g for g in groups if g not in mine]
        groups.append([*(o for g in mine for o in g), outcome])
    return groups


@dataclass(frozen=True)
class Part:
    """One node of a job, and the way to it."""

    job: Job
    host: Host
    python: str
    stages: Stages


#: Does one job on all its nodes; `stages` is for what is said of the whole job.
Together = Callable[["Job", Sequence[Part], "Stages"], Any]


def parts_of(loaded: Inventory, job: Job, hosts: Mapping[str, Host], prefix: str = "") -> list[Part]:
    """The nodes of a job, each telling its stages with its own label."""
    from dflash_ops.view.stages import Labelled

    return [
        Part(node, hosts[node.host], loaded.host_of(node).python, Labelled(sys.stderr, prefix + node.label))
        for node in job.nodes
    ]


def on_each_node(kind: str, work: Work) -> Together:
    """`work` on all nodes of a job at one time, each by itself."""

    def together(job: Job, parts: Sequence[Part], progress: Stages) -> Any:
        from dflash_ops.nodes import on_nodes

        ways = {part.job.label: part for part in parts}

        def at(node: Job) -> Any:
            part = ways[node.label]
            return work(node, part.host, part.python, part.stages)

        return on_nodes(job, kind, job.nodes, at)

    return together


def perform(
    loaded: Inventory,
    jobs: Sequence[Job],
    kind: str,
    work: Work,
    *,
    as_json: bool,
    together: Together | None = None,
) -> int:
    """One job as ever; several with labelled lines, a line for each at the end, and the largest exit code.

    Args:
        together: `work` for a job of several nodes; None: `work` on each of them by itself.

    Raises:
        DflashError: of a single job.
    """
    from dflash_ops.cli.watching import print_json, stages
    from dflash_ops.hosts.factory import Hosts
    from dflash_ops.view.stages import Labelled, Plain

    together = on_each_node(kind, work) if together is None else together
    if len(jobs) == 1:
        job = jobs[0]
        hosts = Hosts(loaded)
        try:
            if job.nodes:
                opened = {name: hosts[name] for name in job.hosts}
                result = together(job, parts_of(loaded, job, opened), Plain(sys.stderr))
            else:
                result = work(job, hosts[job.host], loaded.host_of(job).python, stages())
        finally:
            hosts.close()
        if as_json:
            print_json(result)
        return 0

    def labelled(job: Job, hosts: Mapping[str, Host]) -> Any:
        mine = Labelled(sys.stderr, job.name)
        try:
            if job.nodes:
                return together(job, parts_of(loaded, job, hosts, f"{job.name}, "), mine)
            return work(job, hosts[job.host], loaded.host_of(job).python, mine)
        except DflashError as error:
            mine.note(f"error: {error}")
            raise

    outcomes = _each(loaded, jobs, labelled)
    width = max(len(o.job.name) for o in outcomes)
    for outcome in outcomes:
        text = "done" if outcome.error is None else f"exit code {outcome.code}: {outcome.error.what.splitlines()[0]}"
        print(f"{outcome.job.name:<{width}}  {', '.join(outcome.job.hosts)}  {text}", file=sys.stderr)
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
