"""The launcher as one of several: what it does when a generation ends, when one begins, and when one of all stops.

a node or a drafter is lost  -->  drafters end, `ready` with the averages in memory  -->  a new generation begins at
                                  the newest average that all hold; targets and what they have filled stay
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.actions import Commit, Save
from trainer.checkpoint import MANIFEST, STATE, WEIGHTS, list_checkpoints, name_of, step_of
from trainer.errors import STOPPED, CheckpointError, ConfigError
from trainer.meeting import FRESH, HELD, READY, SAVED, Decision, Held
from trainer.node_args import NodeArgs
from trainer.nodes import Alone, Begin, Broke, Nodes, StopAsked, StopAt
from trainer.plan import Base, Plan
from trainer.prepare import Prepared, prepare, total_batches
from trainer.progress import Output
from trainer.signals import StopSignals
from trainer.workers import Worker

if TYPE_CHECKING:
    from trainer.config import RunConfig
    from trainer.launcher import Launcher

#: Seconds between two tellings of what this node has done.
PROGRESS_S = 0.5
#: File in the checkpoints folder by which a node sees that it is node 0's own.
TOKEN_FILE = ".nodes"
#: Keys that a node has for itself: places, devices, and how much it keeps and tells.
_OWN = (
    "target.path",
    "target.revision",
    "data.path",
    "data.tokenizer",
    "data.chat_template",
    "data.cache",
    "train.tensorboard",
    "drafter.init_from",
    "train.log_every",
    "checkpoint.keep_last",
    "checkpoint.keep_every",
    "checkpoint.grace_s",
    "nodes.wait_s",
)
_OWN_TABLES = ("workers", "ring", "features")


def check_config(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a key that cannot be used on several machines.
    """
    if config.train.moments == "local":
        raise ConfigError(
            'train.moments = "local" keeps each drafter\'s moments on its own machine only',
            "train.moments",
            'use "averaged" with several nodes',
        )


def facts_of(prepared: Prepared) -> dict[str, Any]:
    """What must be the same on all nodes, as JSON would hold it: config keys by name, data, target, drafter, torch."""
    config = prepared.config
    facts: dict[str, Any] = {}
    for table, keys in config.to_dict().items():
        if isinstance(keys, dict) and table not in _OWN_TABLES:
            facts |= {f"{table}.{k}": v for k, v in keys.items() if f"{table}.{k}" not in _OWN}
    facts |= {
        "target.dtype": config.dtype,
        "data.buckets": list(config.buckets),
        "train.epochs": config.epochs,
        "train.gamma": config.gamma,
        "data's sha256": prepared.index.sha256,
        "the target's weights in bytes": prepared.target.weight_bytes,
        "the target's vocabulary": prepared.target.vocab_size,
        "torch": torch.__version__.partition("+")[0],
    }
    facts |= {f"the drafter's {k}": v for k, v in prepared.drafter.to_hf().items()}
    known: dict[str, Any] = json.loads(json.dumps(facts))
    return known


def saved_here(folder: Path, resume: str, chosen: Path | None) -> list[Held]:
    """Checkpoints that a node can start from, by name and the hash of their weights; nothing is verified yet.

    Args:
        folder: of the checkpoints. resume: --resume. chosen: the verified one that this node alone would take.

    Raises:
        CheckpointError: the chosen one's manifest or state cannot be read.
    """
    if chosen is None:
        return []
    found = list_checkpoints(folder) if resume == "auto" else [chosen]
    states = []
    for path in found:
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            mark, nodes = str(manifest["files"][WEIGHTS]["sha256"]), tuple(state.get("nodes", ()))
            states.append(Held(step_of(path), int(state["batches"]), mark, nodes))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if path == chosen:
                raise CheckpointError(f"manifest or state cannot be read: {error}", str(path)) from error
    return states


def adopt(prepared: Prepared, decision: Decision) -> Prepared:
    """A node that was away: it goes on where the others are, whatever its own checkpoints say."""
    base = Base.from_dict(decision.base)
    old = prepared.plan
    plan = Plan(old.ids, old.lengths, old.seed, old.batch_size, old.buckets, base)
    start = decision.start
    return replace(prepared, plan=plan, cursor=start.batches, step=start.step, resume=None)


