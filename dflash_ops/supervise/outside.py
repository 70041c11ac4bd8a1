"""What is seen of a job from outside its container, and what of it is news. Pure.

The rules here: each change is said once, when it begins and when it is over; what cannot be seen keeps what was last
known and is never judged by it: a job that cannot be reached is `unreachable since`, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from dflash_ops.contracts import LIVE_STATES, Diagnosis, EvidenceLine, Finding, State, clock
from dflash_ops.supervise.problem import key
from dflash_ops.supervise.situation import Situation

#: Seconds after which the supervisor beside the trainer counts as dead: it looks every second.
DEAD_S = 30.0
#: Seconds for which what was last seen inside says whether a person had stopped the job before its container went.
SEEN_S = 900.0
#: Texts of the kernel log that are remembered as told.
_MOST_LINES = 200

#: Seconds after which a locked container is asked for its lock again, the first time and at most; doubled each time.
LOCK_S = (15.0, 600.0)

UNREACHABLE = "unreachable"
STOPPED = "container_stopped"
#: It does not run, and another task (a backup, a snapshot) holds it.
LOCKED = "container_locked"
#: Conditions under which nothing inside can be seen.
BLIND = frozenset({UNREACHABLE, STOPPED, LOCKED, "container_missing"})


@dataclass(frozen=True)
class Inside:
    """What the job's own files say at one look.

    Attributes:
        t: when, by our clock. since: of the state, by that machine's.
        age_s: of the snapshot, by that machine's clock. ahead_s: that machine's clock minus ours.
    """

    t: float
    state: State = State.UNKNOWN
    detail: str = ""
    attempt: int | None = None
    step: int | None = None
    since: float = 0.0
    age_s: float | None = None
    resident: bool = False
    lease: str = ""
    ahead_s: float = 0.0


@dataclass(frozen=True)
class Look:
    """One look. `fault`: a word of BLIND, "" where the machine answered; `inside`: None where nothing ever ran;
    `kernel_t`: up to when the kernel's lines are known, None where they could not be read; `asked`: of a locked
    container, that it was asked for its lock this time."""

    t: float
    fault: str = ""
    detail: str = ""
    inside: Inside | None = None
    kernel: tuple[Finding, ...] = ()
    kernel_t: float | None = None
    asked: bool = True


@dataclass(frozen=True)
class Memory:
    """What was said already. `since`: condition -> when it was first seen; `seen`: the last look inside; `kernel_t`:
    as in the last look that could read the kernel's lines, None before the first one; `down_t`: when the container was
    first seen not to run, 0 while it does; `lock_asks`, `lock_next`: how often its lock was asked for, when next;
    `inspected`: the crashed attempt of which it was asked whether its files are whole."""

    SCHEMA: ClassVar[int] = 1

    since: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seen: Inside | None = None
    kernel: tuple[str, ...] = ()
    kernel_t: float | None = None
    notified: dict[str, float] = field(default_factory=dict)
    down_t: float = 0.0
    lock_asks: int = 0
    lock_next: float = 0.0
    inspected: int | None = None
    schema: int = 1


@dataclass(frozen=True)
class Change:
    """News. `begun`: a condition began (or a single thing happened); else it is over. `alarm`: a person should know."""

    t: float
    key: str
    text: str
    begun: bool = True
    alarm: bool = True


def conditions(look: Look) -> dict[str, str]:
    """What is wrong now, word -> text."""
    if look.fault:
        return {look.fault: look.detail}
    seen = look.inside
    if seen is None:
        return {}
    if seen.state in LIVE_STATES and (not seen.resident or seen.age_s is None or seen.age_s > DEAD_S):
        age = f"its last look is {seen.age_s:.0f} s old" if seen.age_s is not None else "it never looked"
        gone = "does not live" if not seen.resident else "lives"
        return {"resident_dead": f"the supervisor beside the trainer {gone}: {age}"}
    if seen.state in (State.CRASHED, State.HUNG):
        at = f" at step {seen.step}" if seen.step is not None else ""
        return {seen.state.value: f"attempt {seen.attempt} {seen.state.value}{at}: {seen.detail}"}
    return {}


def changes(memory: Memory, look: Look) -> tuple[Memory, tuple[Change, ...]]:
    """What is news since the look before, and what is remembered now."""
    now = conditions(look)
    memory = _down(memory, look)
    said: list[Change] = []
    since, texts = dict(memory.since), dict(memory.texts)
    for word, text in now.items():
        if word not in since:
            since[word], texts[word] = look.t, text
            said.append(Change(look.t, word, f"{words(word)} since {clock(look.t)}: {text}"))
    for word in list(since):
        # Blind, what was wrong inside is not known to be over; nor is anything where not even pct can be asked.
        if word in now or look.fault == UNREACHABLE or (look.fault and word not in BLIND):
            continue
        began = since.pop(word)
        texts.pop(word, None)
        said.append(Change(look.t, word, f"no longer {words(word)}, after {look.t - began:.0f} s", False))
    if look.kernel_t is not None:
        memory = replace(memory, kernel_t=look.kernel_t)
    for finding in look.kernel:
        line = (finding.evidence or (finding.text,))[0]
        if line not in memory.kernel:
            memory = replace(memory, kernel=(*memory.kernel, line)[-_MOST_LINES:])
            said.append(Change(look.t, f"kernel:{finding.key}", f"kernel log: {finding.text} ({line})"))
    if (seen := look.inside) is not None:
        before = memory.seen
        if before is not None and (before.attempt, before.state) != (seen.attempt, seen.state) and not now:
            said.append(
                Change(look.t, f"state:{seen.state.value}", f"attempt {seen.attempt}: {seen.state.value}", True, False)
            )
        memory = replace(memory, seen=seen)
    return replace(memory, since=since, texts=texts), tuple(said)


def _down(memory: Memory, look: Look) -> Memory:
    """Since when it does not run, and when its lock is asked for again: each time twice as long after."""
    if look.fault == UNREACHABLE:
        return memory
    down = memory.down_t or look.t if look.fault in (STOPPED, LOCKED) else 0.0
    if look.fault != LOCKED:
        return replace(memory, down_t=down, lock_asks=0, lock_next=0.0)
    if not look.asked:
        return replace(memory, down_t=down)
    pause = min(LOCK_S[1], LOCK_S[0] * 2.0 ** min(memory.lock_asks, 30))
    return replace(memory, down_t=down, lock_asks=memory.lock_asks + 1, lock_next=look.t + pause)


def words(condition: str) -> str:
    return condition.replace("_", " ")


def situation(look: Look, memory: Memory, job: str, place: str) -> Situation:
    """The evidence as `decide` takes it: of a container that is known to be stopped at this very moment a crash of
    what last lived in it; of anything else nothing that may be acted on.

    Args:
        memory: after this look. place: names the container for good, such as `proxmox 200`.
    """
    seen = memory.seen
    if look.fault not in (STOPPED, LOCKED):
        blind = State.UNREACHABLE if look.fault else State.UNKNOWN
        return Situation(look.t, job=job, side="outside", state=blind, since=look.t, lease=False)
    began = memory.down_t or look.t
    missing: tuple[str, ...] = ()
    if seen is None or began - seen.t > SEEN_S:
        missing = ("what the job did before its container stopped",)
    ended = seen is not None and seen.state in (State.FINISHED, State.STOPPED)
    kind, title = ("ct_down", "The container does not run")
    if look.fault == LOCKED:
        kind, title = ("ct_locked", "The container is locked")
    diagnosis = Diagnosis(
        kind,
        title,
        look.detail,
        evidence=(EvidenceLine(look.detail, source="pct", role="cause"),),
        fingerprint=key(kind, place),
        confidence=1.0,
    )
    return Situation(
        look.t,
        lease=True,  # whoever held it lived in there
        missing=missing,
        side="outside",
        job=job,
        attempt=seen.attempt if seen is not None else None,
        state=seen.state if ended and seen is not None else State.CRASHED,
        since=min(began, look.t),
        step=seen.step if seen is not None else None,
        diagnosis=diagnosis,
    )
