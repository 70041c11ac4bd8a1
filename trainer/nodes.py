"""This launcher among those of the other nodes: which generation it is in, and when that one ends.

    meeting --(node 0 has decided)--> running --(a node or a drafter is lost, a node came back)--> meeting

The launcher calls `tick` in its loop, does what is returned, and says what it has reached (`ready`, `running`,
`committed`, `could_stop_at`). Nothing here waits, but for the first meeting.
"""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from trainer.addresses import interface_of, local_address
from trainer.config import NodesConfig
from trainer.errors import BY_EXIT_CODE, FINISHED, STOPPED, ConfigError, TrainerError
from trainer.link import Link
from trainer.meeting import (
    DONE,
    FAILED,
    READY,
    RETURNS,
    RUNNING,
    Decision,
    Held,
    Report,
    Waiting,
    agreed_stop,
    broken,
    decide,
    refusal,
)
from trainer.node_args import NodeArgs
from trainer.progress import Output
from trainer.signals import StopSignals

#: Seconds in which the last report of a launcher that ends can travel.
FAREWELL_S = 2.0


@dataclass(frozen=True)
class Broke:
    """The generation has ended: drafters are to be ended, and `ready` to be called."""

    node: int
    why: str


@dataclass(frozen=True)
class Begin:
    """A generation begins."""

    decision: Decision


@dataclass(frozen=True)
class StopAsked:
    """Another node was asked to stop."""

    node: int


@dataclass(frozen=True)
class StopAt:
    """All stop right before this batch."""

    batch: int


@dataclass(frozen=True)
class Alone:
    """A stop was asked for, and nobody is there to agree with: save what is held, and end."""


News = Broke | Begin | StopAsked | StopAt | Alone


