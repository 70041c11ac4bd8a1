"""The ledger: what was tried for which failure, and what came of it. It is folded from the journal, never written by
hand (`supervise.ledger.fold`), so that a supervisor that was killed knows all that it ever announced."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from dflash_ops.contracts.overlay import Layer


class Outcome(str, Enum):
    """What became of an action that was announced."""

    INTENDED = "intended"  # announced; whether it was done is not known yet
    DONE = "done"  # done; whether it helped is not known yet
    FAILED = "failed"  # it could not be done
    INTERRUPTED = "interrupted"  # announced, then never heard of again
    USELESS = "useless"  # the same fingerprint came again, without progress
    CHANGED = "changed"  # another fingerprint came, without progress
    WORSE = "worse"  # another fingerprint came that our own change is to blame for
    VERIFIED = "verified"  # steps beyond the one where it had failed


@dataclass(frozen=True)
class Tried:
    """One action for one fingerprint. `attempt` is the one that had failed, `started` the one that it began."""

    id: str
    action: str
    attempt: int | None
    t: float
    outcome: Outcome = Outcome.INTENDED
    grade: str = "A"
    starts: bool = True
    layer: str | None = None
    past_step: int | None = None
    started: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Case:
    """One fingerprint.

    `step` = the furthest step that was known when it struck, None before the first one ever. `attempts` = those that
    it ended, newest last. `tried` = what was done since a step beyond that was last reached.
    """

    fingerprint: str
    kind: str = ""
    first_t: float = 0.0
    last_t: float = 0.0
    times: int = 0
    step: int | None = None
    attempts: tuple[int, ...] = ()
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """All of it.

    Attributes:
        seq: number of the last journal event that is in here.
        cases: by fingerprint.
        pending: id of an action that was announced and not yet done; awaiting: id of one that waits for its proof.
        idle_starts: times of automatic starts since the last progress beyond `mark`, oldest first.
        mark: furthest step that was ever reached.
        attempt: the newest one, and begun_by: who started it.
        stopped: a person ended it; holds until a person starts it again.
        jitter: random number of the last start, for the pause before the next.
        dumped: attempts whose stacks were asked for.
        layers: the overlay in force.
        held: what a person was told once (`supervise.decide.told_key`), as fingerprints for which nothing is left.
        told: findings that were told, key -> time.
    """

    SCHEMA: ClassVar[int] = 1

    seq: int = 0
    cases: dict[str, Case] = field(default_factory=dict)
    pending: str | None = None
    awaiting: str | None = None
    idle_starts: tuple[float, ...] = ()
    mark: int | None = None
    attempt: int | None = None
    begun_by: str = ""
    stopped: bool = False
    jitter: float = 0.0
    dumped: tuple[int, ...] = ()
    layers: tuple[Layer, ...] = ()
    held: tuple[str, ...] = ()
    told: dict[str, float] = field(default_factory=dict)
    schema: int = 1

    def find(self, id: str | None) -> tuple[Case, Tried] | None:
        """The action of this id and its case."""
        if id is None:
            return None
        for case in self.cases.values():
            for tried in case.tried:
                if tried.id == id:
                    return case, tried
        return None
