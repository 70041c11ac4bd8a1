"""`dflash-ops logs`: the job's output, raw; of a job on several machines each line with its node in front."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import InventoryOption, JobArgument, discard_output, load_job, print_json
from dflash_ops.cli.several import NodeOption
from dflash_ops.errors import DflashError
from dflash_ops.parallel import merged, values

if TYPE_CHECKING:
    from dflash_ops.client import JobClient
    from dflash_ops.inventory import Job


def command(
    job: JobArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay and print what comes.")] = False,
    worker: Annotated[
        str | None,
        typer.Option(
            "--worker",
            "-w",
            metavar="NAME",
            help="One worker's own log, e.g. drafter0.",
            autocompletion=complete.workers,
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", metavar="N", min=1, help="Else the newest.", autocompletion=complete.attempts),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="Lines from the end.")] = 100,
    node: NodeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line of the log.")] = False,
    inventory: InventoryOption = None,
) -> int:
    """The job's output, from one worker or all; on several machines from all nodes, or with --node from one."""
    from dflash_ops.cli.adopted import client_at
    from dflash_ops.cli.watching import asking, waiting
    from dflash_ops.hosts.factory import Hosts

    loaded, whole = load_job(inventory, job)
    parts = whole.at_node(node).parts
    hosts = Hosts(loaded)
    clients = [client_at(loaded, hosts, part) for part in parts]

    def read(client: JobClient) -> Iterator[bytes]:
        return client.logs(follow=follow, worker=worker, attempt=attempt, lines=lines)

    say = _as_json if json else _labelled if len(clients) > 1 else _raw
    try:
        if len(clients) == 1:
            lines_there = read(clients[0])
            with waiting().stage("logs", asking(parts)) if not follow else contextlib.nullcontext():
                first = next(lines_there, None)  # what takes long is the way to the machine
            if first is not None:
                say(parts[0], first)
            for raw in lines_there:
                say(parts[0], raw)
            return 0
        return _nodes(clients, read, say, side_by_side=follow)
    except BrokenPipeError:  # `| head` has seen enough
        discard_output()
        return 0
    finally:
        hosts.close()


def _raw(part: Job, raw: bytes) -> None:
    """As bytes: a trainer's output need not be UTF-8, and its colours are its own."""
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()


def _labelled(part: Job, raw: bytes) -> None:
    sys.stdout.buffer.write(b"node %d | %s\n" % (part.node.rank if part.node else 0, raw))
    sys.stdout.buffer.flush()


def _as_json(part: Job, raw: bytes) -> None:
    node = part.node.rank if part.node else None
    line = raw.decode("utf-8", "replace")
    print_json({"schema": 1, "kind": "logs", "job": part.name, "node": node, "line": line})


def _nodes(
    clients: Sequence[JobClient],
    read: Callable[[JobClient], Iterator[bytes]],
    say: Callable[[Job, bytes], None],
    *,
    side_by_side: bool,
) -> int:
    """Every node's lines: one node after the other, or as they come.

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
    for came in merged(clients, read, label) if side_by_side else in_turn():
        for rank, item in came:
            if isinstance(item, DflashError):
                errors += at_node(clients[rank].job.label, item)
            else:
                say(clients[rank].job, item)
    if errors:
        raise NodesFailed(errors, {})
    return 0
