"""Several nodes of one job as one: the worst state wins, and each node is listed.

The rule here: nothing is made into a number that no node said. Steps, quality and rates are node 0's: the bundled
trainer tells of all nodes there (docs/run-config.md, Several machines).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_ops.contracts import Progress, Snapshot, State
from dflash_ops.view.status import STYLES, job_json, line, render
from dflash_ops.view.text import DASH, clean, duration, fixed, ktok

if TYPE_CHECKING:  # `--json` draws nothing: rich is imported by what does
    from rich.console import RenderableType
    from rich.table import Table

#: From the worst to the best. Stopped stands before what lives: a node that stopped alone is one that is missing.
WORST = (
    State.CRASHED, State.HUNG, State.UNREACHABLE, State.UNKNOWN, State.STOPPED,
    State.SLOW, State.LOADING, State.COMPILING, State.STEPPING, State.FINISHED,
)  # fmt: skip


@dataclass(frozen=True)
class NodeSeen:
    """One node: what was seen of it, and by its own clock when."""

    rank: int
    host: str
    root: str
    snapshot: Snapshot
    now: float
    deployed: bool = True

    @property
    def label(self) -> str:
        return f"node {self.rank} ({self.host})"


def worst(nodes: Sequence[NodeSeen]) -> NodeSeen:
    """The node whose state speaks for the job; of several the one that is in it for longest."""
    return min(nodes, key=lambda n: (WORST.index(n.snapshot.state), -(n.now - n.snapshot.since)))


def joined(nodes: Sequence[NodeSeen]) -> NodeSeen:
    """The job as one snapshot, by the clock of the node that speaks for it.

    Times of other nodes are moved by what their clocks differ, so that ages stay right.
    """
    voice = worst(nodes)
    s = voice.snapshot
    alike = all(n.snapshot.state is s.state for n in nodes)
    detail = s.detail if alike and not s.detail else f"{voice.label}{': ' if s.detail else ''}{s.detail}"
    if alike and s.detail and all(n.snapshot.detail == s.detail for n in nodes):
        detail = s.detail
    oldest = max(nodes, key=lambda n: n.now - n.snapshot.t)
    warnings = tuple(f"{n.label}: {w}" for n in nodes for w in n.snapshot.warnings)
    speaker = _speaker(nodes)
    told = speaker.snapshot if speaker is not None else s
    disks = [d for n in nodes if (d := n.snapshot.disk) is not None]
    whole = replace(
        s,
        t=voice.now - (oldest.now - oldest.snapshot.t),
        detail=detail,
        progress=_progress(nodes, voice),
        rates=told.rates,
        curves=told.curves,
        disk=min(disks, key=lambda d: (d.full_in_s if d.full_in_s is not None else float("inf"), d.free), default=None),
        deeds=tuple(f"node {n.rank}: {deed}" for n in nodes for deed in n.snapshot.deeds)[-5:],
        workers={f"{n.rank}/{name}": w for n in nodes for name, w in n.snapshot.workers.items()},
        error=_first_error(nodes, voice),
        warnings=warnings,
    )
    return replace(voice, host=", ".join(dict.fromkeys(n.host for n in nodes)), root=nodes[0].root, snapshot=whole,
                   deployed=any(n.deployed for n in nodes))  # fmt: skip


def _speaker(nodes: Sequence[NodeSeen]) -> NodeSeen | None:
    """The node whose numbers are the job's: node 0, which tells of all; without it the one that is furthest behind."""
    told = [(n, n.snapshot.progress) for n in nodes if n.snapshot.progress is not None]
    if not told:
        return None
    if told[0][0].rank == nodes[0].rank:
        return told[0][0]
    return min(told, key=lambda item: item[1].step if item[1] is not None and item[1].step is not None else -1)[0]


def _progress(nodes: Sequence[NodeSeen], voice: NodeSeen) -> Progress | None:
    node = _speaker(nodes)
    if node is None or node.snapshot.progress is None:
        return None
    return replace(node.snapshot.progress, t=node.snapshot.progress.t - node.now + voice.now)


def _first_error(nodes: Sequence[NodeSeen], voice: NodeSeen) -> Any:
    """The earliest error of all nodes, by clocks made equal, with its node in front of the worker's name."""
    found = [(e.t - n.now if e.t is not None else float("inf"), n, e) for n in nodes if (e := n.snapshot.error)]
    if not found:
        return None
    _, node, error = min(found, key=lambda item: item[0])
    t = error.t - node.now + voice.now if error.t is not None else None
    return replace(error, worker=f"{node.label} {error.worker}", t=t)


def render_nodes(nodes: Sequence[NodeSeen], width: int = 80) -> RenderableType:
    """The screen of a job of several nodes: the job as a whole, then a line for each node."""
    from rich.console import Group
    from rich.text import Text

    whole = joined(nodes)
    parts: list[RenderableType] = [render(replace(whole.snapshot, workers={}, session=None), whole.now, width)]
    parts.append(table(nodes))
    job = clean(whole.snapshot.job)
    parts.append(Text(f"one node: dflash-ops status {job} --node {worst(nodes).rank}", "bright_black"))
    return Group(*parts)


def table(nodes: Sequence[NodeSeen]) -> Table:
    """One line a node."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    for head in ("node", "host", "state", "since"):
        grid.add_column(head, no_wrap=True, overflow="ellipsis")
    for head in ("attempt", "step", "loss", "Ktok/s"):
        grid.add_column(head, justify="right", no_wrap=True)
    grid.add_column("", overflow="fold")
    for node in nodes:
        s = node.snapshot
        mark, style = STYLES[s.state]
        p = s.progress or Progress(t=s.t)
        step = DASH if p.step is None else f"{p.step}/{p.total}" if p.total else str(p.step)
        said = s.exit.describe() if s.exit is not None else s.detail if p.step is None else ""
        grid.add_row(
            str(node.rank), clean(node.host), Text(f"{mark} {s.state.value}", style), duration(node.now - s.since),
            DASH if s.attempt is None else str(s.attempt), step, fixed(p.loss, 4), ktok(p.block_tok_s),
            Text(clean(said), "bright_black"),
        )  # fmt: skip
    return grid


def lines(nodes: Sequence[NodeSeen]) -> str:
    """One plain line: the job, then each node that is not as the job is."""
    whole = joined(nodes)
    text = line(whole.snapshot, whole.now)
    others = [f"node {n.rank} {n.snapshot.state.value}" for n in nodes if n.snapshot.state is not whole.snapshot.state]
    return "  ".join([text, *others])


def seen_json(one: NodeSeen) -> dict[str, Any]:
    """One entry of `status --json`: a job on one machine."""
    return job_json(one.snapshot, one.now, one.host, one.root, deployed=one.deployed)


def nodes_json(nodes: Sequence[NodeSeen]) -> dict[str, Any]:
    """One entry of `status --json`: the job as one, and `nodes` with an entry for each."""
    return {**seen_json(joined(nodes)), "nodes": [{"node": n.rank, **seen_json(n)} for n in nodes]}
