"""A deploy of one job on several machines: all nodes or none (docs/deploy.md, Several nodes).

The rule here: the nodes go through each step together, and none begins one before all have ended the last. Up to the
gate a fault of one node refuses all of them; from the stop on it takes all of them back to what ran before.
"""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dflash_ops.contracts import LIVE_STATES
from dflash_ops.deploy.back import Backed, back_to, watch_again
from dflash_ops.deploy.decide import Options, worth_going_back
from dflash_ops.deploy.operation import Operation
from dflash_ops.deploy.release import Built
from dflash_ops.deploy.run import Deployment
from dflash_ops.deploy.window import RolledBack
from dflash_ops.errors import DflashError, PreflightError, StartError
from dflash_ops.inventory import Job
from dflash_ops.nodes import NodesFailed, at_node, node_json
from dflash_ops.parallel import SIDE_BY_SIDE, Ended, side_by_side
from dflash_ops.view.stages import Held, Stages


def once(build: Callable[[], Built | None]) -> Callable[[], Built | None]:
    """The release, made by whoever asks first: all nodes send the same one."""
    lock = threading.Lock()
    made: list[Built | None] = []

    def get() -> Built | None:
        with lock:
            if not made:
                made.append(build())
            return made[0]

    return get


class NodesDeployment:
    """One deploy of one job of several nodes.

    Args:
        job: the whole one. parts: a deployment for each of its nodes, in their order, each with its own stages.
        stages: for what is said of all of them.
    """

    def __init__(self, job: Job, parts: Sequence[Deployment], options: Options, stages: Stages) -> None:
        self.job, self.parts, self.options, self.stages = job, parts, options, stages
        self._errors: dict[int, DflashError] = {}
        self._rolled_back = False

    def run(self) -> dict[str, Any]:
        """All steps on all nodes; what `deploy --json` prints.

        Raises:
            NodesFailed: refused, nothing was touched; or it failed, and what was done about it stands in the text.
            RolledBack: as a NodesFailed would, and what ran before runs again on all nodes.
        """
        if self.options.plan:
            self._plan()
            return self.to_json()
        self._checked(Deployment.prepare, most=SIDE_BY_SIDE)
        self._alike()
        self._checked(Deployment.gate, most=SIDE_BY_SIDE)
        # one after the other: nodes may name one shared folder of checkpoints, which the first sets aside for all
        for step, most in ((Deployment.stop, None), (Deployment.aside, 1), (Deployment.start, None)):
            self._each(step, most=most)
            if self._errors:
                self._take_back("was not started on all its nodes")
        self._watch()
        return self.to_json()

    def interrupted(self) -> str:
        """What a person who pressed Ctrl-C in the middle of `run` needs to know."""
        touched = [f"{p.job.label} was being {p.touched}" for p in self.parts if p.touched]
        name = shlex.quote(self.job.name)
        if not touched:
            return f"interrupted: the job {name} was not touched"
        return f"interrupted: {', '.join(touched)}; what is true now: dflash-ops status {name}"

    def to_json(self) -> dict[str, Any]:
        """docs/schemas/nodes.schema.json."""
        for part in self.parts:
            part.result.execs = part.host.execs
        codes = [e.exit_code for e in self._errors.values()]
        return {
            "schema": 1,
            "kind": "deploy.nodes",
            "job": self.job.name,
            "exit": max(codes, default=0),
            "rolled_back": self._rolled_back,
            "nodes": [node_json(p.job, self._errors.get(n), p.result.to_json()) for n, p in enumerate(self.parts)],
        }

    # -- steps ---------------------------------------------------------------------------------------------------

    def _each(self, step: Callable[[Deployment], Any], *, most: int | None = None) -> list[Ended[Any]]:
        """One step on every node at one time; errors are kept."""
        ended = side_by_side(self.parts, step, lambda p: p.job.label, most=most or len(self.parts))
        for rank, one in enumerate(ended):
            if one.error is not None:
                self.parts[rank].stages.note(f"error: {one.error}")
                self._errors[rank] = one.error
        return ended

    def _checked(self, step: Callable[[Deployment], Any], *, most: int) -> None:
        """A step before anything is touched.

        Raises:
            NodesFailed: of any node; no node goes on.
        """
        self._each(step, most=most)
        if self._errors:
            raise self._failed()

    def _plan(self) -> None:
        """What would happen on each node, one after the other.

        Raises:
            NodesFailed: a node would be refused; all was said.
        """
        held = [Held(part.stages) for part in self.parts]
        for part, stages in zip(self.parts, held, strict=True):
            part.stages = stages
        self._each(Deployment.prepare, most=SIDE_BY_SIDE)
        for rank, (part, stages) in enumerate(zip(self.parts, held, strict=True)):
            if rank not in self._errors:
                try:
                    part.say_plan()
                except DflashError as error:
                    self._errors[rank] = error
            stages.release()
        self._alike()
        if self._errors:
            raise self._failed()

    def _failed(self) -> NodesFailed:
        return NodesFailed(self._failed_so_far(), self.to_json())

    def _failed_so_far(self) -> list[DflashError]:
        return [e for rank, error in sorted(self._errors.items()) for e in at_node(self.parts[rank].job.label, error)]

    def _alike(self) -> None:
        """Versions that differ between nodes are said; another torch the bundled trainer refuses once it runs.

        Raises:
            NodesFailed: torch differs.
        """
        imports = {p.job.label: c.what for p in self.parts for c in p.result.checks if c.name == "imports"}
        if len(set(imports.values())) < 2:
            return
        said = "; ".join(f"{label}: {what}" for label, what in imports.items())
        torch = {m[1] for what in imports.values() if (m := re.search(r"\btorch ([^\s,+]+)", what))}
        if len(torch) < 2:
            self.stages.note(f"warn: the nodes do not have the same versions: {said}")
            return
        error = PreflightError(
            f"the nodes have different versions of torch: {said}",
            f"job {self.job.name}",
            "install one version on all nodes: they cannot train together",
        )
        raise NodesFailed([*self._failed_so_far(), error], self.to_json())

    def _watch(self) -> None:
        """The watch window over all nodes: the first crash ends it for all."""

        def one(part: Deployment) -> StartError | None:
            failed = part.watch()
            if failed is not None:
                for other in self.parts:
                    other.halt.set()
            return failed

        for rank, ended in enumerate(self._each(one)):
            if ended.value is not None:
                self._errors[rank] = ended.value
        if any(isinstance(e, StartError) for e in self._errors.values()):
            self._errors = dict(sorted(self._errors.items(), key=lambda item: self._when(item[0])))
            self._take_back("crashed in its watch window", unless_same=True)
        if self._errors:  # the way to a machine was lost: its attempt needs nobody to watch it
            raise self._failed()

    def _when(self, rank: int) -> float:
        """When this node failed, by our clock: the first cause comes first."""
        part = self.parts[rank]
        seen = part.seen.snapshot if part.seen is not None else None
        if seen is None or (seen.exit is None and seen.error is None):
            return float("inf")
        times = [t for t in (seen.error.t if seen.error else None, seen.exit.t if seen.exit else None) if t is not None]
        return min(times, default=float("inf")) - part.offset

    # -- the way back --------------------------------------------------------------------------------------------

    def _take_back(self, why: str, *, unless_same: bool = False) -> None:
        """All nodes back to what ran before, or stopped where nothing did.

        Raises:
            RolledBack, NodesFailed: always; the text says what runs now.
        """
        before = [p.ready.probe.snapshot for p in self.parts]
        whole = self.options.rollback and all(worth_going_back(s) for s in before)
        reason = f"the job {why}"
        looks = side_by_side(self.parts, lambda p: p.client.snapshot(), lambda p: p.job.label, most=len(self.parts))
        reached = all(look.value is not None and look.value.reachable for look in looks)
        if not whole or not reached:  # without one of them there is no way back for the others
            raise self._stopped(reason)
        ended = self._go_back(self.parts, reason, unless_same=unless_same)
        same = [p for p, one in zip(self.parts, ended, strict=True) if one.value is not None and one.value.same]
        if len(same) == len(self.parts):
            self.stages.note("the release and config before were the same: nothing to go back to")
            raise self._stopped(reason)
        if same:  # another node has something to go back to: all of them, or none
            again = dict(zip(same, self._go_back(same, reason, unless_same=False), strict=True))
            ended = [again.get(p, one) for p, one in zip(self.parts, ended, strict=True)]
        lost = [f"{p.job.label}: {one.error.what}" for p, one in zip(self.parts, ended, strict=True) if one.error]
        if lost:
            self.stages.note(f"the rollback failed on {len(lost)} of {len(self.parts)} nodes: {'; '.join(lost)}")
            raise self._stopped(reason)
        raise self._rolled(reason, [one.value for one in ended if one.value is not None])

    def _go_back(self, parts: Sequence[Deployment], reason: str, *, unless_same: bool) -> list[Ended[Backed]]:
        def ended(part: Deployment) -> bool:
            """Whether this node has to be started; what it was started as is stopped."""
            before, now = part.ready.probe.snapshot, part.client.snapshot().snapshot
            if before is not None and now.state in LIVE_STATES and now.attempt == before.attempt:
                return False
            if now.state in LIVE_STATES:
                part.client.stop(grace=self.options.grace(part.job), reason=reason, actor=self.options.actor)
            return True

        def one(item: tuple[Deployment, Ended[bool]]) -> Backed:
            part, stopped = item
            before = part.ready.probe.snapshot
            assert before is not None
            if stopped.error is not None:
                raise stopped.error
            if not stopped.value:
                return Backed(attempt=before.attempt or 0, back_to=before.attempt or 0)
            return back_to(part, before, part.result, self.options, reason=reason, unless_same=unless_same)

        # All are stopped at one time, since nodes that stop wait for each other. Then node 0 before the others: where
        # the folder of checkpoints is one for all, it alone moves what is in it.
        stops = side_by_side(parts, ended, lambda p: p.job.label, most=len(parts))
        items = list(zip(parts, stops, strict=True))
        first = side_by_side(items[:1], one, lambda i: i[0].job.label)
        return [*first, *side_by_side(items[1:], one, lambda i: i[0].job.label, most=len(parts))]

    def _rolled(self, reason: str, backs: Sequence[Backed]) -> DflashError:
        """All nodes run again what ran before; watched as well, and nothing more is tried."""

        def one(item: tuple[Deployment, Backed]) -> StartError | None:
            return watch_again(item[0], item[1], item[0].result, self.options)

        for part in self.parts:
            part.halt.clear()
        watched = side_by_side(
            list(zip(self.parts, backs, strict=True)), one, lambda i: i[0].job.label, most=len(self.parts)
        )
        again = [f"{p.job.label}: {w.value.what}" for p, w in zip(self.parts, watched, strict=True) if w.value]
        again += [f"{p.job.label}: {w.error.what}" for p, w in zip(self.parts, watched, strict=True) if w.error]
        self._rolled_back = True
        numbers = ", ".join(str(b.back_to) for b in backs)
        releases = {b.release for b in backs if b.release}
        what = f"release {', '.join(sorted(releases))}" if releases else "the job as it was"
        text = f"ROLLED BACK: all {len(backs)} nodes run {what} again, as attempts {numbers} did"
        if again:
            text = f"ROLLED BACK to {what}, but not all nodes run: {'; '.join(again)}"
        return self._said(RolledBack, reason, text)

    def _stopped(self, reason: str) -> DflashError:
        """What was started is stopped: a part of a job waits for the others and holds its machines."""
        return self._said(NodesFailed, reason, stop_all(self.parts, self.options, reason))

    def _said(self, kind: type[DflashError], reason: str, text: str) -> DflashError:
        """The errors of the nodes and what was done, as one error; said aloud as well."""
        self.stages.note(text)
        name = shlex.quote(self.job.name)
        what = [e for rank, error in self._errors.items() for e in at_node(self.parts[rank].job.label, error)]
        next = f"see the cause: dflash-ops triage --job {name}; what runs now: dflash-ops status {name}"
        if kind is RolledBack:
            first = what[0]
            done = RolledBack("\n".join([*(e.what for e in what), text]), first.where, f"{first.next}; {next}")
            done.result = {**self.to_json(), "exit": done.exit_code}
            return done
        return NodesFailed([*what, StartError(f"{reason}\n{text}", f"job {self.job.name}", next)], self.to_json())


def stop_all(parts: Sequence[Operation], options: Options, reason: str) -> str:
    """End what runs of a job whose nodes do not all run; what became of each, in words."""

    def one(part: Operation) -> str:
        now = part.client.snapshot()
        if now.snapshot.state not in LIVE_STATES:
            return "does not run" if now.reachable else f"cannot be reached: {now.snapshot.detail}"
        part.client.stop(grace=options.grace(part.job), reason=reason, actor=options.actor)
        return "was stopped"

    said = []
    for part, end in zip(parts, side_by_side(parts, one, lambda p: p.job.label, most=len(parts)), strict=True):
        how = end.value or f"could not be stopped: {end.error.what if end.error else ''}"
        said.append(f"{part.job.label} {how}")
    return f"ALL NODES OR NONE: {', '.join(said)}"
