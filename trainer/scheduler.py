"""Who does what next: pure decisions over the ring's slots, the plan's batch numbers and the waiting workers.

Batches leave in the order of their numbers; a batch whose target died goes first again. A round is `average_every`
batches for each drafter: inside it any drafter takes the ready batch with the lowest number (or batch b goes to drafter
b mod D and each takes its own in order, schedule "fixed"). When all batches of the round are trained, the drafters
average; their weights then stand for exactly the batches below the round's end, which is what a commit and a checkpoint
mean. Targets work ahead into the next round; no drafter does.

With sync "step" the drafters step together, one batch each: the n-th batch of each is one of the n-th D batches of the
round, and a drafter joins the others without one where the last step of the run is a short one.

Of several nodes each has a scheduler. Rounds and numbers are the same on all of them; a node owns batch b if drafter
b mod D is one of its own. A stop is agreed on: `hold` says where this node could stop, `stop_at` where all do.

    run --(all trained)--> averaging --(all averaged: commit)--> run | saving --(saved)--> ended
     '--------------<--(a drafter died: back to the commit)--<----'

Checkpoints are written from the last average while training goes on; only at the end the run waits for one (saving).
There is memory for two averages: while an older one is still being saved, the next averaging waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trainer.actions import Action, Average, Commit, Fill, Join, Phase, Save, SlotRecord, SlotState, Train


@dataclass
class Scheduler:
    """The round's state. Events go in by methods; `decide` says what to do now.

    Args:
        drafters: their names, in rank order. slots: how many the ring has.
        cursor: batches done before. step: optimiser steps done before. total: batches of the run.
        average_every, save_every: in steps. schedule: "ready" or "fixed". sync: "average" or "step".
        world: drafters of all nodes (0: these are all). first: number of the first of these among them.
        aligned: checkpoints are due where a multiple of `save_every` is passed, whenever the last one was taken: the
            same steps on every node, also on one that came later.
    """

    drafters: tuple[str, ...]
    slots: int
    cursor: int
    step: int
    total: int
    average_every: int
    save_every: int
    schedule: str = "ready"
    sync: str = "average"
    world: int = 0
    first: int = 0
    aligned: bool = False
    phase: Phase = Phase.RUN
    stopping: bool = False
    ring: list[SlotRecord] = field(init=False)
    next_batch: int = field(init=False)

    def __post_init__(self) -> None:
        self.world = self.world or len(self.drafters)
        self.ring = [SlotRecord() for _ in range(self.slots)]
        self.next_batch = self.cursor
        self._again: list[int] = []
        self._targets: deque[str] = deque()
        self._waiting: deque[str] = deque()
        self._begun: dict[int, str] = {}
        self._trained: set[int] = set()
        self._averaged: set[str] = set()
        #: Steps of this round that each drafter has begun (sync "step").
        self._steps: dict[str, int] = dict.fromkeys(self.drafters, 0)
        self._saved_step = self.step
        self._saving: int | None = None  # step of the checkpoint that is being written
        self._save_due = False
        self._stop_at: int | None = None
        #: Where this node could stop, until all have agreed.
        self._held_at: int | None = None
        self._round_end = self._end_of_round()

    # ---- numbers

    @property
    def _limit(self) -> int:
        """The batch before which the run ends."""
        return self.total if self._stop_at is None else min(self.total, self._stop_at)

    def _end_of_round(self) -> int:
        return min(self._limit, self.cursor + self.average_every * self.world)

    def owns(self, batch: int) -> bool:
        """Whether a batch is trained on this node."""
        return self.first <= batch % self.world < self.first + len(self.drafters)

    def _own(self, start: int, end: int) -> int:
        """How many of the batches [start, end) are this node's."""
        turns = (end - start) // self.world
        rest = range(start + turns * self.world, end)
        return turns * len(self.drafters) + sum(self.owns(batch) for batch in rest)

    def _next_own(self, batch: int) -> int:
        while not self.owns(batch):
            batch += 1
        return batch

    @property
    def round_end(self) -> int:
        """Number of the first batch that does not belong to the present round."""
        return self._round_end

    @property
    def done(self) -> int:
        """Batches trained, also those that no averaging has committed yet; of other nodes: as if they kept pace."""
        return min(self._round_end, self.cursor + len(self._trained) * self.world // len(self.drafters))

    @property
    def steps_done(self) -> int:
        """Optimiser steps of one drafter."""
        return self.step + len(self._trained) // len(self.drafters)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of one drafter when the run is finished; a round's last step may be a short one."""
        return self.step + -(-(self.total - self.cursor) // self.world)

    @property
    def ready(self) -> int:
        """Slots that wait for a drafter."""
        return sum(slot.state is SlotState.READY for slot in self.ring)

    # ---- events

    def target_asks(self, worker: str) -> None:
        if worker not in self._targets:
            self._targets.append(worker)

    def filled(self, worker: str, slot: int) -> None:
        record = self._held(worker, slot, SlotState.FILLING)
        record.state, record.owner = SlotState.READY, ""
        if record.batch < 0:
            self._free(record)

    def target_died(self, worker: str) -> list[int]:
        """Takes its slot back. Returns the batches that will be given again."""
        if worker in self._targets:
            self._targets.remove(worker)
        lost = []
        for record in self.ring:
            if record.state is SlotState.FILLING and record.owner == worker:
                lost += [record.batch] if record.batch >= 0 else []
                record.state, record.batch, record.owner = SlotState.FREE, -1, ""
        self._again = sorted(self._again + lost)
        return lost

    def drafter_asks(self, worker: str) -> None:
        if worker not in self._waiting:
            self._waiting.append(worker)

    def copied(self, worker: str, slot: int) -> None:
        """The drafter needs the slot no more; the batch is not trained yet."""
        self._free(self._held(worker, slot, SlotState.TRAINING))

    def trained(self, worker: str, batch: int) -> None:
        for record in self.ring:
            if record.state is SlotState.TRAINING and record.batch == batch and record.owner == worker:
                self._free(record)
        if self._begun.pop(batch, None) != worker:
            raise ValueError(f"{worker} speaks of batch {batch}, which it was not given")
        self._trained.add(batch)

    def averaged(self, worker: str) -> None:
        self._averaged.add(worker)

    def save_now(self) -> None:
        """The run ends with an error, and the last average is saved before."""
        self._saving, self._save_due = self.step, False

    def saved(self) -> None:
        """The checkpoint that was being written lies in its place."""
        assert self._saving is not None
        self._saved_step, self._saving = self._saving, None
        if self.phase is Phase.SAVING and self._saved_step == self.step:
            self.phase = Phase.ENDED

    def save_failed(self) -> bool:
        """The checkpoint could not be written: the next commit tries again. True if there will be none."""
        failed, self._saving = self._saving, None
        return self.phase is Phase.SAVING and failed == self.step

    def refused(self, worker: str, slot: int) -> int:
        """What lies in the slot is not what its target wrote. Returns the batch, which is given again."""
        record = self._held(worker, slot, SlotState.TRAINING)
        batch = record.batch
        self._free(record)
        del self._begun[batch]
        self._steps[worker] -= 1
        self._again = sorted([*self._again, batch])
        return batch

    def drafters_died(self) -> int:
        """Back to the last commit: drafters have forgotten what they trained since, and wait for nothing.

        What targets have filled stays; slots that a drafter held are free.

        Returns:
            How many batches had been begun and go again.
        """
        if self.phase in (Phase.SAVING, Phase.ENDED):
            return 0  # everything that was begun is in the last average; drafters are needed no more
        for record in self.ring:
            if record.state is SlotState.TRAINING:
                self._free(record)
        again = len(self._begun) + len(self._trained)
        if self.stopping:
            self._stop_at = self.cursor
        self._forget()
        return again

    def _forget(self) -> None:
        """What drafters have done since the commit; what goes again is what lies in no slot."""
        there = {record.batch for record in self.ring if record.state is not SlotState.FREE}
        self._again = [b for b in range(self.cursor, self.next_batch) if self.owns(b) and b not in there]
        self._waiting.clear()
        self._begun.clear()
        self._trained.clear()
        self._averaged.clear()
        self._steps = dict.fromkeys(self.drafters, 0)
        self._held_at = None
        self.phase = Phase.RUN
        self._round_end = self._end_of_round()

    def regroup(
        self, *, cursor: int, step: int, total: int, world: int, first: int, saved: bool, saving: int | None = None
    ) -> None:
        """Other nodes, or the same ones again: all begin at a commit that may be older than this node's last one.

        Args:
            cursor, step: of that commit. total, world, first: as from now on. saved: there is a checkpoint of it.
            saving: step of the checkpoint that is being written.
        """
        self.cursor, self.step, self.total, self.world, self.first = cursor, step, total, world, first
        self.stopping, self._stop_at = False, None
        for record in self.ring:
            wanted = record.batch >= cursor and self.owns(record.batch)
            if record.state is SlotState.TRAINING or (record.state is SlotState.READY and not wanted):
                self._free(record)
            elif record.state is SlotState.FILLING and not wanted:
                record.batch = -1
        # A slot may hold a batch that was far ahead, and others before it are missing now.
        self.next_batch = max([cursor, *(r.batch + 1 for r in self.ring if r.state is not SlotState.FREE)])
        self._saving, self._save_due = saving, False
        self._saved_step = step if saved else min(self._saved_step, step - 1)
        self._forget()

    def stop(self) -> None:
        """No batch is begun any more; what drafters have begun, and all before it, is trained, averaged and saved."""
        if self.stopping or self.phase is Phase.ENDED:
            return
        self.stopping = True
        self._stop_at = self._could_stop()
        self._round_end = min(self._round_end, self._stop_at)

    def hold(self) -> int:
        """One of several nodes: nothing is begun until `stop_at`. Returns the batch before which it could stop."""
        if self._stop_at is not None:
            return self._stop_at
        if self._held_at is None:
            self.stopping = True
            self._held_at = self._could_stop()
        return self._held_at

    def stop_at(self, batch: int) -> None:
        """All nodes have agreed: batches below this one are trained, averaged and saved."""
        if self._stop_at is not None:
            return
        self.stopping, self._stop_at, self._held_at = True, batch, None
        if self.phase is Phase.RUN:
            self._round_end = self._end_of_round()

    def _could_stop(self) -> int:
        if self.phase is Phase.RUN and not self._round_is_trained():
            return self._shortened()
        return self._round_end if self.phase in (Phase.RUN, Phase.AVERAGING) else self.cursor

    def _shortened(self) -> int:
        """The round's end when nothing new is begun: right behind the last batch that a drafter has begun."""
        if self.sync == "step":  # a step that one drafter has begun is everybody's
            return min(self._round_end, self.cursor + max(self._steps.values()) * self.world)
        begun = [batch + 1 for batch in (*self._begun, *self._trained)]
        return min(self._round_end, max([*begun, self.cursor]))

    def _round_is_trained(self) -> bool:
        """Whether this node's drafters have done all of the round that is theirs."""
        if len(self._trained) != self._own(self.cursor, self._round_end):
            return False
        steps = -(-(self._round_end - self.cursor) // self.world)
        return self.sync != "step" or all(done == steps for done in self._steps.values())

    def step_of(self, batch: int) -> tuple[int, int]:
        """First batch of the optimiser step that a batch of this round belongs to, and of the next one.

        With sync "average" each batch is a step of its own.
        """
        size = self.world if self.sync == "step" else 1
        first = batch - (batch - self.cursor) % size
        return first, first + size

    # ---- decisions

    def decide(self) -> list[Action]:
        """What to do now; each action is returned once, and the state assumes that it is done."""
        actions: list[Action] = []
        while True:
            found = self._fills() + self._trains() + self._turns() + self._saves()
            if not found:
                return actions
            actions += found

    def _fills(self) -> list[Action]:
        actions: list[Action] = []
        while self._targets and (batch := self._next()) is not None:
            slot = next((i for i, r in enumerate(self.ring) if r.state is SlotState.FREE), None)
            if slot is None:
                slot = self._cleared(batch)
            if slot is None:
                break
            if self._again and self._again[0] == batch:
                self._again.pop(0)
            else:
                self.next_batch = batch + 1
            worker = self._targets.popleft()
            self.ring[slot] = SlotRecord(SlotState.FILLING, batch, worker)
            actions.append(Fill(worker, slot, batch))
        return actions

    def _next(self) -> int | None:
        """The batch to compute next; when stopping only what the shortened round still lacks."""
        if self.phase is Phase.ENDED:
            return None
        batch = self._again[0] if self._again else self._next_own(self.next_batch)
        limit = self._round_end if self.stopping else self.total
        return batch if batch < limit else None

    def _cleared(self, batch: int) -> int | None:
        """A slot for a batch that goes again, where all slots hold batches that must wait for it.

        After a drafter's death the ring may be full of later ones. The last of them makes room, and goes again too.
        """
        ready = [i for i, r in enumerate(self.ring) if r.state is SlotState.READY]
        if not self._again or not ready or any(r.state is SlotState.FILLING for r in self.ring):
            return None
        if self.sync == "step":  # what drafters hold stays held until the step has all its batches
            stuck = all(self.ring[i].batch >= self.step_of(batch)[1] for i in ready)
        else:
            held = len(ready) < self.slots
            may = any(self.ring[i].batch < self._round_end and self._in_turn(self.ring[i].batch) for i in ready)
            stuck = not held and not may
        last = max(ready, key=lambda i: self.ring[i].batch)
        record = self.ring[last]
        if not stuck or record.batch < batch:
            return None
        self._again = sorted([*self._again, record.batch])
        self._free(record)
        return last

    def _trains(self) -> list[Action]:
        if self.phase is not Phase.RUN or self._held_at is not None:
            return []
        actions: list[Action] = []
        for worker in list(self._waiting):
            slot = self._ready_for(worker)
            if slot is None:
                if self._joins(worker):
                    self._waiting.remove(worker)
                    actions.append(Join(worker, self._step_range(worker)[0]))
                    self._steps[worker] += 1
                continue
            self._waiting.remove(worker)
            self._steps[worker] += 1
            record = self.ring[slot]
            record.state, record.owner = SlotState.TRAINING, worker
            self._begun[record.batch] = worker
            actions.append(Train(worker, slot, record.batch))
        return actions

    def _ready_for(self, worker: str) -> int | None:
        mine = self.first + self.drafters.index(worker) if self.schedule == "fixed" else None
        first, end = self._step_range(worker)
        best: tuple[int, int] | None = None
        for slot, record in enumerate(self.ring):
            if (
                record.state is not SlotState.READY
                or not first <= record.batch < end
                or not self._in_turn(record.batch)
            ):
                continue
            if mine is not None and record.batch % self.world != mine:
                continue
            if best is None or record.batch < best[0]:
                best = (record.batch, slot)
        return None if best is None else best[1]

    def _in_turn(self, batch: int) -> bool:
        """On the fixed schedule a drafter takes its batches in their order."""
        if self.schedule != "fixed":
            return True
        over = self.world
        return all(b in self._trained for b in range(self.cursor + (batch - self.cursor) % over, batch, over))

    def _step_range(self, worker: str) -> tuple[int, int]:
        """Batches [first, end) out of which a drafter's next one is."""
        if self.sync != "step":
            return self.cursor, self._round_end
        first = self.cursor + self._steps[worker] * self.world
        return first, min(self._round_end, first + self.world)

    def _joins(self, worker: str) -> bool:
        """Whether the next step of a drafter has no batch for it: it is a short one, and others have them all."""
        first, end = self._step_range(worker)
        if self.sync != "step" or first >= end:
            return False
        mine = self.first + self.drafters.index(worker)
        return all(
            batch % self.world != mine
            if self.schedule == "fixed"
            else not self.owns(batch) or batch in self._begun or batch in self._trained
            for batch in range(first, end)
        )

    def _turns(self) -> list[Action]:
        """Ends of phases."""
        if self._held_at not in (None, self._round_end) and self.phase is Phase.RUN:
            return []  # the others have not said yet where they can stop
        if self.phase is Phase.RUN and self._round_is_trained():
            if self._round_end == self.cursor:  # stopped, or nothing left to do, right behind a commit
                self.phase = Phase.ENDED if self.step == self._saved_step else Phase.SAVING
                return []
            if set(self._waiting) != set(self.drafters):
                return []
            if self._saving not in (None, self.step):
                return []  # one buffer is being saved, the other one is the last average: none to write into
            self._waiting.clear()
            self._averaged.clear()
            self.phase = Phase.AVERAGING
            return [Average(self._step_after())]
        if self.phase is Phase.AVERAGING and self._averaged == set(self.drafters):
            before, self.step = self.step, self._step_after()
            self.cursor = self._round_end
            self._trained.clear()
            self._steps = dict.fromkeys(self.drafters, 0)
            over = self.cursor >= self._limit
            self.phase = Phase.SAVING if over else Phase.RUN
            self._round_end = self._end_of_round()
            last = self._saved_step if self._saving is None else self._saving
            if self.aligned:
                self._save_due |= self.step // self.save_every > before // self.save_every
            else:
                self._save_due = self.step - last >= self.save_every
            return [Commit(self.cursor, self.step)]
        return []

    def _saves(self) -> list[Action]:
        if self._saving is not None or self.step == self._saved_step:
            return []
        if self.phase is not Phase.SAVING and not self._save_due:
            return []
        self._save_due = False
        self._saving = self.step
        return [Save(self.cursor, self.step)]

    def _step_after(self) -> int:
        return self.step + -(-(self._round_end - self.cursor) // self.world)

    # ---- slots

    def _held(self, worker: str, slot: int, state: SlotState) -> SlotRecord:
        record = self.ring[slot]
        if record.state is not state or record.owner != worker:
            raise ValueError(f"{worker} speaks of slot {slot}, which is {record.state.value} of {record.owner!r}")
        return record

    def _free(self, record: SlotRecord) -> None:
        record.state, record.batch, record.owner = SlotState.FREE, -1, ""
