"""Where several nodes' launchers meet: what each reports, and what node 0 decides from it. Pure: no sockets, no clocks.

A **generation** is a time in which the same nodes train together: their drafters form one group, and each node owns the
batches of its drafters. It ends when a node or a drafter is lost, or a node comes back; then all meet again, and the
next generation begins where all of them can:

    fresh launchers            the newest checkpoint that every one of them has, or from nothing
    launchers that have run    the newest average that all of these hold in memory; the others get it from one of them

Every report is a whole state, not a change: what was read twice, late or never does no harm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.addresses import is_loopback

#: Phases of a node: it waits for a generation, trains in one, has finished, or has ended with an error.
READY, RUNNING, DONE, FAILED = "ready", "running", "done", "failed"
#: Exit codes of a launcher that may come back; every other one would only come again, and ends all nodes.
RETURNS = (0, 1, 3)
#: Where a generation starts from: averages in memory, a checkpoint, nothing.
HELD, SAVED, FRESH = "held", "saved", "fresh"


@dataclass(frozen=True)
class Held:
    """A state that a node has: step, batches of the run that it stands for, and what makes it that one.

    `mark`: of a checkpoint the hash of its weights; of an average the token of the generation that made it.
    `nodes`: of a checkpoint, who trained together when it was taken.
    """

    step: int
    batches: int
    mark: str
    nodes: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Held:
        return cls(int(raw["step"]), int(raw["batches"]), str(raw["mark"]), tuple(raw["nodes"]))


@dataclass(frozen=True)
class Report:
    """What a node says of itself.

    Attributes:
        rank, life: which node, and which start of its launcher (a random token). beat: grows while it lives.
        phase: see above. generation: that it is in, or was in last; 0: none yet.
        drafters: how many it has. address: its own, on the way to the endpoint.
        held: averages in its memory. saved: checkpoints on its disk. facts: what must be the same on all nodes, key
        -> value; told while it is ready. folder: token that lies in its checkpoints folder. base: of its plan.
        stop: it was asked to stop. stop_at: the batch that it could stop at; None while it trains on.
        why, code: of a node that ended: its error and exit code. totals: sums for node 0's progress lines.
    """

    rank: int
    life: str
    beat: int = 0
    phase: str = READY
    generation: int = 0
    drafters: int = 1
    address: str = ""
    held: tuple[Held, ...] = ()
    saved: tuple[Held, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    stop: bool = False
    stop_at: int | None = None
    why: str = ""
    code: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Report:
        """
        Raises:
            ValueError: it is no report.
        """
        try:
            states = {name: tuple(Held.from_dict(entry) for entry in raw.get(name, ())) for name in ("held", "saved")}
            return cls(**{**_known(cls, raw), **states})
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"no report: {error}") from error


@dataclass(frozen=True)
class Member:
    """A node of a generation: its place among all drafters is [first, first + drafters)."""

    rank: int
    life: str
    drafters: int
    first: int


@dataclass(frozen=True)
class Decision:
    """What node 0 has decided.

    Attributes:
        generation: from 1. token: its name, in records and for the drafters' group. members: by rank.
        origin: HELD, SAVED or FRESH. start: the state that all begin with. source: the node whose first drafter gives
        it to those that lack it; None if nobody does. base: of the plan, for nodes that were away.
        stop_at: batch at which all stop; None while nobody was asked to.
        refused: life of a node -> why it may not take part. error, code: all end with it.
    """

    generation: int = 0
    token: str = ""
    members: tuple[Member, ...] = ()
    origin: str = FRESH
    start: Held = Held(0, 0, "")
    source: int | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    stop_at: int | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    where: str = ""
    next: str = ""
    code: int = 0

    @property
    def world(self) -> int:
        """Drafters of all members."""
        return sum(m.drafters for m in self.members)

    def member(self, rank: int, life: str) -> Member | None:
        return next((m for m in self.members if (m.rank, m.life) == (rank, life)), None)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Decision:
        """
        Raises:
            ValueError: it is no decision.
        """
        try:
            members = tuple(Member(**_known(Member, m)) for m in raw["members"])
            return cls(**{**_known(cls, raw), "members": members, "start": Held.from_dict(raw["start"])})
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"no decision: {error}") from error


def _known(cls: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What this version knows of a form; a newer node may say more."""
    names = {f.name for f in dataclasses.fields(cls)}
    return {k: v for k, v in raw.items() if k in names}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys that are not the same, with both values."""
    return [(k, ours.get(k), theirs.get(k)) for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k)]


def refusal(leader: Report, other: Report) -> str:
    """Why a node cannot train together with node 0; empty if it can. Names the key and both values."""
    if leader.address and other.address and is_loopback(leader.address) and not is_loopback(other.address):
        return (
            f"node {leader.rank} takes the endpoint for itself as {leader.address}, node {other.rank} comes from "
            f"{other.address}: give the endpoint as an address that all nodes reach"
        )
    differ = differences(leader.facts, other.facts)
    if not differ:
        return ""
    told = "; ".join(f"{k} is {a!r} on node {leader.rank}, {b!r} on node {other.rank}" for k, a, b in differ[:4])
    return told + (f"; and {len(differ) - 4} more" if len(differ) > 4 else "")


def choose(reports: Sequence[Report]) -> tuple[str, Held, int | None] | str:
    """Where a generation of these nodes starts: (origin, state, source), or why it cannot. Nothing but fresh launchers
    may start from a checkpoint: what another one has done since would be lost without a word.

    Of nodes that were cut off for a while only those count that were in the newest generation: what the others hold is
    of a history that was left.
    """
    newest = max(r.generation for r in reports)
    carriers = [r for r in reports if r.held and r.generation == newest and newest > 0]
    if carriers:
        common = set.intersection(*(set(r.held) for r in carriers))
        if common:
            state = max(common, key=lambda h: h.step)
            lacking = any(state not in r.held or r not in carriers for r in reports)
            return HELD, state, min(r.rank for r in carriers if state in r.held) if lacking else None
    if newest > 0:
        return "no average is held by all nodes that are left"
    if not any(r.saved for r in reports):
        return FRESH, Held(0, 0, ""), min(r.rank for r in reports)
    for state in sorted({h for r in reports for h in r.saved}, key=lambda h: -h.step):
        having = [r for r in reports if state in r.saved]
        # Who was away when it was taken gets it from one that has it, if that one's plan is the one to go on with.
        source = next((r.rank for r in having if state == max(r.saved, key=lambda h: h.step)), None)
        away = state.nodes and source is not None
        if all(state in r.saved or (away and r.rank not in state.nodes) for r in reports):
            return SAVED, state, None if len(having) == len(reports) else source
    steps = {r.rank: sorted(h.step for h in r.saved) for r in reports}
    newest_step = max(s for found in steps.values() for s in found)
    lacking_ranks = [rank for rank, found in steps.items() if newest_step not in found]
    if not lacking_ranks:
        return f"step {newest_step} is not the same checkpoint on all nodes: the hashes of its weights differ"
    has = ", ".join(f"node {rank} has {_listed(found)}" for rank, found in sorted(steps.items()))
    return f"no checkpoint is on every node: node {lacking_ranks[0]} lacks step {newest_step} ({has})"


def _listed(steps: Sequence[int]) -> str:
    return "none" if not steps else "step " + ", ".join(map(str, steps[-5:]))


def seat(reports: Sequence[Report]) -> tuple[Member, ...]:
    """Members in the order of their ranks; drafters are numbered through."""
    members, first = [], 0
    for report in sorted(reports, key=lambda r: r.rank):
        members.append(Member(report.rank, report.life, report.drafters, first))
        first += report.drafters
    return tuple(members)


@dataclass(frozen=True)
class Waiting:
    """No decision yet: for whom the meeting waits.

    Attributes:
        ranks: of these nodes. lost: those that have left a generation and are not back. refused: life -> why.
    """

    ranks: tuple[int, ...]
    lost: tuple[int, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def decide(
    reports: Mapping[int, Report],
    alive: Collection[int],
    previous: Decision,
    *,
    nodes: int,
    on_loss: str,
    token: str,
) -> Decision | Waiting:
    """Node 0's decision, once there can be one.

    Args:
        reports: the newest of each node, node 0's own included. alive: ranks that were heard lately.
        previous: the last decision; generation 0 before the first. nodes: N. on_loss: "wait" or "go_on".
        token: name for the new generation.
    """
    ended = next((r for r in reports.values() if r.phase == FAILED and r.code not in RETURNS), None)
    if ended is not None:
        return dataclasses.replace(previous, error=f"node {ended.rank} ended: {ended.why}", code=ended.code)
    stopping = any(r.stop for r in reports.values())
    ready = [r for rank, r in sorted(reports.items()) if rank in alive and r.phase == READY]
    misfits = {r.rank: why for r in ready if 0 in reports and (why := refusal(reports[0], r))}
    if misfits and not previous.members:
        rank, why = next(iter(misfits.items()))
        return Decision(
            error=f"node {rank} does not fit: {why}",
            where=f"node {rank}",
            next="give all nodes the same config, data and target",
            code=2,
        )
    refused = {reports[rank].life: why for rank, why in misfits.items()}
    ready = [r for r in ready if r.rank not in misfits]
    here = {r.rank for r in ready}
    was = {m.rank for m in previous.members}
    # A member that lives but is not ready is about to be: its drafters are being ended.
    coming = tuple(
        m.rank for m in previous.members if m.rank in alive and (r := reports.get(m.rank)) and r.phase == RUNNING
    )
    absent = tuple(rank for rank in range(nodes) if rank not in here)
    lost = tuple(rank for rank in absent if rank in was and rank not in coming)
    if coming:
        return Waiting(coming, lost, refused)
    if absent and not stopping and (not previous.members or on_loss == "wait"):
        return Waiting(absent, lost, refused)
    if 0 not in here:
        return Waiting((0,))
    found = choose(ready)
    if isinstance(found, str) and any(r.generation for r in ready):
        return Decision(
            error=found,
            where="the nodes' memory",
            next="start all nodes again: they go on from their checkpoints",
            code=1,
        )
    if isinstance(found, str):
        return Decision(
            error=found,
            where="--checkpoints",
            next="copy a checkpoint to the nodes that lack it, or name one with --resume on each",
            code=5,
        )
    origin, start, source = found
    return Decision(
        generation=1 + max(r.generation for r in ready),
        token=token,
        members=seat(ready),
        origin=origin,
        start=start,
        source=source,
        base=next((r.base for r in ready if start in r.held or r.rank == source), {}),
        stop_at=start.batches if stopping else None,
        refused=refused,
    )


def broken(mine: Decision, reports: Mapping[int, Report], alive: Collection[int]) -> tuple[int, str] | None:
    """The node by which a generation has ended, and how; None while it goes on."""
    for member in mine.members:
        report = reports.get(member.rank)
        if report is None or report.life != member.life:
            return member.rank, "its launcher was started anew"
        if report.phase == FAILED:
            return member.rank, report.why
        if report.phase != DONE and member.rank not in alive:
            return member.rank, "silent"
        if report.phase == READY and report.generation >= mine.generation:
            return member.rank, report.why or "its drafters ended"
    return None


def agreed_stop(mine: Decision, reports: Mapping[int, Report]) -> int | None:
    """The batch at which all members can stop, once each of them has said where it could."""
    found = [reports[m.rank].stop_at for m in mine.members if m.rank in reports]
    known = [at for at in found if at is not None]
    return max(known) if len(known) == len(mine.members) else None
