"""A deploy from its first question to a trainer that runs (docs/deploy.md).

The rule here: a running job is touched last. Everything that can be refused (arguments, the machine, the config, the
data, the checkpoint, the first steps) is refused before the first change that a person would notice; `current` is
switched by rename.
"""

from __future__ import annotations

import json
import shlex

from dflash_ops.contracts import to_dict
from dflash_ops.deploy.back import go_back
from dflash_ops.deploy.decide import describe
from dflash_ops.deploy.gate import ask_gate, gate_failed, say_untried
from dflash_ops.deploy.prepare import Preparation
from dflash_ops.deploy.result import Result
from dflash_ops.deploy.say import say_plan
from dflash_ops.deploy.transfer import Pack, build_pack
from dflash_ops.deploy.window import crash, watch, window
from dflash_ops.errors import DflashError, StartError
from dflash_ops.view.stopped import stopped_text

START_S = 120.0

__all__ = ["Deployment", "Pack", "Result", "build_pack"]


class Deployment(Preparation):
    """One deploy of one job, or of one of its nodes (see `Operation` and `Preparation` for the arguments)."""

    def run(self) -> Result:
        """All stages in order.

        Raises:
            JobBusy, PreflightError: refused, nothing changed (with `plan`: after everything was said).
            RolledBack: the new attempt crashed, and the one before runs again.
            ReleaseError, TransferError, StartError, HostError, ...: as each stage's text says.
        """
        try:
            return self._run()
        finally:
            self.result.execs = self.host.execs

    def _run(self) -> Result:
        self.prepare()
        if self.options.plan:
            self.say_plan()
            return self.result
        self.gate()
        self.stop()
        self.aside()
        self.start()
        failed = self.watch()
        if failed is not None and self.options.rollback:
            go_back(self, failed, self.ready.probe.snapshot, self.result, self.options)
        if failed is not None:
            raise failed
        return self.result

    def interrupted(self) -> str:
        """What a person who pressed Ctrl-C in the middle of `run` needs to know."""
        job = shlex.quote(self.job.name)
        if not self.touched:
            return f"interrupted: the job {job} was not touched"
        return f"interrupted while it was being {self.touched}; what is true now: dflash-ops status {job}"

    # -- the steps, in their order -------------------------------------------------------------------------------

    def say_plan(self) -> None:
        """What would happen.

        Raises:
            JobBusy, PreflightError: it would be refused; the first reason.
        """
        say_plan(self, self.ready.probe, self.ready.steps, [e.what for e in self._refusals])
        if self._refusals:
            raise self._refusals[0]

    def gate(self) -> None:
        """A few real steps of the new release, beside what runs.

        Raises:
            PreflightError: it failed; what runs was not touched.
        """
        request, steps = self.ready.request, self.ready.steps
        if not steps.gate:
            if steps.stop and self.options.gate is None and not self._can_gate():
                self.stages.note("gate: the job has no `gate` command: whether the new release runs was not tried")
            return
        untouched = "the running job was not touched" if steps.stop else ""
        where = "beside the running job" if steps.stop else "at tiny size"
        with self.stages.stage("gate", f"trying the new release {where}") as stage:
            stage.until(self.job.gate_s, "at most")
            self.result.gate = said = ask_gate(self, request, self.job.gate, self.ready.config_name)
            if not said["ok"]:
                advice = "correct the cause; --no-gate deploys without trying"
                raise gate_failed(self, said, "the new release failed its smoke gate", untouched, advice)
            stage.done(said["what"])
        say_untried(self, said)

    def stop(self) -> None:
        """End what runs: TERM, then KILL after the grace time."""
        probe = self.ready.probe
        if not self.ready.steps.stop:
            return
        self.touched = "stopped"
        grace = self.options.grace(self.job)
        with self.stages.stage("stop", f"{describe(probe.snapshot, probe.now)}: save and stop") as stage:
            stage.until(grace, "before KILL")
            reason = self.options.reason or "replaced by a new deploy"
            self.result.replaced = self.client.stop(grace=grace, reason=reason, actor=self.options.actor)
            stage.done(stopped_text(self.result.replaced))

    def aside(self) -> None:
        """Set the checkpoints aside, with `fresh`."""
        if not self.ready.steps.aside:
            return
        self.touched = "made fresh"
        with self.stages.stage("aside", "setting the checkpoints aside") as stage:
            reason = self.options.reason or "deploy --fresh"
            self.result.aside = self.client.aside(reason=reason, actor=self.options.actor)
            moved = self.result.aside.get("to")
            stage.done(f"checkpoints set aside: {moved}" if moved else "there were no checkpoints")

    def start(self) -> None:
        """Switch the release and start an attempt.

        Raises:
            StartError, JobBusy, ...: it did not start.
        """
        job_spec = self._spec(self.ready.built, self.ready.config_name)
        self.touched = "started"
        request = {
            "use": self.pack.id,
            "deployed": {
                "release": self.result.release,
                "resident": self.result.resident,
                "overrides": self.result.overrides,
                "devices": self.result.devices,
                "begin": self.options.begin,
                "reason": self.options.reason,
                "gate": self.result.gate["what"] if self.result.gate else None,
            },
            "spec": to_dict(job_spec),
            "keep_releases": self.job.keep_releases,
        }
        with self.stages.stage("start", "switching the release, starting the session") as stage:
            try:
                stdin = json.dumps(request).encode() + b"\n"
                started = self.client.ask("begin", stdin=stdin, deadline=START_S)
            except DflashError as error:
                if self.ready.steps.stop:
                    error.next = f"{error.next}; the old attempt is stopped: deploy again to go on".lstrip("; ")
                raise
            self.result.attempt = int(started["attempt"])
            self.result.removed = list(started["removed"])
            stage.done(f"attempt {self.result.attempt} runs")
        if self.result.removed:
            names = ", ".join(self.result.removed)
            self.stages.note(f"releases removed (keep_releases = {self.job.keep_releases}): {names}")

    def watch(self) -> StartError | None:
        """The watch window: what became of an attempt that did not survive it, or None."""
        self.touched = "watched"
        attempt = self.result.attempt
        assert attempt is not None
        seconds = window(self, self.options.watch_s)
        with self.stages.stage("watch", f"attempt {attempt}: until its first step") as stage:
            seen = self.seen = watch(self, attempt, seconds, stage)
            self.result.state = seen.snapshot.state.value
            failed = crash(self, attempt, seen)
            stage.done(f"attempt {attempt} is {seen.snapshot.state.value}" if failed is None else "it crashed")
        return failed
