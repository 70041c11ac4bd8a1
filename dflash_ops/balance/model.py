"""The closed form: seconds of a round from the seconds of its stages."""

from __future__ import annotations

from dflash_ops.balance.rates import Prediction, Split, StageRates
from dflash_ops.errors import UsageError


def predict(rates: StageRates, split: Split) -> Prediction:
    """What a split would do.

    Raises:
        UsageError: nobody would train, or nobody would fill the ring.
    """
    if split.drafters < 1:
        raise UsageError("nobody would train", f"split {split}", "keep at least 1 drafter")
    producers = rates.producers_at(split)
    if producers < 1:
        raise UsageError(
            "nobody would fill the ring", f"split {split}", "keep at least 1 target, or name features.path"
        )
    fill = rates.target.mean + rates.target_copy.mean
    step = rates.drafter.mean + rates.drafter_copy.mean
    batches = rates.average_every * split.drafters
    by_targets = batches * fill / producers
    by_drafters = rates.average_every * step + rates.average.mean
    period = max(by_targets, by_drafters)
    rate = batches / period
    rel = max(rates.target.error / rates.target.mean, rates.drafter.error / rates.drafter.mean)
    tok = rate * rates.block_tokens
    side = "targets" if by_targets > by_drafters else "drafters"
    return Prediction(
        split,
        tok,
        rate * rates.ctx_tokens,
        tok * (1 - 2 * rel),
        tok * (1 + 2 * rel),
        min(1.0, rate * fill / producers),
        min(1.0, rate * step / split.drafters),
        0.0,
        None if rates.remaining is None else rates.remaining / rate,
        "targets" if by_targets > by_drafters else "drafters",
        f"The {side} limit.",
    )
