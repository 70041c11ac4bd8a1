"""What a split costs beside its stages: averaging by the number of drafters; and which splits have any meaning."""

from __future__ import annotations

from dflash_ops.balance.rates import Split, StageRates, Timing
from dflash_ops.errors import UsageError


def check_split(rates: StageRates, split: Split) -> None:
    """
    Raises:
        UsageError: nobody would train, or nobody would fill the ring.
    """
    if split.drafters < 1:
        raise UsageError("nobody would train", f"split {split}", "keep at least 1 drafter")
    if split.targets < 0 or rates.producers_at(split) < 1:
        raise UsageError(
            "nobody would fill the ring", f"split {split}", "keep at least 1 target, or name features.path"
        )
    if (split.targets == 0) != (rates.split.targets == 0):
        who = "readers" if split.targets == 0 else "targets"
        raise UsageError(
            f"how fast {who} are was not measured: the run at {rates.split} has none",
            f"split {split}",
            f"run a while with {who}, or choose among the splits that were measured",
        )


def average_at(rates: StageRates, split: Split) -> Timing:
    """Seconds of one averaging at another number of drafters.

    A ring all-reduce moves 2 (D-1)/D of the bytes through each link (Patarasuk and Yuan, 2009), and drafter 0 then
    writes the average into host memory, which no number of drafters changes. How the measured seconds divide into the
    two is not known: half and half is assumed, and `spread` holds all that lies between none and all of it.
    """
    a, before, after = rates.average, _moved(rates.split.drafters), _moved(split.drafters)
    if before == after:
        return a
    if before == 0.0:  # nothing was exchanged yet: it may come to as much again as the writing, or to nothing
        mean = a.mean * (1 + after / 2)
        return Timing(mean, a.sd * mean / a.mean if a.mean else 0.0, a.count, after / (2 + after))
    ratio = (1 + after / before) / 2
    return Timing(a.mean * ratio, a.sd * ratio, a.count, max(a.spread, abs(ratio - 1) / ratio))


def _moved(drafters: int) -> float:
    """Share of the state that each drafter sends and receives in an all-reduce, of twice the state: (D-1)/D."""
    return (drafters - 1) / drafters
