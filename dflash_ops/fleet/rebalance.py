"""Applying a rebalance: another split of a running job's devices, measured against what was predicted.

    look -> table -> gate -> switch (stop, start: one deed) -> settle -> measure --> kept: inventory.toml has it
                                                                            `-----> worse, or it failed: back

The rules here: the running job is touched last, and by one command that ends by itself whatever becomes of this one
(resident/switch.py); what is not measured is not kept silently; what is worse is taken back (docs/rebalance.md).
"""

from __future__ import annotations

from typing import Any

from dflash_ops.balance import Prediction, Split
from dflash_ops.contracts import JobSpec, from_dict
from dflash_ops.deploy.window import crash, watch, window
from dflash_ops.errors import DflashError, HostError, PreflightError, StartError
from dflash_ops.fleet import rebalance_choice as choice
from dflash_ops.fleet.rebalance_choice import Devices
from dflash_ops.fleet.rebalance_judge import Pace, Settling, settling, worse
from dflash_ops.fleet.rebalance_result import Asked, Result, WentBack, prediction_json, split_json
from dflash_ops.fleet.rebalance_turn import Settled, Turning
from dflash_ops.inventory.rewrite import set_devices
from dflash_ops.view.text import ktok

__all__ = ["Asked", "Rebalance", "Result", "WentBack"]

#: Exit code of a trainer whose loss was not finite: what it saved is not gone on from.
NOT_FINITE = 4


