"""What the shell offers after TAB: jobs, hosts, workers, releases, attempts, kinds.

The rule here: no network, no error, nothing imported before it is asked for. What lies on this machine is read; of a
job elsewhere only what the inventory says is offered. A fault of the inventory offers nothing: the command tells it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from dflash_ops.inventory import Inventory, Job

#: What typer hands the shell: a word, and what it is.
Offer = tuple[str, str]


def jobs(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Jobs of the inventory that are not named yet."""
    return _offered(ctx, incomplete, _jobs)


def hosts(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Hosts of the inventory."""
    return _offered(ctx, incomplete, lambda loaded, _: ((h.name, h.kind) for h in loaded.hosts.values()))


def workers(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Workers: those that wrote a log, else those that the inventory makes."""
    return _offered(ctx, incomplete, _workers)


def attempts(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Numbers of a local job's attempts, the newest first."""
    return _offered(ctx, incomplete, _attempts)


def releases_and_jobs(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The words of `rollback`: releases of a local job, and jobs."""

    def both(loaded: Inventory, ctx: typer.Context) -> Iterator[Offer]:
        for job in loaded.jobs.values():
            for folder in _folders(loaded, job, "releases"):
                if not folder.name.startswith("."):
                    yield folder.name, f"release of {job.name}"
        yield from _jobs(loaded, ctx)

    return _offered(ctx, incomplete, both)


def kinds(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Kinds of failure."""
    from dflash_ops.errors import DflashError
    from dflash_ops.playbooks import load_documents
    from dflash_ops.triage import compile_playbooks

    try:
        known = compile_playbooks(load_documents(ctx.params.get("playbooks") or [])).kinds
    except (DflashError, OSError):
        return []
    return [(name, known[name].title) for name in sorted(known) if name.startswith(incomplete)]


def one_of(*words: str) -> Callable[[str], list[str]]:
    """A fixed choice."""

    def offer(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offer


def _offered(
    ctx: typer.Context, incomplete: str, words: Callable[[Inventory, typer.Context], Iterable[Offer]]
) -> list[Offer]:
    from dflash_ops.errors import DflashError
    from dflash_ops.inventory import find_inventory, load

    try:
        loaded = load(find_inventory(ctx.params.get("inventory")))
        offers = dict(words(loaded, ctx))
    except (DflashError, OSError):
        return []
    return [(word, text) for word, text in offers.items() if word.startswith(incomplete)]


def _jobs(loaded: Inventory, ctx: typer.Context) -> Iterator[Offer]:
    said: Any = ctx.params.get("job") or ctx.params.get("words") or ()
    named = (said,) if isinstance(said, str) else tuple(said)
    for job in loaded.jobs.values():
        if job.name not in named:
            yield job.name, f"on {', '.join(job.hosts)}"


def _meant(loaded: Inventory, ctx: typer.Context) -> Job:
    """
    Raises:
        UsageError: no job, or not one alone.
    """
    said: Any = ctx.params.get("job") or [word for word in ctx.args if word in loaded.jobs]  # an option is unfinished
    return loaded.job(said if isinstance(said, str) else said[0] if said else None)


def _folders(loaded: Inventory, job: Job, below: str) -> list[Path]:
    """What lies in a folder of a job on this machine, the newest first; of another machine nothing."""
    if loaded.host_of(job).kind != "local":
        return []
    try:
        with os.scandir(Path(job.root) / below) as found:
            dated = [(entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in found]
    except OSError:
        return []
    return [Path(path) for _, path in sorted(dated, reverse=True)]


def _attempts(loaded: Inventory, ctx: typer.Context) -> list[Offer]:
    job = _meant(loaded, ctx)
    numbers = sorted((int(f.name) for f in _folders(loaded, job, "run/attempts") if f.name.isdigit()), reverse=True)
    return [(str(number), f"attempt of {job.name}") for number in numbers]


def _workers(loaded: Inventory, ctx: typer.Context) -> list[Offer]:
    job = _meant(loaded, ctx)
    numbers = sorted((int(f.name) for f in _folders(loaded, job, "run/attempts") if f.name.isdigit()), reverse=True)
    wanted = ctx.params.get("attempt") or (numbers[0] if numbers else 0)
    logs = _folders(loaded, job, f"run/attempts/{wanted}/logs")
    names = sorted(f.name.removesuffix(".log") for f in logs if f.name.endswith(".log"))
    if not names and job.trainer is not None:
        names = [f"target{n}" for n in range(len(job.trainer.target_devices))]
        names += [f"drafter{n}" for n in range(len(job.trainer.drafter_devices))]
    return [(name, f"worker of {job.name}") for name in names]
