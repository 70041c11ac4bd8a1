"""How long loading and compiling are silent in this job: learned from earlier attempts (run/learned.json).

The rule here: a limit is only ever shortened, and never below a floor. The longest silence of all attempts of the
same release and topology counts, not the last one: the first compile is cold and slow, the next ones are warm, and a
cold one may come again. Until two attempts got past a stage, the configured limit stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from dflash_ops.contracts import Limits

#: A silence of this many times the longest one known is a hang, but never less than FLOOR_S.
TIMES = 3.0
FLOOR_S = 120.0
#: Attempts that must have got past a stage before its limit is shortened.
NEEDS = 2


@dataclass(frozen=True)
class StageSilence:
    """The longest silence of a stage in seconds, and over how many attempts that got past it."""

    longest_s: float = 0.0
    attempts: int = 0


@dataclass(frozen=True)
class Learned:
    """`key` = release and topology of which this was learned: with another one it begins anew."""

    SCHEMA: ClassVar[int] = 1

    key: str = ""
    stages: dict[str, StageSilence] = field(default_factory=dict)
    schema: int = 1


def learn(learned: Learned, key: str, stage: str, silence_s: float) -> Learned:
    """One attempt got past `stage`, and was silent in it for at most `silence_s` seconds."""
    if key != learned.key:
        learned = Learned(key)
    old = learned.stages.get(stage, StageSilence())
    new = StageSilence(max(old.longest_s, silence_s), old.attempts + 1)
    return replace(learned, stages={**learned.stages, stage: new})


def limits(configured: Limits, learned: Learned, key: str) -> Limits:
    """The job's limits, with those of loading and compiling as learned for this key."""
    if key != learned.key:
        return configured
    return replace(
        configured,
        loading_s=_limit(configured.loading_s, learned.stages.get("loading")),
        compiling_s=_limit(configured.compiling_s, learned.stages.get("compiling")),
    )


def _limit(configured: float, known: StageSilence | None) -> float:
    if known is None or known.attempts < NEEDS:
        return configured
    return min(configured, max(FLOOR_S, TIMES * known.longest_s))
