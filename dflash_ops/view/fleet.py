"""Many jobs as a table: one row a job, which opens into its nodes where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from dflash_ops.view import status
from dflash_ops.view.nodes import NodeSeen, joined
from dflash_ops.view.status import Row


def table(jobs: Sequence[tuple[str, Sequence[NodeSeen], bool]]) -> Table:
    """`jobs`: name, what was seen of each node (of a job without nodes one), and whether its nodes are shown."""
    rows = []
    for name, nodes, opened in jobs:
        whole = joined(nodes) if len(nodes) > 1 else nodes[0]
        where = whole.host if len(nodes) == 1 or opened else f"{len(nodes)} nodes"
        rows.append(Row(name, where, whole.snapshot, whole.now))
        if opened and len(nodes) > 1:
            rows += [Row(f"  node {n.rank}", n.host, n.snapshot, n.now, below=True) for n in nodes]
    return status.table(rows)
