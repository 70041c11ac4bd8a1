"""A run's checkpoints, from the scheduler's decision to the folder's name: who writes them, what they say of the run,
and what a failed one means."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from trainer.actions import Save
from trainer.checkpoint import Store
from trainer.errors import TrainerError
from trainer.plan_record import PlanRecord
from trainer.prepare import Prepared
from trainer.progress import Output
from trainer.saving import Saved, Saver
from trainer.scheduler import Scheduler


class Saves:
    """
    Args:
        saver: its processes write. store: names them. record: of the plan. scheduler: is told. prepared: what runs.
    """

    def __init__(
        self,
        saver: Saver,
        store: Store,
        record: PlanRecord,
        scheduler: Scheduler,
        prepared: Prepared,
        output: Output,
    ) -> None:
        self.saver = saver
        self.store = store
        self.record = record
        self.scheduler = scheduler
        self.prepared = prepared
        self.output = output
        self.failed = 0
        #: Who trains together; none where there is one machine only.
        self.nodes: Callable[[], list[int]] = list
        #: Told the seconds of each checkpoint that was written.
        self.took: Callable[[float], None] = lambda _: None

    def start(self, save: Save) -> None:
        """Begins to write the last average. A node that shares its folder with node 0 leaves it to that one."""
        if self.store.writes:
            self._conclude(self.saver.start(save.step, self._state(save)))
        else:
            self.scheduler.saved()

    def look(self) -> None:
        """Whether the one that is being written is done.

        Raises:
            TrainerError: it was the last one, and failed.
        """
        self._conclude(self.saver.poll())

    def _conclude(self, saved: Saved | None) -> None:
        if saved is None:
            return
        failure = saved.failure
        if saved.beside is not None:
            # The record first: a checkpoint in it that never got its name is skipped by the replay, the other way round
            # a resume would find weights that no line explains.
            path = self.store.claim(saved.step)
            try:
                self.record.checkpoint(saved.step, path)
                self.store.publish(saved.beside, path)
            except OSError as error:
                self.store.discard(saved.beside)
                failure = f"{error.strerror or error}: {error.filename or path}"
        if failure:
            self.failed += 1
            self.output.event("checkpoint_failed", step=saved.step, count=self.failed, reason=failure)
            if self.scheduler.save_failed():
                raise TrainerError(
                    f"the last checkpoint cannot be written: {failure}",
                    str(self.store.folder),
                    "make room there; the checkpoints that are there are whole: resume from the last one",
                )
            return
        self.output.event("checkpoint", step=saved.step, path=path, seconds=f"{saved.seconds:.1f}")
        self.took(saved.seconds)
        self.scheduler.saved()

    def now(self, save: Save) -> None:
        """A checkpoint of the last average, though the run ends with an error."""
        self.scheduler.save_now()
        self._conclude(self.saver.start(save.step, self._state(save)))
        self.finish()

    def finish(self) -> None:
        """The run ends with an error; a checkpoint that is being written is good, and may take its time."""
        while self.saver.busy:
            saved = self.saver.poll()
            if saved is None:
                time.sleep(0.02)
            else:
                self._conclude(saved)

    def _state(self, commit: Save) -> dict[str, Any]:
        p, config = self.prepared, self.prepared.config
        return {
            "step": commit.step,
            "batches": commit.upto,
            "total_batches": self.scheduler.total,
            "t": round(time.time(), 3),
            "plan": {
                "seed": config.train.seed,
                "batch_size": config.data.batch_size,
                "buckets": list(config.buckets),
                "base": p.plan.base.to_dict(),
            },
            "data": {"path": p.index.path, "sha256": p.index.sha256, "samples": len(p.index.ids)},
            "drafter": p.drafter.to_hf(),
            "drafters": self.scheduler.world,
            "nodes": self.nodes(),
            "moments": config.train.moments,
            "threads": config.workers.threads,
            "torch": torch.__version__,
            "config": config.to_dict(),
        }
