"""`triage --job` of a job on several machines: every node looked at, the first cause named across them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_ops.client import JobClient
from dflash_ops.collect.job import Examined, examine
from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.errors import CommandFailed, DflashError
from dflash_ops.inventory import Inventory
from dflash_ops.nodes import NodesFailed, at_node
from dflash_ops.parallel import SIDE_BY_SIDE, side_by_side
from dflash_ops.triage.across import NodeCase, first

#: Seconds for the question what time it is.
CLOCK_S = 20.0

#: Seconds by which a time in error.json may be wrong: whole seconds only.
WHOLE_S = 1.0


@dataclass(frozen=True)
class Across:
    """The nodes of a job: `chosen` is the one whose failure came first, `diagnosis` its own with why it was chosen.

    `errors` has, by number of the node, why it could not be looked at.
    """

    cases: tuple[NodeCase, ...]
    chosen: NodeCase
    diagnosis: Diagnosis
    errors: dict[int, DflashError]


def examine_nodes(
    clients: Sequence[JobClient],
    inventory: Inventory,
    *,
    attempt: int | None = None,
    playbooks: Sequence[str] = (),
    mib: float = 16.0,
) -> Across:
    """Diagnose an attempt on every node (None: each one's newest), and name the first cause.

    Raises:
        NodesFailed: no node could be looked at. InventoryError, UsageError, ContractError: as `examine`.
    """

    def one(item: tuple[int, JobClient]) -> NodeCase:
        rank, client = item
        ahead, unsure = clock_of(client)
        examined = examine(client, inventory, attempt=attempt, playbooks=playbooks, mib=mib)
        return _case(rank, client, examined, ahead, unsure)

    ended = side_by_side(list(enumerate(clients)), one, lambda i: i[1].job.label, most=SIDE_BY_SIDE)
    errors = {rank: end.error for rank, end in enumerate(ended) if end.error is not None}
    cases = tuple(end.value for end in ended if end.value is not None)
    if not cases:
        said = [e for rank, error in errors.items() for e in at_node(clients[rank].job.label, error)]
        raise NodesFailed(said, {})
    chosen, why = first(cases)
    missing = [f"{clients[rank].job.label}: {error.what}" for rank, error in errors.items()]
    d = chosen.diagnosis
    facts = {**d.facts, "missing": [*missing, *d.facts.get("missing", ())]} if missing else d.facts
    return Across(cases, chosen, replace(d, why=(*why, *d.why), facts=facts), errors)


def clock_of(client: JobClient) -> tuple[float, float]:
    """Seconds that the clock there is ahead of ours, and by how much that may be wrong.

    Raises:
        HostError: it cannot be asked. CommandFailed: it has no such Python.
    """
    before = time.time()
    done = client.host.run([client.python, "-I", "-S", "-c", "import time; print(time.time())"], deadline=CLOCK_S)
    after = time.time()
    try:
        there = float(done.text)
    except ValueError:
        said = done.error_text.strip()[-200:] or done.text[:200]
        raise CommandFailed(f"its clock cannot be asked: {said!r}", client.job.host, "dflash-ops doctor") from None
    return there - (before + after) / 2, (after - before) / 2


def _case(rank: int, client: JobClient, seen: Examined, ahead: float, unsure: float) -> NodeCase:
    rough = WHOLE_S if seen.failed_whole else 0.0
    return NodeCase(
        rank,
        client.job.label,
        seen.attempt,
        seen.alive,
        seen.diagnosis,
        cascade=seen.cascade,
        failed=seen.failed - ahead if seen.failed is not None else None,
        clock_s=ahead,
        unsure_s=unsure + rough,
    )
