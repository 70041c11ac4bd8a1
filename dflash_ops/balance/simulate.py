"""The trainer's queue played through, event by event: who fills which slot, who takes what, rounds, averagings, saves.

It follows `trainer.scheduler` (a test drives that very scheduler with the same times and compares): targets get batches
in the order of their numbers as soon as a slot is free, and work ahead into the next round; a waiting drafter takes the
ready batch with the lowest number of this round (schedule "fixed": its own, in order); when the round is trained, all
average; an averaging waits while an older average than the last is still being saved. Nobody dies here.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_ops.balance.costs import average_at, check_split
from dflash_ops.balance.rates import Split, StageRates, Timing

#: Rounds at the start that do not count: the ring is filled, drafters are out of step with each other.
WARM_UP = 2


@dataclass(frozen=True)
class Simulated:
    """Means over the simulated rounds behind the warm-up, in the units of `Prediction`."""

    split: Split
    block_tok_s: float
    ctx_tok_s: float
    target_busy: float
    drafter_busy: float
    ring_fill: float


@dataclass
class Draws:
    """Seconds of each batch's stages: gamma with the measured mean and deviation, within each bucket if there are any.

    Args:
        rates: measured. rng: the source of chance.
    """

    rates: StageRates
    rng: random.Random
    _fill: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def of(self, batch: int) -> tuple[float, float, float]:
        """Of a batch: (fill, copy out, step) in seconds. Each is asked for in any order, and forgotten by `forget`."""
        if batch not in self._fill:
            target, drafter = self.rates.target, self.rates.drafter
            if self.rates.buckets:
                weights = [b.share for b in self.rates.buckets]
                bucket = self.rng.choices(self.rates.buckets, weights)[0]
                target, drafter = bucket.target, bucket.drafter
            fill = self.draw(target) + self.draw(self.rates.target_copy) + self.draw(self.rates.target_hop)
            copy = self.draw(self.rates.drafter_copy) + self.draw(self.rates.drafter_hop)
            self._fill[batch] = fill, copy, self.draw(drafter)
        return self._fill[batch]

    def forget(self, batch: int) -> None:
        self._fill.pop(batch, None)

    def draw(self, timing: Timing) -> float:
        if timing.sd <= 1e-9 * timing.mean:
            return timing.mean
        shape = (timing.mean / timing.sd) ** 2
        return self.rng.gammavariate(shape, timing.mean / shape)


class _Queue:
    """The state of a run; `step` handles one event."""

    def __init__(self, rates: StageRates, split: Split, seed: int) -> None:
        self.rates, self.split = rates, split
        self.draws = Draws(rates, random.Random(seed))
        self.average = average_at(rates, split)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._free = rates.slots_at(split)
        self._targets = rates.producers_at(split)
        self._next = 0
        self._ready: list[int] = []
        self._waiting = deque(range(split.drafters))
        self._steps = [0] * split.drafters
        self._held: dict[int, list[int]] = {}  # sync "step": first batch of a step -> drafters that are through
        self.cursor = 0
        self._size = rates.average_every * split.drafters
        self._trained = 0
        self._averaging = False
        self._step = self._saved = 0
        self._saving: int | None = None
        self._due = False
        #: Seconds that were spent, and ready batches times seconds.
        self.filled_s = self.trained_s = self.ready_s = 0.0

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, what))

    def run_round(self) -> None:
        """Until the next commit."""
        end = self.cursor + self._size
        self._decide()
        while self.cursor < end:
            at, _, what = heapq.heappop(self._events)
            self.ready_s += len(self._ready) * (at - self.now)
            self.now = at
            what()
            self._decide()

    # ---- decisions, in the scheduler's order

    def _decide(self) -> None:
        while self._targets and self._free:
            self._targets, self._free = self._targets - 1, self._free - 1
            self._fill(self._next)
            self._next += 1
        if not self._averaging:
            self._trains()
        if self._due and self._saving is None:
            self._due, self._saving = False, self._step
            self._after(self.draws.draw(self.rates.checkpoint), self._is_saved)

    def _trains(self) -> None:
        """Ready batches for drafters that wait; where all of the round is done, the averaging."""
        for drafter in list(self._waiting):
            batch = self._ready_for(drafter)
            if batch is not None:
                self._waiting.remove(drafter)
                self._ready.remove(batch)
                self._steps[drafter] += 1
                self._train(drafter, batch)
        done = self._trained == self._size and len(self._waiting) == self.split.drafters
        if done and self._saving in (None, self._step):
            self._waiting.clear()
            self._averaging = True
            self._after(self.draws.draw(self.average), self._averaged)

    def _ready_for(self, drafter: int) -> int | None:
        first, end = self.cursor, self.cursor + self._size
        over = self.split.drafters
        if self.rates.sync == "step":
            first += self._steps[drafter] * over
            end = min(end, first + over)
        if self.rates.schedule == "fixed":
            mine = self.cursor + self._steps[drafter] * over + drafter
            return mine if first <= mine < end and mine in self._ready else None
        return min((b for b in self._ready if first <= b < end), default=None)

    # ---- events

    def _fill(self, batch: int) -> None:
        seconds = self.draws.of(batch)[0]
        self.filled_s += seconds

        def filled() -> None:
            self._ready.append(batch)
            self._targets += 1

        self._after(seconds, filled)

    def _train(self, drafter: int, batch: int) -> None:
        _, copy, step = self.draws.of(batch)
        self.draws.forget(batch)
        self.trained_s += copy + step

        def copied() -> None:
            self._free += 1

        def trained() -> None:
            if self.rates.sync == "step":
                self._through(drafter, batch)
            else:
                self._ends(drafter)

        if not self.rates.slot_through_step:
            self._after(copy, copied)
        self._after(copy + step, trained)

    def _ends(self, drafter: int) -> None:
        self._free += self.rates.slot_through_step
        self._trained += 1
        self._waiting.append(drafter)

    def _through(self, drafter: int, batch: int) -> None:
        """Its own part of a common step is done; the last one frees them all, after the sum of gradients."""
        first = batch - (batch - self.cursor) % self.split.drafters
        through = self._held.setdefault(first, [])
        through.append(drafter)
        if len(through) == self.split.drafters:
            for one in self._held.pop(first):
                self._after(self.rates.reduce.mean, lambda one=one: self._ends(one))  # type: ignore[misc]

    def _averaged(self) -> None:
        self._averaging = False
        self.cursor += self._size
        self._step += self.rates.average_every
        self._trained = 0
        self._steps = [0] * self.split.drafters
        self._waiting.extend(range(self.split.drafters))
        every, last = self.rates.checkpoint_every, self._saved if self._saving is None else self._saving
        self._due = bool(every) and self._step - last >= every

    def _is_saved(self) -> None:
        assert self._saving is not None
        self._saved, self._saving = self._saving, None


def simulate(rates: StageRates, split: Split, *, rounds: int = 50, seed: int = 0) -> Simulated:
    """Plays `rounds` rounds (`average_every` batches for each drafter) behind a warm-up.

    Raises:
        UsageError: nobody would train, or nobody would fill the ring.
    """
    check_split(rates, split)
    queue = _Queue(rates, split, seed)
    for _ in range(WARM_UP):
        queue.run_round()
    began, filled, trained, ready = queue.now, queue.filled_s, queue.trained_s, queue.ready_s
    for _ in range(rounds):
        queue.run_round()
    seconds = queue.now - began
    rate = rounds * rates.average_every * split.drafters / seconds
    return Simulated(
        split,
        rate * rates.block_tokens,
        rate * rates.ctx_tokens,
        (queue.filled_s - filled) / seconds / rates.producers_at(split),
        (queue.trained_s - trained) / seconds / split.drafters,
        (queue.ready_s - ready) / seconds / rates.slots_at(split),
    )
