"""`dflash-ops logs`: the job's output, raw; of a job on several machines each line with its node in front."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, load_job
from dflash_ops.cli.several import NodeOption
from dflash_ops.errors import DflashError
from dflash_ops.parallel import merged, values

if TYPE_CHECKING:
    from dflash_ops.client import JobClient


def command(
    job: JobArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay and print what comes.")] = False,
    worker: Annotated[
        str | None, typer.Option("--worker", "-w", metavar="NAME", help="One worker's own log, e.g. drafter0.")
    ] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", metavar="N", min=1, help="Else the newest.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="Lines from the end.")] = 100,
    node: NodeOption = None,
    inventory: InventoryOption = None,
) -> int:
    """The job's output, from one worker or all; on several machines from all nodes, or with --node from one."""
    from dflash_ops.cli.adopted import client_of
    from dflash_ops.hosts.factory import Hosts

    loaded, whole = load_job(inventory, job)
    parts = whole.at_node(node).parts
    hosts = Hosts(loaded)
    clients = [client_of(hosts[part.host], part, loaded.host_of(part).python) for part in parts]

    def read(client: JobClient) -> Iterator[bytes]:
        return client.logs(follow=follow, worker=worker, attempt=attempt, lines=lines)

    out = sys.stdout.buffer
    try:
        if len(clients) == 1:
            for raw in read(clients[0]):
                # As bytes: a trainer's output need not be UTF-8, and its colours are its own.
                out.write(raw + b"\n")
                out.flush()
            return 0
        return _nodes(clients, read, side_by_side=follow)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stdout = None
        return 0
    finally:
        hosts.close()


def _nodes(clients: Sequence[JobClient], read: Callable[[JobClient], Iterator[bytes]], *, side_by_side: bool) -> int:
    """Every node's lines, each with its node in front: one node after the other, or as they come.

    Raises:
        NodesFailed: of some nodes; what the others say was printed.
    """
    from dflash_ops.nodes import NodesFailed, at_node

    def label(client: JobClient) -> str:
        return client.job.label

    def in_turn() -> Iterator[Iterable[tuple[int, bytes | DflashError]]]:
        for rank, client in enumerate(clients):
            yield ((rank, item) for item in values(client, read, label))

    errors: list[DflashError] = []
    out = sys.stdout.buffer
    for came in merged(clients, read, label) if side_by_side else in_turn():
        for rank, item in came:
            if isinstance(item, DflashError):
                errors += at_node(clients[rank].job.label, item)
            else:
                out.write(b"node %d | %s\n" % (rank, item))
                out.flush()
    if errors:
        raise NodesFailed(errors, {})
    return 0