class Rebalance(Turning):
    """One rebalance of one job (see `Looking` for the arguments)."""

    def run(self) -> Result:
        """All stages in order.

        Raises:
            UsageError, PreflightError, JobBusy: refused; nothing was touched.
            WentBack: it was worse or failed, and what ran before runs again. StartError, HostError: as the text says.
        """
        try:
            return self._run()
        except HostError as error:
            # Whatever was begun there is ended there; what is lacking is only who measures it.
            error.next = self._unfinished() or error.next
            raise
        finally:
            self.result.execs = self.host.execs

    def _run(self) -> Result:
        choice.refuse_job(self.job)
        self.look()
        if (begun := self._begun()) is not None:
            if not self.asked.plan:
                return self._finish(begun)
            self.note(f"{self.now} was begun by a rebalance that never measured it; {self.again(self.now)}")
        table = self.asked.plan or self.asked.auto
        chosen = self._devices(self.asked.split) if self.asked.split is not None else None
        if chosen == self.devices and not table:
            return self._same()
        if not self.asked.plan:
            self.must_run()
        self.measure()
        if table:
            self.model(self.memory())
        if self.asked.plan:
            self.result.outcome = "planned"
            return self.result
        if self.asked.auto:
            self.judge_worth()
            assert self.result.worth is not None
            if not self.result.worth.yes:
                self.result.outcome, self.result.reason = "not_worth", self.result.worth.why
                self.note(f"nothing was changed: {self.result.worth.why}")
                return self.result
            self.result.asked = self.result.worth.split
            self.note(self.result.worth.why)
        assert self.result.asked is not None
        return self._apply(self.result.asked, self._devices(self.result.asked))

    def interrupted(self) -> str:
        """What a person who pressed Ctrl-C in the middle of `run` needs to know."""
        if not self.touched:
            return f"interrupted: the job {self.typed} was not touched"
        return f"interrupted: {self._unfinished()}"

    def _unfinished(self) -> str:
        """What is true of a change that this command does not see to its end, and what to type; empty: none began."""
        job = self.typed
        if self.touched == "switched":
            return f"the change goes on by itself there, see: dflash-ops status {job}; once it is done {self.again()}"
        if self.touched == "back":
            return f"it was going back, which goes on by itself there, see: dflash-ops status {job}"
        return self.again() if self.touched == "started" else ""

    # -- what was asked for

    def _devices(self, split: Split) -> Devices:
        """Which devices a split means; refused where it cannot be.

        Raises:
            UsageError: as `choice.choose`.
        """
        pool = choice.pool(self.devices, self.asked.devices)
        found = choice.choose(pool, split, features=self.features)
        self.result.devices = {"target": list(found.target), "drafter": list(found.drafter)}
        return found

    def _same(self) -> Result:
        self.result.outcome = "same"
        self.note(f"{self.job.name} runs with {self.now} already (attempt {self.attempt}): nothing was done")
        trainer = self.job.trainer
        assert trainer is not None
        if (trainer.target_devices, trainer.drafter_devices) != (self.devices.target, self.devices.drafter):
            written = Split(len(trainer.target_devices), len(trainer.drafter_devices))
            self.note(f"the inventory has other devices ({written}): the next deploy would start it with those")
        return self.result

    def _begun(self) -> dict[str, Any] | None:
        """A change of the split that runs and was never measured: its event."""
        events = self.said["events"]
        later = {e["event"] for e in events[1:]}
        if not events or later & {"rebalanced", "deployed", "rolled_back"} or events[0]["data"].get("back"):
            return None
        to = events[0]["data"].get("to") or {}
        mine = Split(to.get("targets", -1), to.get("drafters", -1)) == self.now == (self.asked.split or self.now)
        return events[0] if mine and self.attempt > (events[0]["attempt"] or 0) else None

    # -- applying

    def _apply(self, split: Split, devices: Devices) -> Result:
        reason = self.asked.reason or f"rebalance {self.now} -> {split}"
        spec = choice.with_devices(
            self.spec, devices, self.secrets, reason=reason, actor=self.asked.actor, watch_s=self.asked.limit_s
        )
        back = choice.with_secrets(
            self.spec, self.secrets, reason=f"{split} did not start", actor=self.asked.actor, watch_s=self.job.watch_s
        )
        self._note_length(split)
        needs = self.check(spec, devices)
        if self.result.table is None:
            self.model(self.memory_of(needs))
        row = self.row_of(split)
        if row is not None and row.refused:
            raise PreflightError(f"{split} is refused: {row.refused}", self.where, "see the others: --plan")
        self.result.predicted = row.prediction if row is not None else None
        self.gate(spec, devices)
        self.install()
        self.touched = "switched"
        attempt = self.switch(spec, back, frm=self.now, to=split, expect=self.attempt)
        self.touched = "started"
        self.result.attempt = attempt
        first = self._saved_step()
        plan = settling(self.config, first, self.asked.settle, self.asked.measure)
        return self._conclude(attempt, plan, frm=self.now, to=split, before_spec=self.spec)

    def _note_length(self, split: Split) -> None:
        """`train.steps` counts the steps of one drafter: with more of them the rest of the run is more batches."""
        if (self.config.get("train") or {}).get("steps") and split.drafters != self.now.drafters:
            self.note(
                f"train.steps counts one drafter's steps: what is left is trained by {split.drafters} instead of "
                f"{self.now.drafters} drafters, so by {split.drafters / self.now.drafters:.2g} x as many batches"
            )

    def _saved_step(self) -> int:
        """The step that the new attempt goes on from."""
        saved = (self.result.stopped or {}).get("checkpoint") or {}
        step = self.snapshot.progress.step if self.snapshot is not None and self.snapshot.progress is not None else None
        return int(saved.get("step") or step or 0)

    def _finish(self, begun: dict[str, Any]) -> Result:
        """A change whose command went away before it was measured: measured now."""
        data = begun["data"]
        frm = Split(data["from"]["targets"], data["from"]["drafters"])
        self.note(f"{frm} -> {self.now} was begun before and never measured: it is measured now")
        self.result.asked, self.result.attempt = self.now, self.attempt
        self.result.before = _pace(data.get("before"))
        self.result.predicted = _prediction(data.get("predicted"), self.now)
        said = self.said["before"]
        if said is None or said["spec"] is None:
            raise PreflightError("what ran before is not written down whole: it cannot be gone back to", self.where, "")
        self.install()
        self.touched = "started"
        steps = [int(r["step"]) for r in self.records if isinstance(r.get("step"), int)]
        # Where it has told nothing yet, the records are those of the attempt before: it went on from their last.
        first = (min if self.result.measured_at == self.attempt else max)(steps, default=0)
        plan = settling(self.config, first, self.asked.settle, self.asked.measure)
        return self._conclude(
            self.attempt, plan, frm=frm, to=self.now, before_spec=from_dict(JobSpec, said["spec"], "job.json")
        )

    def _conclude(self, attempt: int, plan: Settling, *, frm: Split, to: Split, before_spec: JobSpec) -> Result:
        settled = self.settle(attempt, plan)
        if settled.failed is not None:
            return self._back(settled, attempt, frm=frm, to=to, before_spec=before_spec)
        if settled.short:
            self._record("unmeasured", settled.short, frm=frm, to=to)
            self.note(f"not measured: {settled.short}; {self.again()}")
            return self.result
        after = self.measured(attempt, plan)
        before = self.result.before
        text = self._compared(frm, to, after)
        slower = before is not None and worse(before, after)
        if slower and self.asked.back:
            slow = StartError(f"{to} is slower than {frm}: {text}", self.where, "")
            return self._back(Settled(failed=slow), attempt, frm=frm, to=to, before_spec=before_spec)
        self.result.reason = text
        self._keep(frm, to, "kept_worse" if slower else "kept")
        self.note(f"kept {to}{', though it is slower (--no-back)' if slower else ''}: {text}")
        return self.result

    def _compared(self, frm: Split, to: Split, after: Pace) -> str:
        before, predicted = self.result.before, self.result.predicted
        text = f"{ktok(after.block_tok_s)} Ktok/s measured ({ktok(after.low)} to {ktok(after.high)})"
        if predicted is not None and predicted.block_tok_s:
            off = after.block_tok_s / predicted.block_tok_s - 1
            text += f", {ktok(predicted.block_tok_s)} predicted ({100 * off:+.0f} %)"
        if before is None:
            return f"{text}; nothing was measured before, so it is compared with nothing"
        return f"{text}, {ktok(before.block_tok_s)} before with {frm}"

    def _keep(self, frm: Split, to: Split, outcome: str) -> None:
        """The inventory has the new split from now on, and the journal says so.

        Raises:
            DflashError: the inventory could not be changed: its lines are in `next`.
        """
        fault: DflashError | None = None
        with self.stages.stage("inventory", "writing the new split into the inventory") as stage:
            try:
                workers = choice.devices_of(self.spec, self.config) if frm == to else self._of_new()
                changed = set_devices(self.job, workers.target, workers.drafter)
                self.result.inventory = "written" if changed else "unchanged"
                stage.done(f"{self.job.inventory} has {to}")
            except DflashError as error:
                fault, self.result.inventory = error, "by hand"
                stage.done("it could not be written, see below")
        self._record(outcome, self.result.reason, frm=frm, to=to)
        self.touched = ""
        if fault is not None:
            fault.what = f"{to} runs and is kept ({self.result.reason}), but {fault.what}"
            fault.result = self.result.to_json()
            raise fault

    def _of_new(self) -> Devices:
        if self.result.devices:
            return Devices(tuple(self.result.devices["target"]), tuple(self.result.devices["drafter"]))
        return self.devices

    def _record(self, outcome: str, why: str, *, frm: Split, to: Split) -> None:
        result = self.result
        result.outcome, result.reason = outcome, why
        data = {
            "from": split_json(frm),
            "to": split_json(to),
            "outcome": outcome,
            "why": why,
            "predicted": prediction_json(result.predicted),
            "before": result.before.to_json() if result.before is not None else None,
            "measured": result.measured.to_json() if result.measured is not None else None,
            "attempt": result.attempt,
            "back": result.back,
            "inventory": result.inventory,
        }
        self.client.record("rebalanced", data, actor=self.asked.actor, attempt=result.attempt)

    # -- going back

    def _back(self, settled: Settled, attempt: int, *, frm: Split, to: Split, before_spec: JobSpec) -> Result:
        """What ran before runs again.

        Raises:
            WentBack: always, where it could be done. DflashError: as the text says.
        """
        failed = settled.failed
        assert failed is not None
        if not self.asked.back:
            self._record("unmeasured", failed.what.splitlines()[0], frm=frm, to=to)
            failed.result = self.result.to_json()
            failed.next = f"{to} was left as it is (--no-back); {failed.next}"
            raise failed
        self.touched = "back"
        self.stages.note(f"GOING BACK to {frm}: {failed.what.splitlines()[0]}")
        spec = choice.with_secrets(
            before_spec,
            self.secrets,
            reason=f"rebalance: back from {to} to {frm}",
            actor=self.asked.actor,
            watch_s=self.job.watch_s,
        )
        try:
            since = attempt if settled.rc == NOT_FINITE else None
            self.result.back = number = self.back_to(spec, frm=to, to=frm, expect=attempt, since=since)
            seconds = window(self, None)
            with self.stages.stage("watch", f"attempt {number}: until its first step, {seconds:g} s at most") as stage:
                seen = watch(self, number, seconds, stage)
                again = crash(self, number, seen)
                stage.done(f"attempt {number} is {seen.snapshot.state.value}")
        except DflashError as error:
            error.what = f"{failed.what}\nand going back to {frm} failed: {error.what}"
            raise
        self._record("went_back", failed.what.splitlines()[0], frm=frm, to=to)
        text = f"WENT BACK: attempt {number} runs with {frm} again, as attempt {self._before_number(attempt)} did"
        if again is not None:
            text = f"WENT BACK to {frm}, but attempt {number} crashed too: {again.what}"
        self.stages.note(text)
        advice = f"the other splits: dflash-ops rebalance {self.typed} --plan"
        done = WentBack(f"{failed.what}\n{text}", failed.where or self.where, advice)
        done.result = self.result.to_json()
        raise done

    def _before_number(self, attempt: int) -> int:
        if self.attempt != attempt:
            return self.attempt
        said = self.said["before"]
        return int(said["attempt"]) if said is not None else 0


def _pace(said: Any) -> Pace | None:
    """A pace as the journal has it; None where another version wrote it."""
    try:
        return Pace(**said) if isinstance(said, dict) else None
    except TypeError:
        return None


def _prediction(said: Any, split: Split) -> Prediction | None:
    """A prediction as the journal has it; None where another version wrote it."""
    try:
        return Prediction(split=split, **said) if isinstance(said, dict) else None
    except TypeError:
        return None
