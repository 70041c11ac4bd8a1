"""An incident: one failure from its first sign to the step beyond it (docs/contracts.md, `incidents --json`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dflash_ops.contracts.diagnosis import EvidenceLine


class IncidentState(str, Enum):
    """How far it is."""

    OPEN = "open"  # it struck; nothing was done about it yet
    ACTING = "acting"  # something was announced and is being done
    WAITING = "waiting"  # something was done; no step has shown yet that it helped
    PROPOSED = "proposed"  # the policy observes: a person was told what would be done
    HELD = "held"  # nothing is left to do: a person has to look
    STOPPED = "stopped"  # a person stopped the job
    REPAIRED = "repaired"  # steps beyond it, after an action of ours
    PASSED = "passed"  # steps beyond it, and no action of ours is to be thanked


@dataclass(frozen=True)
class IncidentLine:
    """One line of its time line: when (seconds since the epoch, the job's own clock), who, what."""

    t: float
    seq: int
    who: str
    text: str
    attempt: int | None = None


@dataclass(frozen=True)
class Deed:
    """One action. `attempt`: the one that had failed; `started`: the one that it began; `outcome`: an Outcome."""

    id: str
    action: str
    t: float
    reason: str = ""
    command: str = ""
    grade: str = ""
    attempt: int | None = None
    started: int | None = None
    outcome: str = "intended"
    detail: str = ""
    undo: str = ""


@dataclass(frozen=True)
class Proof:
    """What showed that it is over. `by`: the event that said so (progress, checkpoint, attempt_exited)."""

    t: float
    attempt: int
    step: int | None
    by: str


@dataclass(frozen=True)
class Incident:
    """
    Attributes:
        number: from 1 on, in the order in which they struck; it never changes.
        t: when it struck first. attempts: those that it ended, oldest first.
        kind, title, fingerprint, root_exception, entity, confidence: of the diagnosis; empty or None before.
        end: how the attempt ended, in words. step: furthest step when it struck, None before the first.
        evidence: lines of the texts that speak for the diagnosis. deeds: what was done, in order.
        told: what a person was told, where nothing was left to do.
        proof: None while it is not over.
        resumed: step that the first attempt after it went on from.
        lost_steps: steps done again because of it; down_s: seconds from its first strike to the proof. None: not known
            (or not over yet).
        lines: the time line.
    """

    number: int
    t: float
    attempts: tuple[int, ...]
    state: IncidentState
    kind: str = ""
    title: str = ""
    fingerprint: str = ""
    root_exception: str | None = None
    entity: str | None = None
    confidence: float | None = None
    end: str = ""
    step: int | None = None
    evidence: tuple[EvidenceLine, ...] = ()
    deeds: tuple[Deed, ...] = ()
    told: str = ""
    proof: Proof | None = None
    resumed: int | None = None
    lost_steps: int | None = None
    down_s: float | None = None
    lines: tuple[IncidentLine, ...] = ()