class Several:
    """
    Args:
        launcher: whose scheduler, crew and averages these are. nodes: in its first generation.
    """

    def __init__(self, launcher: Launcher, nodes: Nodes) -> None:
        self.launcher = launcher
        self.nodes = nodes
        #: step -> what makes that average the one that others mean.
        self.marks: dict[int, str] = {}
        self._start: Held | None = None  # a checkpoint, or nothing: where every drafter can begin again
        self._why = ""
        self._alone = False
        self._progress_at = 0.0
        self._samples: dict[int, int] = {}  # step -> samples trained up to that commit
        self._others: dict[tuple[int, str], dict[str, float]] = {}
        if not self.joins_a_run:
            self._start = nodes.mine.start

    @property
    def meeting(self) -> bool:
        """No generation: drafters do not run."""
        return self.nodes.state == READY and not self._alone

    @property
    def joins_a_run(self) -> bool:
        """This launcher began in a run of others, with their state."""
        mine = self.nodes.mine
        return mine.origin == HELD or (mine.origin == SAVED and self.launcher.prepared.resume is None)

    @property
    def reader(self) -> socket.socket:
        """Readable when another node has said something new."""
        return self.nodes.link.reader

    def first(self) -> None:
        """The first generation begins: its record, and a stop that was asked for while all met."""
        self.told()
        if self.nodes.mine.stop_at is not None:
            self.launcher.scheduler.stop_at(self.launcher.scheduler.cursor)

    # ---- what drafters need

    def group(self, worker: Worker) -> dict[str, Any] | None:
        """How a drafter joins the others; `keep`: buffer for a state that this node did not hold."""
        group = self.nodes.group(worker.rank)
        if group is None:
            return None
        keep = self.launcher.averages.begin() if self.receives() and worker.rank == 0 else None
        return {**group, "keep": keep}

    def received(self, sums: Mapping[str, int]) -> None:
        """The state that all begin with is in this node's memory too."""
        start = self.nodes.mine.start
        self.launcher.averages.keep(start.step, start.batches, [int(sums[i]) for i in sorted(sums, key=int)])
        self.marks[start.step] = start.mark

    def receives(self) -> bool:
        """This node's drafters get their state from another node, and need none of their own."""
        mine = self.nodes.mine
        current = self.launcher.averages.current
        if mine.origin == FRESH or mine.start == self._start:
            return False
        return current is None or current.step != mine.start.step

    # ---- news

    def look(self) -> None:
        """Does what the others' reports ask for.

        Raises:
            TrainerError: all nodes end, or a wait was too long; what this node holds is saved before.
        """
        launcher = self.launcher
        if not self.meeting and time.monotonic() - self._progress_at > PROGRESS_S:
            self._progress_at = time.monotonic()
            self.nodes.progress(launcher.meter.sums)
        for event in self.nodes.tick():
            if isinstance(event, Broke):
                launcher.output.event("regroup", node=event.node, why=event.why)
                launcher.crew.end_drafters()
                self.fell(event.why)
            elif isinstance(event, Begin):
                self._begin(event.decision)
            elif isinstance(event, StopAsked):
                launcher.output.event("stop_requested", node=event.node)
                self.nodes.could_stop_at(launcher.scheduler.hold())
            elif isinstance(event, StopAt):
                launcher.scheduler.stop_at(event.batch)
            elif isinstance(event, Alone):
                launcher.scheduler.stop_at(launcher.scheduler.cursor)
                self._alone = True

    def stop(self) -> None:
        """TERM or INT here."""
        self.nodes.stop()
        if not self.meeting:
            self.nodes.could_stop_at(self.launcher.scheduler.hold())

    def add_others(self) -> None:
        """Node 0's lines tell of all: adds what the others have done since the last one, as far as they have told."""
        if not self.nodes.leader:
            return
        for who, totals in self.nodes.others_totals().items():
            before = self._others.get(who, {})
            gained = {name: value - before.get(name, 0.0) for name, value in totals.items()}
            self._others[who] = dict(totals)
            self.launcher.meter.add_others(gained)

    def save_what_is_held(self) -> None:
        """All nodes end, or a wait was too long: the last average becomes a checkpoint, if it is none yet."""
        launcher = self.launcher
        current = launcher.averages.current
        if current is None or not launcher.store.writes or not self.meeting:
            return
        launcher.saves.finish()
        if not (launcher.store.folder / name_of(current.step)).exists():
            launcher.saves.now(Save(current.batches, current.step))

    def fell(self, why: str) -> None:
        """This node's drafters are dead; what was trained since the commit is forgotten."""
        launcher = self.launcher
        self._why = why
        launcher.scheduler.drafters_died()
        launcher.samples = launcher.committed_samples
        launcher.meter.roll_back(launcher.scheduler.step, launcher.crew.times)
        self.nodes.ready(self._held(), launcher.prepared.plan.base.to_dict(), why)

    def _held(self) -> list[Held]:
        kept = self.launcher.averages.valid()
        held = [Held(k.step, k.batches, self.marks[k.step]) for k in kept if k.step in self.marks]
        if len(held) < 2 and self._start is not None:
            held.append(self._start)
        return held

    # ---- generations

    def committed(self, commit: Commit) -> None:
        """An averaging is over. What it stands for was trained on all nodes, so node 0 can count it."""
        launcher, step = self.launcher, commit.step
        if self.nodes.leader:
            plan = launcher.prepared.plan
            round_ = range(launcher.committed, commit.upto)
            launcher.samples = launcher.committed_samples + sum(len(plan.batch(n).sample_ids) for n in round_)
        kept = {k.step for k in launcher.averages.valid()}  # nothing older is gone back to
        self._samples = {s: n for s, n in self._samples.items() if s in kept} | {step: launcher.samples}
        self.nodes.progress(launcher.meter.sums)
        self.marks = {s: m for s, m in self.marks.items() if s >= step - 4 * self.launcher.config.train.average_every}
        self.marks[step] = self.nodes.mine.token
        self.nodes.committed()

    def told(self) -> None:
        """The record of the generation that begins."""
        mine = self.nodes.mine
        self.launcher.record.generation(
            token=mine.token,
            number=mine.generation,
            node=self.nodes.args.rank,
            nodes=[m.rank for m in mine.members],
            step=mine.start.step,
            batches=self.launcher.scheduler.cursor,
        )

    def _begin(self, decision: Decision) -> None:
        launcher, scheduler = self.launcher, self.launcher.scheduler
        start = decision.start
        if start != self._start:
            self._start = None  # all are beyond it now
        launcher.averages.go_back(start.step)
        if launcher.saver.busy and launcher.saver.step not in {k.step for k in launcher.averages.valid()}:
            launcher.saver.abandon()  # of a history that is left; its memory is about to be received into
        total = total_batches(launcher.config, launcher.prepared.plan, start.batches, start.step, decision.world)
        saved = start == self._start or (launcher.store.folder / name_of(start.step)).is_dir()
        still = launcher.saver.step if launcher.saver.busy else None
        scheduler.regroup(
            cursor=start.batches,
            step=start.step,
            total=total,
            world=decision.world,
            first=self.nodes.first,
            saved=saved,
            saving=still,
        )
        launcher.record.rollback(start.step, self._why)
        self.told()
        launcher.committed = min(launcher.committed, start.batches)
        launcher.samples = launcher.committed_samples = self._samples.get(start.step, 0)
        launcher.store.went_back(start.step)
        if decision.stop_at is not None:
            scheduler.stop_at(decision.stop_at)
        else:
            launcher.crew.start_drafters()


