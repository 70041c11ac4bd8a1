"""What is done on every node of a job: one answer of all of them, and the faults of each with its name.

The rule here: a node that fails never hides what came of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_ops.errors import DflashError
from dflash_ops.inventory import Job
from dflash_ops.parallel import Ended, side_by_side


class NodesFailed(DflashError):
    """Faults of some nodes of a job, each in full; `result` is what `--json` prints (nothing if it is empty).

    Exits with the largest code, which `result` says as well.
    """

    def __init__(self, errors: Sequence[DflashError], result: dict[str, Any]) -> None:
        self.errors = tuple(errors)
        self.exit_code = max(e.exit_code for e in errors)
        self.result = {**result, "exit": self.exit_code} if result else {}
        first = errors[0]
        super().__init__("\n".join(e.what for e in errors), first.where, first.next)


def at_node(part_label: str, error: DflashError) -> list[DflashError]:
    """An error (each one, where it carries several), with the node that it is of."""
    several: Sequence[DflashError] = getattr(error, "errors", ()) or (error,)
    for one in several:
        if not one.what.startswith(f"{part_label}: "):
            one.what = f"{part_label}: {one.what}"
            one.args = (one.what,)
    return list(several)


def on_nodes(
    job: Job, kind: str, parts: Sequence[Job], work: Callable[[Job], Any], *, most: int | None = None
) -> dict[str, Any]:
    """One thing done on all nodes of a job, on each by itself; what `--json` prints.

    Args:
        kind: name of the command. most: nodes at one time; None: all of them.

    Raises:
        NodesFailed: it failed on some; what came of the others is in its `result`.
    """
    ended = side_by_side(parts, work, lambda p: p.label, most=most or len(parts))
    return gathered(job, kind, parts, ended)


def gathered(job: Job, kind: str, parts: Sequence[Job], ended: Sequence[Ended[Any]]) -> dict[str, Any]:
    """What came of each node as one answer (docs/schemas/nodes.schema.json).

    Raises:
        NodesFailed: some failed.
    """
    errors = [e for part, end in zip(parts, ended, strict=True) if end.error for e in at_node(part.label, end.error)]
    result = {
        "schema": 1,
        "kind": f"{kind}.nodes",
        "job": job.name,
        "exit": 0,
        "nodes": [node_json(part, end.error, end.value) for part, end in zip(parts, ended, strict=True)],
    }
    if errors:
        raise NodesFailed(errors, result)
    return result


def node_json(job: Job, error: DflashError | None, result: Any) -> dict[str, Any]:
    """One node of `--json`."""
    rank = job.node.rank if job.node is not None else 0
    return {
        "node": rank, "host": job.host, "root": job.root, "exit": error.exit_code if error is not None else 0,
        "error": error.to_json() if error is not None else None, "result": result,
    }  # fmt: skip
