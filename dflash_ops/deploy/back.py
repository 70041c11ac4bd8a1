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
from dflash_ops.deploy import spec, transfer
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


def go_back(
    operation: Operation, failed: StartError, before: Snapshot | None, result: Result, options: Options
) -> None:
    """After a crash in the watch window: start what ran before. Returns where there is nothing to go back to.

    Raises:
        RolledBack: it was done (or tried: the text says how that went).
    """
    if before is None or not worth_going_back(before):
        return
    crashed = result.attempt
    request = {
        "attempt": before.attempt,
        "unless_same": True,
        "secrets": dict(operation.secrets),
        "restore": result.aside.get("to") if result.aside else None,
        "since": crashed,
        "actor": options.actor,
        "reason": f"attempt {crashed} crashed in its watch window",
    }
    with operation.stages.stage("rollback", f"going back to attempt {before.attempt}") as stage:
        try:
            said = _rollback(operation, request, operation.job.grace_s)
        except DflashError as error:
            error.what = f"{failed.what}\nand the rollback failed: {error.what}"
            raise
        if said.get("same"):
            stage.done(f"attempt {before.attempt} was the same release and config: nothing to go back to")
            return
        attempt = int(said["attempt"])
        stage.say(f"attempt {attempt} runs")
        seen = watch(operation, attempt, window(operation, options.watch_s), stage)
        again = crash(operation, attempt, seen)
        stage.done(f"attempt {attempt} is {seen.snapshot.state.value}")
    result.rolled_back = {k: said.get(k) for k in ("back_to", "release", "attempt", "set_aside", "restored")}
    result.attempt, result.state = attempt, seen.snapshot.state.value
    release = f"release {said['release']}" if said.get("release") else "the job as it was"
    text = f"ROLLED BACK: attempt {attempt} runs {release} again, as attempt {before.attempt} did"
    if again is not None:
        text = f"ROLLED BACK to {release}, but attempt {attempt} crashed too: {again.what}"
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

    def run(self) -> Back:
        """Ask, check, stop, switch, start, watch.

        Raises:
            UsageError: there is nothing to go back to. PreflightError: it would not run; nothing was touched.
            StartError: it crashed.
        """
        self.secrets = self.job.secrets(self.environ)
        self._connect()
        request = self._request()
        with self.stages.stage("preflight", "is the machine ready for it") as stage:
            known = {
                "requires": dict(spec.REQUIRES),
                **self._devices(),
            }
            said = self.client.ask(
                "rollback", stdin=json.dumps({**request, "check": True, "known": known}).encode(), deadline=CHECK_S
            )
            self.result.checks = tuple(from_dict(Check, c, "preflight check") for c in said["checks"])
            self.result.back_to, self.result.release = int(said["attempt"]), said["release"]
            self.result.overrides = dict(said["overrides"])
            name = f"release {said['release']}" if said["release"] else "the job"
            stage.done(f"{name} as in attempt {said['attempt']}")
        if (error := refusal(self.result.checks, self.where)) is not None:
            raise error
        grace = self.options.grace_s or self.job.grace_s
        if self.options.plan:
            if said["running"] is not None:
                self.stages.note(f"stop: would stop attempt {said['running']} (TERM, KILL after {grace:g} s)")
            self.stages.note(f"start: would start {name} as in attempt {said['attempt']}")
            return self.result
        with self.stages.stage("rollback", f"going back to {name}") as stage:
            done = _rollback(self, {**request, "use": self.pack.id, "attempt": said["attempt"]}, grace)
            self.result.replaced, self.result.attempt = done["stopped"], int(done["attempt"])
            stopped = f"{stopped_text(done['stopped'])}; " if done["stopped"] else ""
            stage.done(f"{stopped}attempt {self.result.attempt} runs {name}")
        seconds = window(self, self.options.watch_s)
        with self.stages.stage("watch", f"attempt {self.result.attempt}: until its first step") as stage:
            seen = watch(self, self.result.attempt, seconds, stage)
            self.result.state = seen.snapshot.state.value
            failed = crash(self, self.result.attempt, seen)
            stage.done(f"attempt {self.result.attempt} is {seen.snapshot.state.value}")
        if failed is not None:
            raise failed
        return self.result

    def _connect(self) -> None:
        request = {"root": self.job.root, "release": None, "resident": self.pack.id}
        with self.stages.stage("connect", f"asking {self.host.name} what is there") as stage:
            probe = from_dict(Probe, self.ask("probe", request, deadline=ASK_S), "probe")
            if not probe.resident:
                transfer.send(self.host, self.python, self.pack, self.job.root, None, resident=True)
            self.found()
            state = probe.snapshot.state if probe.snapshot is not None else State.UNKNOWN
            stage.done(f"current is {probe.current or 'no release'}, the job is {state.value}")

    def _request(self) -> dict[str, Any]:
        return {
            "release": self.release,
            "secrets": dict(self.secrets),
            "grace_s": self.options.grace_s or self.job.grace_s,
            "actor": self.options.actor,
            "reason": self.options.reason or "rolled back by hand",
        }

    def _devices(self) -> dict[str, Any]:
        trainer = self.job.trainer
        if trainer is None:
            return {}
        devices = [*trainer.target_devices, *trainer.drafter_devices]
        return {"devices": devices, "targets": len(trainer.target_devices)}
