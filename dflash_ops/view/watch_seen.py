"""What the watch draws: a job as it was last seen, how old that is, and the link to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_ops.contracts import ENDED_STATES, GpuInfo, Snapshot, State
from dflash_ops.contracts.snapshot import FRESH_S
from dflash_ops.view.nodes import NodeSeen, joined

#: As `FRESH_S`, of a job that was never deployed: it is only looked at every few seconds.
RARE_S = 15.0


@dataclass(frozen=True)
class Link:
    """The way to a job's machine.

    Attributes:
        lost_s: seconds since it was lost; None: it holds. tries: how often it was tried since. why: what was said.
    """

    lost_s: float | None = None
    tries: int = 0
    why: str = ""


@dataclass(frozen=True)
class Watched:
    """One job on the screen.

    Attributes:
        nodes: what was last seen, one for each machine; empty: nothing yet. `now` of each is the time there now.
        several: whether it is a job on several machines.
    """

    name: str
    host: str
    nodes: Sequence[NodeSeen] = ()
    several: bool = False
    link: Link = Link()

    @property
    def whole(self) -> NodeSeen | None:
        """The job as one; None: nothing was seen yet."""
        if not self.nodes:
            return None
        return joined(self.nodes) if self.several else self.nodes[0]

    @property
    def snapshot(self) -> Snapshot | None:
        whole = self.whole
        return whole.snapshot if whole is not None else None

    @property
    def age_s(self) -> float:
        """How old the oldest part of it is."""
        return max((n.now - n.snapshot.t for n in self.nodes), default=0.0)

    @property
    def ended(self) -> bool:
        return bool(self.nodes) and all(n.snapshot.state in ENDED_STATES for n in self.nodes)

    @property
    def old(self) -> bool:
        """Whether a person should know how old it is. Of what has ended nothing new is to come."""
        rare = not all(n.deployed for n in self.nodes)
        return self.link.lost_s is not None or (self.age_s > (RARE_S if rare else FRESH_S) and not self.ended)

    @property
    def gpus(self) -> list[tuple[str, GpuInfo]]:
        """All cards, with the node's number in front where there are several."""
        return [
            (f"{n.rank}/{g.index}" if self.several else str(g.index), g) for n in self.nodes for g in n.snapshot.gpus
        ]

    @property
    def gpus_note(self) -> str:
        notes: dict[str, list[str]] = {}
        for n in self.nodes:
            if n.snapshot.gpus_note:
                notes.setdefault(n.snapshot.gpus_note, []).append(n.label)
        all_alike = len(notes) == 1 and len(next(iter(notes.values()))) == len(self.nodes)
        return "; ".join(note if all_alike else f"{', '.join(where)}: {note}" for note, where in notes.items())


def blind(node: NodeSeen, lost_s: float) -> NodeSeen:
    """A machine whose link is lost: what it said last, and that nobody knows how it is now."""
    s = node.snapshot
    before = f"before it was {s.state.value}" + (f": {s.detail}" if s.detail else "")
    return replace(node, snapshot=replace(s, state=State.UNREACHABLE, since=node.now - lost_s, detail=before))
