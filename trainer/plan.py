"""Which samples make which batch, and when: a pure function of (seed, epoch, lengths). No random stream, no files.

Batches are numbered through the whole run. Samples of an epoch are put in an order drawn from a hash of (seed, epoch,
sample id) and dealt into one open batch a bucket; what is left at the end is merged upwards, so that an epoch has at
most a few short batches. A resumed run that changed what batches are made of (size, buckets) goes on with the samples
of the epoch that were not trained yet: the plan then starts from a new base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlannedBatch:
    """One batch of the plan.

    Attributes:
        number: through the run, from 0. epoch, index: its place in the epoch.
        length: padded length S (its bucket). sample_ids: at most batch_size of them.
    """

    number: int
    epoch: int
    index: int
    length: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True)
class Base:
    """Where the present way of making batches began.

    Attributes:
        number: of the first batch. epoch: that it lies in. trained: samples of this epoch that were trained before.
    """

    number: int = 0
    epoch: int = 0
    trained: frozenset[int] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        return {"number": self.number, "epoch": self.epoch, "trained": sorted(self.trained)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Base:
        return cls(int(raw["number"]), int(raw["epoch"]), frozenset(int(i) for i in raw["trained"]))


def draw(seed: int, epoch: int, sample_id: int) -> bytes:
    """The sample's rank in the epoch's order."""
    return hashlib.blake2b(b"%d/%d/%d" % (seed, epoch, sample_id), digest_size=8).digest()


@dataclass
class Plan:
    """The batches of a run.

    Args:
        ids, lengths: accepted samples, ascending ids. seed. batch_size. buckets: padded lengths, ascending.
        base: where this way of making batches began.

    Raises:
        ValueError: no samples, or one that is longer than the last bucket.
    """

    ids: Sequence[int]
    lengths: Sequence[int]
    seed: int
    batch_size: int
    buckets: tuple[int, ...]
    base: Base = field(default_factory=Base)

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a plan needs samples")
        if max(self.lengths) > self.buckets[-1]:
            raise ValueError(f"a sample of {max(self.lengths)} tokens does not fit the last bucket {self.buckets[-1]}")
        self._length_of = dict(zip(self.ids, self.lengths, strict=True))
        self._epochs: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        # An epoch's number of batches depends on how many samples each bucket has, not on their order.
        self.per_epoch = len(self._order(self.base.epoch + 1))
        self.first = len(self._batches(self.base.epoch))

    def _bucket(self, length: int) -> int:
        return next(i for i, longest in enumerate(self.buckets) if length <= longest)

    def _order(self, epoch: int) -> list[tuple[int, tuple[int, ...]]]:
        skip: frozenset[int] = self.base.trained if epoch == self.base.epoch else frozenset()
        ranked = sorted((draw(self.seed, epoch, i), i) for i in self.ids if i not in skip)
        opened: list[list[int]] = [[] for _ in self.buckets]
        out: list[tuple[int, tuple[int, ...]]] = []
        for _, sample in ranked:
            bucket = self._bucket(self._length_of[sample])
            opened[bucket].append(sample)
            if len(opened[bucket]) == self.batch_size:
                out.append((self.buckets[bucket], tuple(opened[bucket])))
                opened[bucket] = []
        rest: list[int] = []
        for bucket, samples in enumerate(opened):
            # The rest of the smaller buckets joins the next one that has a rest of its own.
            if not samples:
                continue
            rest += samples
            while len(rest) >= self.batch_size:
                out.append((self.buckets[bucket], tuple(rest[: self.batch_size])))
                rest = rest[self.batch_size :]
        if rest:
            longest = max(self._bucket(self._length_of[s]) for s in rest)
            out.append((self.buckets[longest], tuple(rest)))
        return out

    def _batches(self, epoch: int) -> list[tuple[int, tuple[int, ...]]]:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # targets may be an epoch ahead of the drafters
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = self._order(epoch)
        return self._epochs[epoch]

    def place(self, number: int) -> tuple[int, int]:
        """(epoch, index in it) of a batch; of the number right behind the last one of an epoch: the next epoch's 0."""
        since = number - self.base.number
        if since < 0:
            raise ValueError(f"batch {number} lies before the plan's base {self.base.number}")
        if since < self.first:
            return self.base.epoch, since
        more, index = divmod(since - self.first, self.per_epoch)
        return self.base.epoch + 1 + more, index

    def batch(self, number: int) -> PlannedBatch:
        """The batch with this number."""
        epoch, index = self.place(number)
        length, samples = self._batches(epoch)[index]
        return PlannedBatch(number, epoch, index, length, samples)

    def total(self, epochs: int) -> int:
        """Number of batches when `epochs` epochs are done, counted from the run's very beginning."""
        if epochs <= self.base.epoch:
            return self.base.number
        return self.base.number + self.first + (epochs - self.base.epoch - 1) * self.per_epoch

    def epochs_at(self, number: int) -> float:
        """Passes over the data after `number` batches, fractional; 1.0 after the first epoch."""
        epoch, index = self.place(number)
        size = self.first if epoch == self.base.epoch else self.per_epoch
        before = len(self.base.trained) / len(self.ids) if epoch == self.base.epoch else 0.0
        return epoch + before + (1.0 - before) * index / max(1, size)

    def lengths_used(self) -> tuple[int, ...]:
        """Buckets that hold samples: the shapes to expect."""
        used = {self._bucket(length) for length in self.lengths}
        return tuple(self.buckets[i] for i in sorted(used))

    def rebase(self, number: int) -> Base:
        """A base for another way of making batches, with `number` batches done."""
        epoch, index = self.place(number)
        trained = {s for _, samples in self._batches(epoch)[:index] for s in samples}
        if epoch == self.base.epoch:
            trained |= self.base.trained
        return Base(number, epoch, frozenset(trained))


def learning_rate(number: int, total: int, peak: float, warmup: float) -> float:
    """Linear warm-up, then cosine to zero, by batch number and not by who trains it.

    Args:
        number: of the batch. total: batches of the run. peak: largest rate. warmup: share of the run, 0..1.
    """
    import math

    rising = warmup * total
    if number < rising:
        return peak * (number + 1) / (rising + 1)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (number - rising) / max(1.0, total - rising))))
