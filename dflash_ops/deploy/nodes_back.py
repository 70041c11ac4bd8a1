"""`rollback` of a job on several machines: all its nodes to one release, or none of them (docs/deploy.md)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from dflash_ops.deploy.back import Rollback
from dflash_ops.deploy.decide import Options
from dflash_ops.deploy.nodes import stop_all
from dflash_ops.errors import DflashError, StartError, UsageError
from dflash_ops.inventory import Job
from dflash_ops.nodes import NodesFailed, at_node, node_json
from dflash_ops.parallel import SIDE_BY_SIDE, Ended, side_by_side
from dflash_ops.view.stages import Stages


class NodesRollback:
    """One rollback of one job of several nodes; the arguments are as `NodesDeployment`'s."""

    def __init__(self, job: Job, parts: Sequence[Rollback], options: Options, stages: Stages) -> None:
        self.job, self.parts, self.options, self.stages = job, parts, options, stages
        self._errors: dict[int, DflashError] = {}

    def run(self) -> dict[str, Any]:
        """Look on all nodes, then turn all of them; what `rollback --json` prints.

        Raises:
            NodesFailed: refused, nothing was touched; or it failed, and the text says what runs now.
        """
        self._each(Rollback.prepare, most=SIDE_BY_SIDE)
        self._one_release()
        if self._errors:
            raise self._failed()
        if self.options.plan:
            for part in self.parts:
                part.say_plan()
            return self.to_json()
        self._each(Rollback.turn)
        if self._errors:
            text = stop_all(self.parts, self.options, "the rollback failed on another node")
            self.stages.note(text)
            next = f"see what runs: dflash-ops status {shlex.quote(self.job.name)}"
            raise self._failed(StartError(f"the job was not rolled back on all its nodes\n{text}", "", next))
        for rank, ended in enumerate(self._each(self._watch)):
            if ended.value is not None:
                self._errors[rank] = ended.value
        if self._errors:
            raise self._failed()
        return self.to_json()

    def to_json(self) -> dict[str, Any]:
        """docs/schemas/nodes.schema.json."""
        return {
            "schema": 1,
            "kind": "rollback.nodes",
            "job": self.job.name,
            "exit": max((e.exit_code for e in self._errors.values()), default=0),
            "nodes": [node_json(p.job, self._errors.get(n), p.result.to_json()) for n, p in enumerate(self.parts)],
        }

    def _each(self, step: Callable[[Rollback], Any], *, most: int | None = None) -> list[Ended[Any]]:
        ended = side_by_side(self.parts, step, lambda p: p.job.label, most=most or len(self.parts))
        self._errors.update({rank: one.error for rank, one in enumerate(ended) if one.error is not None})
        return ended

    def _watch(self, part: Rollback) -> StartError | None:
        failed = part.watch()
        if failed is not None:
            for other in self.parts:
                other.halt.set()
        return failed

    def _one_release(self) -> None:
        """Each node's own history names the release before: they must be one.

        Raises:
            NodesFailed: they are not; the nodes' own errors are told as well.
        """
        names = {p.job.label: p.result.release or "none" for n, p in enumerate(self.parts) if n not in self._errors}
        if len(set(names.values())) > 1:
            said = ", ".join(f"{label} to {name}" for label, name in names.items())
            error = UsageError(
                f"the nodes would go back to different releases: {said}",
                f"job {self.job.name}",
                f"name one that ran on all of them: dflash-ops rollback ID {shlex.quote(self.job.name)}",
            )
            raise self._failed(error)

    def _failed(self, *more: DflashError) -> NodesFailed:
        said = [e for rank, error in sorted(self._errors.items()) for e in at_node(self.parts[rank].job.label, error)]
        return NodesFailed([*said, *more], self.to_json())
