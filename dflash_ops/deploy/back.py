"""The way back: automatic in the watch window, by hand with `dflash-ops rollback`.

The rule here: what is gone back to ran before on this machine and is written down there. Nothing is made up, nothing is
deleted, and it is said loudly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_ops.contracts import Snapshot, State, from_dict, to_dict
from dflash_ops.deploy import spec
from dflash_ops.deploy.decide import Options, refusal, worth_going_back
from dflash_ops.deploy.operation import Operation
from dflash_ops.deploy.result import Result
from dflash_ops.deploy.window import RolledBack, crash, watch, window
from dflash_ops.errors import DflashError, StartError
from dflash_ops.hosts.base import Host
from dflash_ops.inventory import Job
from dflash_ops.resident.preflight import Check
from dflash_ops.resident.probe import Probe
from dflash_ops.view.stages import Stages
from dflash_ops.view.stopped import stopped_text

#: Seconds for the question, and for start and the checks beside the stop.
ASK_S = 60.0
CHECK_S = 600.0


@dataclass(frozen=True)
class Backed:
    """What was gone back to on one machine: `attempt` runs as `back_to` did. `same`: nothing was done, since the
    attempt that failed had the same release and config."""

    attempt: int
    back_to: int
    release: str | None = None
    set_aside: str | None = None
    restored: str | None = None
    same: bool = False


def back_to(
    operation: Operation, before: Snapshot, result: Result, options: Options, *, reason: str, unless_same: bool
) -> Backed:
    """Stop what runs, and start again what ran as `before` was seen. Nothing is watched.

    Raises:
        UsageError, ReleaseError: nothing was touched. StartError, HostError, ...: it failed on the way.
    """
    request = {
        "attempt": before.attempt,
        "unless_same": unless_same,
        "secrets": dict(operation.secrets),
        "restore": result.aside.get("to") if result.aside else None,
        "since": result.attempt,
        "actor": options.actor,
        "reason": reason,
    }
    with operation.stages.stage("rollback", f"going back to attempt {before.attempt}") as stage:
        said = _rollback(operation, request, operation.job.grace_s)
        number = before.attempt or 0
        if said.get("same"):
            stage.done(f"attempt {number} was the same release and config: nothing to go back to")
            return Backed(int(said["attempt"]), number, same=True)
        stage.done(f"attempt {said['attempt']} runs")
    result.rolled_back = {k: said.get(k) for k in ("back_to", "release", "attempt", "set_aside", "restored")}
    return Backed(int(said["attempt"]), number, said.get("release"), said.get("set_aside"), said.get("restored"))


def watch_again(operation: Operation, back: Backed, result: Result, options: Options) -> StartError | None:
    """The watch window of what was gone back to: why it failed as well, or None."""
    with operation.stages.stage("watch", f"attempt {back.attempt}: until its first step") as stage:
        seen = watch(operation, back.attempt, window(operation, options.watch_s), stage)
        again = crash(operation, back.attempt, seen)
        stage.done(f"attempt {back.attempt} is {seen.snapshot.state.value}")
    result.attempt, result.state = back.attempt, seen.snapshot.state.value
    return again


def go_back(
    operation: Operation, failed: StartError, before: Snapshot | None, result: Result, options: Options
) -> None:
    """After a crash in the watch window: start what ran before. Returns where there is nothing to go back to.

    Raises:
        RolledBack: it was done (or tried: the text says how that went).
    """
    if before is None or not worth_going_back(before):
        return
    reason = f"attempt {result.attempt} crashed in its watch window"
    try:
        back = back_to(operation, before, result, options, reason=reason, unless_same=True)
    except DflashError as error:
        error.what = f"{failed.what}\nand the rollback failed: {error.what}"
        raise
    if back.same:
        return
    again = watch_again(operation, back, result, options)
    release = f"release {back.release}" if back.release else "the job as it was"
    text = f"ROLLED BACK: attempt {back.attempt} runs {release} again, as attempt {back.back_to} did"
    if again is not None:
        text = f"ROLLED BACK to {release}, but attempt {back.attempt} crashed too: {again.what}"
    operation.stages.note(text)
    done = RolledBack(
        f"{failed.what}\n{text}",
        failed.where,
        "correct the cause and deploy again; --no-rollback leaves a crash as it is",
    )
    done.result = result.to_json()
    raise done


def _rollback(operation: Operation, request: Mapping[str, Any], grace: float) -> dict[str, Any]:
    stdin = json.dumps(request).encode() + b"\n"
    return operation.client.ask("rollback", stdin=stdin, deadline=grace + 2 * ASK_S + 120.0)


@dataclass
class Back:
    """What came of `rollback`; the fields of `rollback --json`."""

    job: str
    host: str
    plan: bool
    back_to: int | None = None
    release: str | None = None
    checks: tuple[Check, ...] = ()
    replaced: dict[str, Any] | None = None
    attempt: int | None = None
    state: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, "kind": "rollback", **to_dict(self)}


class Rollback(Operation):
    """`dflash-ops rollback`: a release that ran before, with its last attempt's config, from the newest checkpoint.

    Args:
        release: its id or the beginning of it; None: the one before.
    """

    def __init__(
        self,
        host: Host,
        job: Job,
        release: str | None,
        options: Options,
        stages: Stages,
        *,
        python: str,
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(host, job, stages, python=python, environ=environ)
        self.release, self.options = release, options
        self.result = Back(job.name, host.name, options.plan)
        self.said: dict[str, Any] = {}

    def run(self) -> Back:
        """Ask, check, stop, switch, start, watch.

        Raises:
            UsageError: there is nothing to go back to. PreflightError: it would not run; nothing was touched.
            StartError: it crashed.
        """
        self.prepare()
        if self.options.plan:
            self.say_plan()
            return self.result
        self.turn()
        if (failed := self.watch()) is not None:
            raise failed
        return self.result

    def prepare(self) -> None:
        """Find what to go back to, and whether it would run; nothing is touched.

        Raises:
            UsageError, PreflightError: as `run`.
        """
        self.secrets = self.job.secrets(self.environ)
        self._connect()
        with self.stages.stage("preflight", "is the machine ready for it") as stage:
            known = {"requires": dict(spec.REQUIRES), **self._devices()}
            asked = {**self._request(), "check": True, "known": known}
            said = self.said = self.client.ask("rollback", stdin=json.dumps(asked).encode(), deadline=CHECK_S)
            self.result.checks = tuple(from_dict(Check, c, "preflight check") for c in said["checks"])
            self.result.back_to, self.result.release = int(said["attempt"]), said["release"]
            self.result.overrides = dict(said["overrides"])
            stage.done(f"{self._name} as in attempt {said['attempt']}")
        if (error := refusal(self.result.checks, self.where)) is not None:
            raise error

    @property
    def _name(self) -> str:
        return f"release {self.said['release']}" if self.said["release"] else "the job"

    def say_plan(self) -> None:
        """What would happen."""
        grace = self.options.grace(self.job)
        if self.said["running"] is not None:
            self.stages.note(f"stop: would stop attempt {self.said['running']} (TERM, KILL after {grace:g} s)")
        self.stages.note(f"start: would start {self._name} as in attempt {self.said['attempt']}")

    def turn(self) -> None:
        """Stop what runs, switch, start."""
        with self.stages.stage("rollback", f"going back to {self._name}") as stage:
            request = {**self._request(), "use": self.pack.id, "attempt": self.said["attempt"]}
            done = _rollback(self, request, self.options.grace(self.job))
            self.result.replaced, self.result.attempt = done["stopped"], int(done["attempt"])
            stopped = f"{stopped_text(done['stopped'])}; " if done["stopped"] else ""
            stage.done(f"{stopped}attempt {self.result.attempt} runs {self._name}")

    def watch(self) -> StartError | None:
        """The watch window: why it crashed, or None."""
        assert self.result.attempt is not None
        seconds = window(self, self.options.watch_s)
        with self.stages.stage("watch", f"attempt {self.result.attempt}: until its first step") as stage:
            seen = watch(self, self.result.attempt, seconds, stage)
            self.result.state = seen.snapshot.state.value
            failed = crash(self, self.result.attempt, seen)
            stage.done(f"attempt {self.result.attempt} is {seen.snapshot.state.value}")
        return failed

    def _connect(self) -> None:
        with (
            self.stages.stage("connect", f"asking {self.host.name} what is there") as stage,
            self.question(None, deadline=ASK_S) as upload,
        ):
            probe = from_dict(Probe, upload.said, "probe")
            if not probe.resident:
                upload.send(release=False, resident=True)
            else:
                upload.end()
            self.found()
            state = probe.snapshot.state if probe.snapshot is not None else State.UNKNOWN
            stage.done(f"current is {probe.current or 'no release'}, the job is {state.value}")

    def _request(self) -> dict[str, Any]:
        return {
            "release": self.release,
            "secrets": dict(self.secrets),
            "grace_s": self.options.grace(self.job),
            "actor": self.options.actor,
            "reason": self.options.reason or "rolled back by hand",
        }

    def _devices(self) -> dict[str, Any]:
        trainer = self.job.trainer
        if trainer is None:
            return {}
        devices = [*trainer.target_devices, *trainer.drafter_devices]
        return {"devices": devices, "targets": len(trainer.target_devices)}
