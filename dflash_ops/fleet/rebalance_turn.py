"""The deeds of a rebalance: try the new split, switch to it, let it settle, measure it.

The rule here: each step is one command on the machine, and what touches the job is finished by that machine itself
(resident/switch.py). Whoever watches may go away: the attempt goes on, and the next command finds it.
"""

from __future__ import annotations

import secrets as random_names
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_ops.balance import Split
from dflash_ops.client import Seen
from dflash_ops.contracts import JobSpec, State, from_dict, to_dict
from dflash_ops.deploy import boot
from dflash_ops.deploy.decide import describe, refusal
from dflash_ops.deploy.gate import ask_gate, gate_failed, say_untried
from dflash_ops.deploy.window import crash
from dflash_ops.errors import ConnectionLost, JobBusy, PreflightError, StartError, UsageError
from dflash_ops.fleet import rebalance_choice as choice
from dflash_ops.fleet.follow import PAUSES_S, Watch
from dflash_ops.fleet.rebalance_choice import Devices
from dflash_ops.fleet.rebalance_judge import Pace, Settling, pace_of
from dflash_ops.fleet.rebalance_look import ASK_S, CHECK_S, Looking
from dflash_ops.fleet.rebalance_result import prediction_json, split_json
from dflash_ops.resident.preflight import Check
from dflash_ops.resident.probe import Probe
from dflash_ops.supervise.ledger import by_supervisor
from dflash_ops.view.stages import Stage
from dflash_ops.view.stopped import stopped_text
from dflash_ops.view.text import duration

#: Seconds that stop and start may take beyond the grace time.
SWITCH_S = 330.0

#: Seconds for which a pass of the supervisor is waited for before going back, and between two tries.
BUSY_S = 60.0
AGAIN_S = 2.0


@dataclass(frozen=True)
class Settled:
    """How the settling ended: `failed` = the new split crashed or hangs; `rc` of a crash; `short` = why it was not
    measured; both empty: enough steps came."""

    failed: StartError | None = None
    rc: int | None = None
    short: str = ""


