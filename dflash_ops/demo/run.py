"""The demo from nothing to the end: target, responses, deploy, watch, export, evaluate (docs/demo.md).

The rule here: every stage is what any other job goes through (the trainer's commands, `deploy.run`, the live status),
and every stage may be interrupted or killed: the next call goes on where this one stood.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_ops.client import JobClient
from dflash_ops.contracts import LIVE_STATES, Layout, Snapshot, State
from dflash_ops.demo import parts
from dflash_ops.demo.choose import Choice, choose, key_of, reason_of
from dflash_ops.demo.report import Outcome, Training, training_numbers
from dflash_ops.demo.setup import Setup
from dflash_ops.deploy.decide import Options
from dflash_ops.deploy.run import Deployment
from dflash_ops.deploy.spec import build_release, run_config
from dflash_ops.errors import CommandFailed, DflashError
from dflash_ops.hosts.base import Host
from dflash_ops.view.stages import Stages

FETCH_S = 30.0
#: Of forwards as small as the demo's, a second thread takes as much time as it saves.
ONE_THREAD = ("--threads", "1")
#: Lines of the log that are shown after a crash.
TAIL = 25


@dataclass(frozen=True)
class Sizes:
    """How large the demo is; the steps of the drafter's training stand in the inventory.

    Attributes:
        target_steps: of the target's training. prompts: answered for training. held_out: for the evaluation.
        max_new: new tokens of a training response and of an evaluation.
    """

    target_steps: int = 150
    prompts: int = 1536
    held_out: int = 32
    max_new: int = 96


#: `--quick`: a smoke test of the whole way; its target writes worse text, which is easier to draft.
QUICK = Sizes(target_steps=60, prompts=256, held_out=8, max_new=64)
QUICK_STEPS = 150


def plan_of(setup: Setup, *, steps: int | None, quick: bool) -> tuple[Setup, Sizes]:
    """The job with this run's number of steps, and how large the rest is."""
    if steps is None and quick:
        steps = QUICK_STEPS
    if steps is not None:
        setup = replace(setup, job=setup.job.with_overrides(sets=[f"train.steps={steps}"]))
    return setup, QUICK if quick else Sizes()


