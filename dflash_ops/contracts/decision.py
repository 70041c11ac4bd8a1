"""What was decided: the dry-run text and the order to the effects in one (docs/supervise.md, Decision)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from dflash_ops.contracts.diagnosis import EvidenceLine
from dflash_ops.contracts.overlay import Layer


class Verdict(str, Enum):
    """`none`: nothing to do, or nothing may be done. `wait`: this action, but not before `not_before`. `propose`: would
    be done if the policy said `act`. `act`: do it now. `hold`: no action is left; a person has to look."""

    NONE = "none"
    WAIT = "wait"
    PROPOSE = "propose"
    ACT = "act"
    HOLD = "hold"


@dataclass(frozen=True)
class Expectation:
    """What shows that it worked: a step beyond `past_step` (None: any step) within `within_s` seconds of the start."""

    past_step: int | None = None
    within_s: float = 3600.0
    text: str = ""


@dataclass(frozen=True)
class Decision:
    """The answer to one look at the evidence; every field is filled as far as it applies.

    Attributes:
        verdict: above; only `act` is carried out.
        reason: one sentence.
        id: names this action for good: the same evidence and ledger give the same id, so that an action that was begun
            before a restart of the supervisor is finished, not repeated. Empty without an action.
        action: a word of contracts.Action; params: what belongs to it (`device`, `checkpoint`, `env`, ...).
        grade: A, or B (then the policy allows it).
        attempt: the attempt that it is about.
        kind, fingerprint, entity, title: of the diagnosis.
        evidence: lines that speak for it.
        command: the dry run: exactly what would be done, one step a line.
        ends_first: the attempt still lives and is ended first (its own recorded processes only).
        starts: it ends in a new attempt.
        drop: layers of the overlay that are taken back with it.
        layer: the layer that it adds.
        verify: what will show that it worked. undo: how it is taken back.
        not_before: for `wait` (and a `hold` for want of budget): earliest time.
        jitter: the random number (0 to 1) for the pause before the next one; goes into the journal.
        resumes: it was announced before and is only to be finished.
        notify: tell a person (the journal keeps it from being told twice).
        skipped: steps of the ladder that were passed over, each with its reason.
    """

    SCHEMA: ClassVar[int] = 1

    verdict: Verdict
    reason: str
    id: str = ""
    action: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    grade: str = ""
    attempt: int | None = None
    kind: str = ""
    fingerprint: str = ""
    entity: str | None = None
    title: str = ""
    evidence: tuple[EvidenceLine, ...] = ()
    command: str = ""
    ends_first: bool = False
    starts: bool = False
    drop: tuple[str, ...] = ()
    layer: Layer | None = None
    verify: Expectation | None = None
    undo: str = ""
    not_before: float | None = None
    jitter: float = 0.0
    resumes: bool = False
    notify: bool = False
    skipped: tuple[str, ...] = ()
    schema: int = 1