class Turning(Looking):
    """What touches the job, step by step (see `Looking` for the arguments)."""

    #: Seconds for which a lost link is waited for while a split settles, and between two tries (fleet/follow.py).
    lost_s = 180.0
    pauses: Sequence[float] = PAUSES_S

    #: What a person who pressed Ctrl-C needs to know; empty: nothing was touched.
    touched = ""

    # -- before anything is touched

    def check(self, spec: JobSpec, devices: Devices) -> dict[str, Any]:
        """All checks of preflight for the new split, beside the running one; what the trainer says that it needs.

        Raises:
            PreflightError, JobBusy: refused; nothing was touched.
        """
        with self.stages.stage("preflight", f"is the machine ready for {devices.split}") as stage:
            said = self.ask("preflight", to_dict(self.request(spec, devices)), deadline=CHECK_S)
            checks = tuple(from_dict(Check, c, "preflight check") for c in said["checks"])
            # That there is no checkpoint yet is no news: the running attempt saves one when it stops.
            saves = ("checkpoints", "warn")
            self.result.checks = checks = tuple(c for c in checks if (c.name, c.status) != saves)
            stage.done(f"{sum(c.status == 'ok' for c in checks)} ok")
        for check in checks:
            if check.status == "warn":
                self.stages.note(f"  {check.name:<12} warn: {check.what}" + (f"; {check.next}" if check.next else ""))
        if (error := refusal(checks, self.where)) is not None:
            raise error
        return dict(said["needs"])

    def gate(self, spec: JobSpec, devices: Devices) -> None:
        """A few real steps with as many targets and drafters, beside the running job.

        Raises:
            PreflightError: it failed; the running job was not touched.
        """
        if not self.asked.gate:
            self.note("gate: not tried (--no-gate)")
            return
        what = f"trying {devices.split} beside the running job, up to {self.job.gate_s:g} s"
        with self.stages.stage("gate", what) as stage:
            self.result.gate = said = ask_gate(self, self.request(spec, devices), None, choice.config_name(spec))
            if not said["ok"]:
                untouched, advice = "the running job was not touched", "correct the cause; --no-gate goes on without"
                raise gate_failed(self, said, f"{devices.split} failed its smoke gate", untouched, advice)
            stage.done(said["what"])
        say_untried(self, said)

    def install(self) -> None:
        """The resident of our own version is there: what is started runs under it."""
        with (
            self.stages.stage("connect", f"asking {self.host.name} for its resident") as stage,
            self.question(None, deadline=ASK_S) as upload,
        ):
            probe = from_dict(Probe, upload.said, "probe")
            if probe.resident:
                upload.end()
            else:
                upload.send(release=False, resident=True)
            self.found()
            stage.done(f"resident {self.pack.id}")

    # -- the change itself

    def switch(
        self,
        spec: JobSpec,
        back: JobSpec | None,
        *,
        frm: Split,
        to: Split,
        expect: int,
        since: int | None = None,
        going_back: bool = False,
    ) -> int:
        """Stop attempt `expect`, start `spec` (or `back`, where that does not start); the new attempt's number.

        Raises:
            JobBusy: nothing was done. StartError: it did not start; the text says what runs now. HostError: the link.
        """
        grace = self.asked.grace_s if self.asked.grace_s is not None else self.job.grace_s
        result = self.result
        event = {
            "from": split_json(frm),
            "to": split_json(to),
            "back": going_back,
            "auto": self.asked.auto,
            "reason": spec.reason,
            "predicted": prediction_json(result.predicted) if not going_back else None,
            "before": result.before.to_json() if result.before is not None else None,
        }
        request = {
            "root": self.job.root,
            "token": random_names.token_hex(8),
            "use": self.pack.id,
            "expect": expect,
            "spec": to_dict(spec),
            "back": to_dict(back) if back is not None else None,
            "grace_s": grace,
            "actor": self.asked.actor,
            "reason": spec.reason,
            "since": since,
            "event": event,
        }
        said = boot.follow(
            self.host, self.python, self.pack.content, "dflash_ops.resident.switch", request,
            idle=grace + SWITCH_S, at=self.at,
        )  # fmt: skip
        answer: dict[str, Any] = {}
        with self.stages.stage("stop", f"{frm}: save and stop attempt {expect}, up to {grace:g} s") as stage:
            answer = _until_starting(said)
            if not going_back:
                self.result.stopped = answer.get("stopped")
            stage.done(stopped_text(answer["stopped"]) if answer.get("stopped") else "stopped")
        with self.stages.stage("start", f"starting {to}, the same release and checkpoint") as stage:
            for line in said:
                answer = answer if "progress" in line else line
            number = int(answer["attempt"])
            stage.done(f"attempt {number} runs with {to}")
        for warning in answer["warnings"]:
            self.note(f"warning: {warning}")
        if answer.get("set_aside"):
            self.note(f"checkpoints set aside: {answer['set_aside']}")
        return number

    def back_to(self, spec: JobSpec, *, frm: Split, to: Split, expect: int, since: int | None) -> int:
        """Stop what failed and start what ran before; the supervisor may be at work on it, and is waited for.

        Raises:
            as `switch`.
        """
        end = time.monotonic() + BUSY_S
        while True:
            try:
                return self.switch(spec, None, frm=frm, to=to, expect=expect, since=since, going_back=True)
            except JobBusy:
                if time.monotonic() > end:
                    raise
            time.sleep(AGAIN_S)
            newest = self.pace()["newest"]
            if newest is not None and newest["spec"] is not None and by_supervisor(newest["spec"]["actor"]):
                expect = int(newest["attempt"])

    # -- afterwards

    def settle(self, attempt: int, plan: Settling) -> Settled:
        """Until the new split has made enough steps, failed, or the time is over.

        Raises:
            ConnectionLost: the link was gone for too long; the attempt goes on. StartError: a person stopped it.
        """
        what = f"attempt {attempt}: {plan.settle} steps to settle, {plan.measure} to measure"
        with self.stages.stage("settle", what) as stage, Watch({0: self.client}, pauses=self.pauses) as watch:
            for seen in self._seen(watch, attempt, stage):
                snapshot = seen.snapshot
                step = snapshot.progress.step if snapshot.progress is not None else None
                if snapshot.attempt != attempt:
                    return self._replaced(attempt, snapshot.attempt)
                if snapshot.state is State.CRASHED:
                    rc = snapshot.exit.rc if snapshot.exit is not None else None
                    return Settled(failed=crash(self, attempt, seen), rc=rc)
                if snapshot.state is State.HUNG:
                    hung = StartError(
                        f"attempt {attempt} hangs: {snapshot.detail}",
                        self.where,
                        f"dflash-ops triage --job {self.typed}",
                    )
                    return Settled(failed=hung)
                if snapshot.state is State.STOPPED:
                    raise StartError(
                        f"attempt {attempt} was stopped by somebody before it was measured",
                        self.where,
                        f"it has the new split; start it: dflash-ops deploy {self.typed} --resume",
                    )
                if snapshot.state is State.FINISHED:
                    return Settled(short="the job finished before enough steps had come")
                if step is not None and step >= plan.end:
                    stage.done(f"{plan.settle} steps to settle, {plan.measure} measured")
                    return Settled()
                stage.say(f"{plan.text(step)} ({describe(snapshot, seen.now)})")
            stage.done("time is over")
        return Settled(short=f"enough steps did not come within {duration(self.asked.limit_s)}")

    def _replaced(self, attempt: int, newest: int | None) -> Settled:
        found = self.pace()["newest"]
        actor = found["spec"]["actor"] if found is not None and found["spec"] is not None else "somebody"
        if by_supervisor(actor):
            why = f"attempt {attempt} failed, and the supervisor started attempt {newest} in its place"
            return Settled(failed=StartError(why, self.where, f"dflash-ops incidents list {self.typed}"))
        raise JobBusy(
            f"attempt {newest} was started meanwhile by {actor}: what was begun here is not measured",
            self.where,
            f"look: dflash-ops status {self.typed}; nothing more was done",
        )

    def _seen(self, watch: Watch[int], attempt: int, stage: Stage) -> Iterator[Seen]:
        """What is heard of the attempt, or of a later one, until the time is over.

        Raises:
            ConnectionLost: nothing was heard for `lost_s` seconds.
        """
        end, heard = time.monotonic() + self.asked.limit_s, time.monotonic()
        while time.monotonic() < end:
            watch.wait(0.5)
            look = watch.looks()[0]
            if look.link == "live" and look.seen is not None:
                heard = time.monotonic()
                if look.seen.snapshot.attempt is not None and look.seen.snapshot.attempt >= attempt:
                    yield look.seen
                continue
            silent = time.monotonic() - heard
            if silent > self.lost_s:
                raise ConnectionLost(
                    f"the link was gone for {duration(silent)} while the new split settled: {look.error}",
                    self.where,
                    self.again(),
                )
            if look.error:
                stage.say(f"the link is lost ({look.error}); attempt {attempt} goes on, trying again")

    def again(self, split: Split | None = None) -> str:
        """What to type for a split that runs and was not measured."""
        split = split or self.result.asked or self.now
        command = f"dflash-ops rebalance {self.typed} --targets {split.targets} --drafters {split.drafters}"
        return f"measure it, and keep it or go back: {command}"

    def measured(self, attempt: int, plan: Settling) -> Pace:
        """The pace of the new split, of the steps after it had settled.

        Raises:
            PreflightError: it cannot be told.
        """
        with self.stages.stage("measure", f"the records of attempt {attempt}") as stage:
            said = self.pace()["measured"]
            if said is None or int(said["attempt"]) != attempt:
                raise PreflightError(f"attempt {attempt} has no records", self.where, self.again())
            try:
                found = pace_of(said["records"], after_step=plan.warm)
            except UsageError as error:
                raise PreflightError(error.what, self.where, self.again()) from None
            self.result.measured = found
            stage.done(f"{found.steps} steps in {duration(found.seconds)}")
        return found


def _until_starting(said: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Lines up to the start, or the answer."""
    line: dict[str, Any] = {}
    for line in said:
        if line.get("progress") == "starting" or "attempt" in line:
            break
    return line
