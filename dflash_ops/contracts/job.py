"""job.json: all that the resident needs to start and watch one job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dflash_ops.contracts.overlay import RemedyTable
from dflash_ops.contracts.policy import Policy


@dataclass(frozen=True)
class Limits:
    """Seconds of silence after which a stage counts as hung, and the factor that makes a run slow.

    A step's limit is the larger of `step_s` and 3 x the p99 of this attempt's own steps.
    """

    loading_s: float = 1800.0
    compiling_s: float = 1800.0
    step_s: float = 300.0
    slow_factor: float = 0.5


@dataclass(frozen=True)
class JobSpec:
    """What `resident start` gets on standard input.

    `argv`, `cwd` and values of `env` may hold the placeholders `{attempt}`, `{root}`, `{release}`, `{checkpoints}`.
    `files` are texts written into the attempt's folder before the start (`run.toml`).
    `secret_env` names variables of `env` whose values must never be written down; they travel in `env` only.
    `policy` = what the supervisor may do; `remedies` = how this trainer does what it would do.
    `decision` = id of the supervisor's decision that this start carries out, "" where a person started it;
    `nofile` = soft limit of open files for the launcher, within the hard one.
    `watch_s` = seconds for which the deploy that starts it watches and may roll back: the supervisor lets it go first.
    `progress` is a regular expression with named groups for a foreign trainer, empty for the bundled one.
    Of a job on several machines this is the part of node `node_rank` (from 0) of `nnodes`; they meet at `rendezvous`
    (`HOST:PORT`, an address of node 0). argv and env say so to the trainer already.
    """

    SCHEMA: ClassVar[int] = 1

    job: str
    root: str
    session: str
    argv: tuple[str, ...]
    checkpoints: str
    socket: str = "dflash-ops"
    cwd: str = "{root}"
    env: dict[str, str] = field(default_factory=dict)
    secret_env: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    release: str | None = None
    progress: str = ""
    finished_rc: tuple[int, ...] = (0,)
    grace_s: float = 60.0
    history_limit: int = 50_000
    overrides: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    actor: str = "operator"
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)
    remedies: RemedyTable = field(default_factory=RemedyTable)
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    decision: str = ""
    nofile: int | None = None
    watch_s: float = 0.0
    schema: int = 1