class Nodes:
    """One launcher's place among several. A context: when it is left, the others learn how.

    Args:
        args: this node's place. config: [nodes]. drafters: of this node. output: for events.
    """

    def __init__(self, args: NodeArgs, config: NodesConfig, drafters: int, output: Output) -> None:
        self.args = args
        self.config = config
        self.output = output
        self.life = secrets.token_hex(6)
        self.mine = Decision()  # the generation that this node is in, or was in last
        self.state = READY
        self.link = Link(args, config.lost_after_s)
        self.address = local_address(args.host, args.port)
        self.report = Report(args.rank, self.life, drafters=drafters, address=self.address, generation=0)
        self._told: set[tuple[str, object]] = set()
        self._waiting_since = time.monotonic()
        self._asked = self._regroup = False
        self._lost_before: set[int] = set()

    def __enter__(self) -> Nodes:
        self.link.start()
        self._waiting_since = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, FINISHED, STOPPED)):
            self._say(phase=DONE)
        elif self._asked and not isinstance(error, TrainerError):
            self._say(phase=FAILED, why="it was asked to stop", code=STOPPED, stop=True)
        elif isinstance(error, TrainerError):
            self._say(phase=FAILED, why=f"{error.what} [{error.where}]", code=error.exit_code)
        else:
            self._say(phase=FAILED, why=f"{type(error).__name__}: {error}", code=1)
        mine, decision = self.report, self.link.decision
        if self.leader and mine.phase == FAILED and mine.code not in RETURNS and not decision.error:
            # Nobody else decides, and who waits for node 0 to come back would wait in vain.
            self.link.decide(replace(decision, error=f"node 0 ended: {mine.why}", code=mine.code))
        self._farewell()
        self.link.close()

    def _farewell(self) -> None:
        """The last report travels; node 0 keeps the endpoint open until the others have ended too, or are lost."""
        mine = self.report
        # After a fault that need not come again the others wait for a new node 0, which needs the endpoint.
        brief = mine.phase == FAILED and mine.code == 1 and not self.link.decision.error
        deadline = time.monotonic() + (self.config.wait_s if self.leader and not brief else FAREWELL_S)
        while time.monotonic() < deadline:
            if self.leader:
                others = [r for r in self.link.reports.values() if r.rank != 0]
                alive = self.link.alive()
                if all(r.phase in (DONE, FAILED) or r.rank not in alive for r in others):
                    break
            elif self.link.delivered is mine:
                break
            time.sleep(0.05)

    # ---- facts

    @property
    def leader(self) -> bool:
        return self.args.rank == 0

    @property
    def first(self) -> int:
        """Number of this node's first drafter among all."""
        member = self.mine.member(self.args.rank, self.life)
        return 0 if member is None else member.first

    @property
    def world(self) -> int:
        """Drafters of all nodes of the present generation."""
        return self.mine.world

    def ranks(self) -> list[int]:
        """Nodes of the present generation."""
        return [m.rank for m in self.mine.members]

    @property
    def shared_token(self) -> str:
        """Token that node 0 has put into its checkpoints folder."""
        leader = self.link.reports.get(0)
        return "" if leader is None else leader.folder

    def worker_environment(self) -> dict[str, str]:
        """What drafters need so that gloo and NCCL use the way on which the endpoint is.

        Raises:
            ConfigError: no interface has this node's address.
        """
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if all(os.environ.get(name) for name in names):
            return {name: os.environ[name] for name in names}
        interface = interface_of(self.address)
        return {name: os.environ.get(name, interface) for name in names}

    def group(self, local_rank: int) -> dict[str, Any] | None:
        """How one of this node's drafters joins the others; None if it is the only one."""
        if self.world == 1:
            return None
        source = self.mine.source
        first = None if source is None else next(m.first for m in self.mine.members if m.rank == source)
        return {
            "host": self.args.host,
            "port": self.args.port,
            "name": self.mine.token,
            "rank": self.first + local_rank,
            "world": self.world,
            "source": first,
            "step": self.mine.start.step,
        }

    # ---- what this node says

    def _say(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        self.link.publish(self.report)

    def introduce(self, facts: Mapping[str, Any], saved: Sequence[Held], folder: str, base: Mapping[str, Any]) -> None:
        """Before the first meeting: what must be the same everywhere, checkpoints that are here, the plan's base."""
        self._facts = dict(facts)
        self._waiting_since = time.monotonic()
        self._say(facts=self._facts, saved=tuple(saved), folder=folder, base=dict(base), phase=READY)

    def ready(self, held: Sequence[Held], base: Mapping[str, Any], why: str = "") -> None:
        """This node's drafters have ended, and it waits for a generation, with these averages in memory."""
        self.state = READY
        self._waiting_since = time.monotonic()
        self._regroup = False
        self._say(
            phase=READY,
            generation=self.mine.generation,
            held=tuple(held),
            base=dict(base),
            facts=self._facts,
            stop_at=None,
            why=why,
        )

    def stop(self) -> None:
        """This node was asked to stop."""
        self._asked = True
        self._say(stop=True)

    def could_stop_at(self, batch: int) -> None:
        """Where this node could stop; it begins nothing until all have agreed."""
        self._say(stop_at=batch)

    def committed(self) -> None:
        """An averaging is over: the moment at which a node that came back costs the least."""
        if self.leader and self._joiners():
            self._regroup = True

    def progress(self, totals: Mapping[str, float]) -> None:
        """Sums of this launcher so far, for node 0's progress lines."""
        self._say(totals=dict(totals))

    def others_totals(self) -> dict[tuple[int, str], Mapping[str, float]]:
        """(node, life) -> sums of the other members."""
        reports = self.link.reports
        return {
            (m.rank, m.life): reports[m.rank].totals
            for m in self.mine.members
            if m.rank != self.args.rank and m.rank in reports and reports[m.rank].life == m.life
        }

    # ---- what the others say

    def tick(self) -> list[News]:
        """What has happened since the last call.

        Raises:
            TrainerError: all nodes end, or the wait for one is over; with the exit code of the fault.
        """
        self.link.look()
        decision = self.link.decision
        if decision.error:
            raise BY_EXIT_CODE.get(decision.code, TrainerError)(
                decision.error, decision.where or "the nodes' meeting", decision.next or "read that node's log"
            )
        if self.life in decision.refused:
            raise ConfigError(
                f"node {self.args.rank} does not fit: {decision.refused[self.life]}",
                f"node {self.args.rank}",
                "give all nodes the same config, data and target",
            )
        return self._running(decision) if self.state == RUNNING else self._meeting()

    def _running(self, decision: Decision) -> list[News]:
        reports, alive = self.link.reports, self.link.alive()
        found = broken(self.mine, reports, alive)
        if not self.leader and self.link.lost and reports[0].phase != DONE:
            found = (0, "silent")
        elif found is None and decision.generation > self.mine.generation:
            found = (0, "it began another generation")
        elif found is None and self._regroup and (joiners := self._joiners()):
            found = (joiners[0], "it is back")
        if found is not None:
            node, why = found
            if why == "silent":
                why = self._silence(node)
            return [Broke(node, why)]
        news: list[News] = []
        asked = next((m.rank for m in self.mine.members if reports[m.rank].stop), None)
        if asked is not None and not self._asked:
            self._asked = True
            self._say(stop=True)
            news.append(StopAsked(asked))
        agreed = agreed_stop(self.mine, reports)
        if agreed is not None:
            news.append(StopAt(agreed))
        return news

    def _silence(self, node: int) -> str:
        """Says that a node is lost, once."""
        why = f"nothing was heard of it for {self.config.lost_after_s:g} s"
        if node == 0 and not self.leader and self.link.trouble:
            why += f" ({self.link.trouble})"
        if ("lost", node) not in self._told:
            self._told.add(("lost", node))
            self.output.event("node_lost", node=node, why=why)
        return why

    def _joiners(self) -> list[int]:
        """Nodes that wait to take part and are not in this generation. Node 0 tells those that do not fit."""
        alive, members = self.link.alive(), {(m.rank, m.life) for m in self.mine.members}
        found = [
            r
            for rank, r in sorted(self.link.reports.items())
            if rank in alive and r.phase == READY and (rank, r.life) not in members
        ]
        ours = replace(self.report, facts=self._facts)
        refused = {r.life: why for r in found if (why := refusal(ours, r))}
        self._refuse(refused)
        return [r.rank for r in found if r.life not in refused]

    def _refuse(self, refused: Mapping[str, str]) -> None:
        decision = self.link.decision
        if self.leader and not refused.keys() <= decision.refused.keys():
            self.link.decide(replace(decision, refused={**decision.refused, **refused}))

    def _meeting(self) -> list[News]:
        reports, alive = self.link.reports, self.link.alive()
        for member in self.mine.members:
            report = reports.get(member.rank)
            if member.rank not in alive or (report is not None and report.phase == FAILED):
                if report is not None and report.phase == FAILED:
                    self._once("failed", member.rank, "node_lost", node=member.rank, why=report.why)
                else:
                    self._silence(member.rank)
        if self.leader:
            self._lead(reports, alive)
        elif self.link.lost:
            self._silence(0)
            if self._asked:
                return [Alone()]
            self._patience([0])
        decision = self.link.decision
        if decision.generation > self.report.generation and decision.member(self.args.rank, self.life):
            return [self._begin(decision)]
        if not self.leader and not self.link.lost:
            self._patience([0])  # node 0 waits for others with the same patience, and says so itself
        if self.mine.generation == 0 and any(r.stop for r in reports.values()):
            return [Alone()]  # nothing was begun
        return []

    def _begin(self, decision: Decision) -> Begin:
        self.mine, self.state = decision, RUNNING
        self._told.clear()
        if decision.stop_at is not None:
            self._asked = True
        self._say(phase=RUNNING, generation=decision.generation, held=(), facts={}, saved=(), why="", stop_at=None)
        ranks = ",".join(str(m.rank) for m in decision.members)
        self.output.event(
            "nodes", generation=decision.generation, nodes=ranks, drafters=decision.world, step=decision.start.step
        )
        return Begin(decision)

    def _lead(self, reports: Mapping[int, Report], alive: set[int]) -> None:
        made = decide(
            reports,
            alive,
            self.link.decision,
            nodes=self.args.count,
            on_loss=self.config.on_loss,
            token=secrets.token_hex(6),
        )
        if isinstance(made, Waiting):
            self._refuse(made.refused)
            self._patience(made.ranks)
        else:
            self.link.decide(made)

    def _patience(self, ranks: Sequence[int]) -> None:
        """Says for whom it waits, and gives up when that took too long.

        Raises:
            TrainerError: naming them.
        """
        first = self.mine.generation == 0
        limit = self.args.timeout_s if first else self.config.wait_s
        names = "node " + ", ".join(map(str, ranks))
        if tuple(ranks) != (0,) or self.leader or self.link.lost or first:
            self._once("waiting", tuple(ranks), "waiting", nodes=",".join(map(str, ranks)), at_most_s=f"{limit:g}")
        # A node that only follows gives node 0 a little longer, so that it hears from there who was missing.
        if time.monotonic() - self._waiting_since < limit + (0 if self.leader else 2 * self.config.lost_after_s):
            return
        what = f"{names} did not come within {limit:g} s" if first else f"{names} did not come back within {limit:g} s"
        if not self.leader and self.link.trouble:
            what += f": {self.link.trouble}"
        error = TrainerError(
            what,
            f"endpoint {self.args.endpoint}",
            "look at its log; start all nodes again, they go on from the last checkpoint",
        )
        if self.leader:
            self.link.decide(replace(self.link.decision, error=error.what, where=error.where, next=error.next, code=1))
        raise error

    def _once(self, kind: str, about: object, event: str, **pairs: object) -> None:
        if (kind, about) not in self._told:
            self._told.add((kind, about))
            self.output.event(event, **pairs)

    def first_meeting(self, signals: StopSignals) -> Decision | None:
        """Waits until node 0 has decided; None if a stop was asked for before.

        Raises:
            TrainerError: see `tick`.
        """
        while True:
            for event in self.tick():
                if isinstance(event, Begin):
                    return event.decision
                if isinstance(event, Alone):
                    return None
            select.select([self.link.reader, signals.reader], [], [], 0.2)
            if signals.read():
                self.stop()