class TrainingFailed(DflashError):
    """The training did not finish; `outcome` is what is known of it."""

    def __init__(self, what: str, where: str, next: str, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(what, where, next)


@dataclass
class Demo:
    """One demo.

    Args:
        setup: inventory and job (with this run's overrides). host, python: of the job.
        stages: where progress goes. watch: shows a job until it ends (the screen of `status --watch`).
        environ: of this process. actor: for the journal.
        replace: stop a former demo that runs. again: train even if a finished attempt is what is wanted.
    """

    setup: Setup
    host: Host
    python: str
    stages: Stages
    watch: Callable[[JobClient], int]
    environ: Mapping[str, str]
    actor: str = "operator"
    sizes: Sizes = field(default_factory=Sizes)
    replace: bool = False
    again: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.client = JobClient(self.host, self.setup.job, self.python)
        self._start = self.clock()

    def run(self) -> Outcome:
        """All stages.

        Raises:
            TrainingFailed: it crashed, or was stopped.
            DflashError: as the stages say. KeyboardInterrupt: Ctrl-C; see `interrupted`.
        """
        job, note = self.setup.job, self.stages.note
        parts.check_interpreter(job.interpreter, self.environ)
        before = self.client.snapshot().snapshot
        if before.state in LIVE_STATES and not self.replace:
            # Its target and its data are in use: they stay as they are, whatever this version would make.
            key = self._key() if self.setup.data.exists() and self.setup.target.exists() else ""
            choice = choose(before, self._reason(before), key, replace=False)
            note(f"[1-3/6] {choice.why}")
        else:
            note("[1/6] target: a small language model, trained on Python's help texts")
            self._target()
            note("[2/6] responses: the target answers the training prompts")
            self._responses()
            key = self._key()
            choice = choose(before, self._reason(before), key, replace=self.replace, again=self.again)
            note(f"[3/6] deploy: {choice.why}")
            self._deploy(choice, key)
        note("[4/6] training" if choice.action != "reuse" else "[4/6] training: nothing to do")
        finished = self._follow(choice)
        note("[5/6] export: the newest checkpoint's drafter, as servers load it")
        exported = self._call("export", "--checkpoints", job.checkpoints, "--out", self.setup.export)
        note("[6/6] evaluate: what was exported, on held-out prompts, beside plain decoding")
        evaluation = self._evaluate(Path(exported["export"]))
        return self._outcome(finished, evaluation, str(exported["export"]))

    # -- stages --------------------------------------------------------------------------------------------------

    def _call(self, *arguments: str | Path) -> dict[str, Any]:
        return parts.call(self.setup.job.interpreter, [str(a) for a in arguments], self.environ)

    def _target(self) -> None:
        answer = self._call(
            *("demo-target", "--out", self.setup.target, "--steps", str(self.sizes.target_steps)),
            *("--prompts", str(self.sizes.prompts), "--held-out", str(self.sizes.held_out)),
        )
        if answer["reused"]:
            self.stages.note(f"      reused: {answer['target']}")

    def _responses(self) -> None:
        # --anew: responses of another target or length are this demo's own, so they may go.
        answer = self._call(
            *("regenerate", "--target", self.setup.target, "--prompts", self.setup.prompts, "--out", self.setup.data),
            *("--max-new", str(self.sizes.max_new), "--anew", *ONE_THREAD),
        )
        if answer["made"] < answer["responses"]:
            kept = answer["responses"] - answer["made"]
            self.stages.note(f"      reused: {kept} of {answer['responses']} responses in {answer['out']}")

    def _key(self) -> str:
        """What this demo's training depends on."""
        built, config = build_release(self.setup.job), run_config(self.setup.job)
        assert built is not None and config is not None
        return key_of(
            {
                "release": built.release.id,
                "config": config.toml,
                "target": _sha256(self.setup.target / ".demo.json"),
                "data": _sha256(self.setup.data),
            }
        )

    def _reason(self, snapshot: Snapshot) -> str | None:
        """Recorded by the newest attempt; None if nothing was ever started."""
        if snapshot.attempt is None:
            return None
        listed = self.client.attempts()["attempts"]
        return str(listed[-1].get("reason") or "") if listed else None

    def _deploy(self, choice: Choice, key: str) -> None:
        if choice.action != "train":
            return
        # no gate: what runs here is no more than the gate's own size
        options = Options(
            replace=choice.replace, begin=choice.begin, reason=reason_of(key), actor=self.actor, gate=False
        )
        job = self.setup.job
        Deployment(self.host, job, options, self.stages, python=self.python, environ=self.environ).run()

    def _follow(self, choice: Choice) -> Snapshot:
        if choice.action != "reuse":
            self.watch(self.client)
        seen = self.client.snapshot()
        if seen.snapshot.state is not State.FINISHED:
            raise self._failed(seen.snapshot)
        return seen.snapshot

    def _evaluate(self, export: Path) -> dict[str, Any]:
        return self._call(
            *("evaluate", "--target", self.setup.target, "--drafter", export, "--prompts", self.setup.held_out),
            *("--max-new", str(self.sizes.max_new), "--allow-mismatch", *ONE_THREAD),  # the report says it
        )

    # -- how it ended --------------------------------------------------------------------------------------------

    def _outcome(self, snapshot: Snapshot, evaluation: Mapping[str, Any] | None, export: str | None) -> Outcome:
        seconds = self.clock() - self._start
        return Outcome(self._training(snapshot), evaluation, export, seconds, snapshot.state.value)

    def _training(self, snapshot: Snapshot) -> Training:
        """From the attempt's metrics.jsonl; from the last snapshot where that cannot be read."""
        p = snapshot.progress
        said = Training(p.step, p.loss, p.block_tok_s, p.ctx_tok_s) if p else Training(None, None, None, None)
        if snapshot.attempt is None:
            return said
        file = Layout(self.setup.root).attempt(snapshot.attempt).metrics
        try:
            lines = self.host.fetch(str(file), deadline=FETCH_S, limit=16 << 20).splitlines()
        except CommandFailed:
            return said
        found = training_numbers(lines)
        return found if found.steps is not None else said

    def _failed(self, snapshot: Snapshot) -> TrainingFailed:
        for line in self._tail():
            self.stages.note(f"  | {line}")
        said = [f"attempt {snapshot.attempt} is {snapshot.state.value}", snapshot.detail]
        if snapshot.exit is not None and not snapshot.detail:
            said.append(snapshot.exit.describe())
        if snapshot.error is not None:
            said.append(f"first cause, {snapshot.error.worker}: {snapshot.error.message}")
        return TrainingFailed(
            f"the demo's training did not finish: {'; '.join(filter(None, said))}",
            str(Layout(self.setup.root).attempt(snapshot.attempt or 0).path),
            f"the cause: dflash-ops triage --job demo{self.setup.option}; the same command goes on from its checkpoint",
            self._outcome(snapshot, None, None),
        )

    def _tail(self) -> Sequence[str]:
        try:
            return [line.decode("utf-8", "replace") for line in self.client.logs(lines=TAIL)]
        except DflashError as error:
            return [f"(the log cannot be read: {error.what})"]

    def interrupted(self) -> str:
        """What a person who pressed Ctrl-C should know."""
        option = self.setup.option
        seen = self.client.snapshot()
        if seen.snapshot.state not in LIVE_STATES:
            return "interrupted; the same command goes on where it stood"
        return (
            f"interrupted; the training goes on ({seen.snapshot.state.value})\n"
            f"  look:   dflash-ops status demo --watch{option}\n"
            f"  stop:   dflash-ops stop demo{option}\n"
            "  go on:  the same command follows it to the end"
        )


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
