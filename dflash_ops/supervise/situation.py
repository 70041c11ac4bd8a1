"""All that a decision may look at, gathered at one moment (docs/supervise.md, Evidence)."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_ops.contracts import Diagnosis, Finding, RemedyTable, State

#: Seconds after which what was seen is too old to act on.
FRESH_S = 10.0

#: A time of the evidence may be so much later than ours: the granularity of files' times, no more.
AHEAD_S = 2.0


@dataclass(frozen=True)
class CheckpointSeen:
    """A checkpoint and whether sizes and hashes are as its manifest says; None: nobody looked."""

    step: int
    path: str
    verified: bool | None = None


@dataclass(frozen=True)
class Situation:
    """The evidence. Times are seconds since the epoch on the job's own machine; None means "not known".

    Attributes:
        t: when it was gathered.
        lease: the lease is ours, and until `lease_expires`.
        missing: sources that were asked and did not answer; nothing acts while there are any.
        side: `inside` the container, or `outside` it.
        job, attempt, state, since: as the snapshot says; started = when the attempt began.
        step: the furthest step of this attempt, None before the first.
        resumed_step: step of the checkpoint that it went on from.
        rc, signal: how it ended; both None where nobody wrote it down. rebooted: the machine was, since it began.
        cut: no trainer of it ever ran, since who started it was ended in the middle of that.
        requested: a person or the system asked for its end (`stop`, `INT`, `TERM`), "" where nobody did.
        diagnosis: triage over this attempt; None: not diagnosed (which is partial evidence of a crash).
        findings: of the health detectors. skipped: detectors that could not look.
        stacks: text of the stack dump of this attempt, None while there is none; odd: the worker whose stack differs.
        stacks_failed: why there is none although it was asked for.
        left: pids of our own processes that outlived the attempt.
        checkpoints: newest first.
        table: the job's remedies. argv: the command as a person last started it, without
            changes of ours, for the dry run.
        adopted: not started by us: there is no command to start it again.
        device: of the diagnosis' entity, the device to leave out (`cuda:3`), "" where none is named.
        previous_release: what ran before, None where there is none.
        nofile: (soft, hard) limit of open files.
        nan: the newest line's loss is no number: its step is no progress.
    """

    t: float
    lease: bool = False
    lease_expires: float | None = None
    missing: tuple[str, ...] = ()
    side: str = "inside"
    job: str = ""
    attempt: int | None = None
    state: State = State.UNKNOWN
    since: float = 0.0
    started: float | None = None
    step: int | None = None
    resumed_step: int | None = None
    rc: int | None = None
    signal: str | None = None
    rebooted: bool = False
    cut: bool = False
    requested: str = ""
    diagnosis: Diagnosis | None = None
    findings: tuple[Finding, ...] = ()
    skipped: tuple[str, ...] = ()
    stacks: str | None = None
    odd: str | None = None
    stacks_failed: str = ""
    left: tuple[int, ...] = ()
    checkpoints: tuple[CheckpointSeen, ...] = ()
    table: RemedyTable = field(default_factory=RemedyTable)
    argv: tuple[str, ...] = ()
    adopted: bool = False
    device: str = ""
    previous_release: str | None = None
    nofile: tuple[int, int] | None = None
    nan: bool = False