# ---- the command


def run_several(
    place: NodeArgs,
    config: RunConfig,
    attempt: Path,
    checkpoints: Path,
    resume: str,
    signals: StopSignals,
    progress: Callable[[int, int, str], None],
) -> int:
    """`python -m trainer run` on one of several nodes.

    Args:
        place: which node. attempt, checkpoints: folders, absolute. resume: --resume. progress: told while data are
        made ready.

    Returns:
        The exit code: 0 finished, 3 stopped.

    Raises:
        TrainerError: everything else, on all nodes where all must end.
    """
    check_config(config)
    output = Output()

    def told(done: int, total: int, text: str) -> None:
        if signals.waiting():
            nodes.stop()  # the others must not wait for a node that only leaves
        progress(done, total, text)

    with Nodes(place, config.nodes, len(config.workers.drafter_devices), output) as nodes:
        prepared = prepare(config, checkpoints, resume, progress=told)
        token = _put_token(checkpoints) if nodes.leader else ""
        chosen = None if prepared.resume is None else prepared.resume.path
        here = saved_here(checkpoints, resume, chosen)
        nodes.introduce(facts_of(prepared), here, token, prepared.plan.base.to_dict())
        decision = nodes.first_meeting(signals)
        if decision is None:
            output.event("stopped")
            return STOPPED
        shared = not nodes.leader and _read_token(checkpoints) == nodes.shared_token
        if shared:
            output.line(f"note: {checkpoints} is node 0's folder: it alone writes checkpoints")
        os.environ.update(nodes.worker_environment())
        if decision.origin == HELD or (decision.origin == SAVED and decision.start not in here):
            prepared = adopt(prepared, decision)
        elif decision.origin == SAVED and prepared.step != decision.start.step:
            wanted = str(checkpoints / name_of(decision.start.step))
            prepared = prepare(config, checkpoints, wanted, progress=told)
        total = total_batches(config, prepared.plan, prepared.cursor, prepared.step, nodes.world)
        from trainer.launcher import launch  # it imports this module

        return launch(replace(prepared, total=total), attempt, checkpoints, signals, nodes, shared=shared)


def _put_token(checkpoints: Path) -> str:
    """
    Raises:
        ConfigError: the folder cannot be written.
    """
    token = secrets.token_hex(8)
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        (checkpoints / TOKEN_FILE).write_text(token, encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"the checkpoints folder cannot be used: {error}", str(checkpoints), "name a folder that can be written"
        ) from error
    return token


def _read_token(checkpoints: Path) -> str | None:
    try:
        return (checkpoints / TOKEN_FILE).read_text(encoding="ascii")
    except (FileNotFoundError, NotADirectoryError):
        return None
