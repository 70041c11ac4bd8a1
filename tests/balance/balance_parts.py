"""Rates for the balance tests: drawn at random, and simple ones."""

from __future__ import annotations

import math
import random
from typing import Any

from dflash_ops.balance import Split, StageRates, Timing


def rates_of(fill: float, step: float, **changes: Any) -> StageRates:
    """Stages that do not vary, measured at 1+1, unless `changes` say otherwise."""
    wanted: dict[str, Any] = {
        "split": Split(1, 1),
        "target": Timing(fill, 0.0, 1000),
        "drafter": Timing(step, 0.0, 1000),
        "average": Timing(0.0, 0.0, 10),
        "block_tokens": 1000.0,
        "ctx_tokens": 2000.0,
        "average_every": 10,
    }
    return StageRates(**(wanted | changes))


def drawn(rng: random.Random, most: float, **changes: Any) -> StageRates:
    """Rates of a split of up to 6+6, targets three times too slow to three times too fast; deviations up to `most`."""
    t, d = rng.randint(1, 6), rng.randint(1, 6)
    step = math.exp(rng.uniform(-1, 1))
    fill = step * t / d * math.exp(rng.uniform(-1.2, 1.2))
    every = rng.choice((3, 5, 10, 20, 50))
    on_cpu = rng.random() < 0.5
    wanted: dict[str, Any] = {
        "split": Split(t, d),
        "target": Timing(fill, fill * rng.uniform(0, most), 1000),
        "drafter": Timing(step, step * rng.uniform(0, most), 1000),
        "average": Timing(rng.choice((0.0, rng.uniform(0, 0.3) * every * step, rng.uniform(0, 3) * step)), 0.0, 10),
        "drafter_copy": Timing(0.0 if on_cpu else rng.uniform(0, 0.2) * step),
        "slot_through_step": on_cpu,
        "average_every": every,
    }
    return rates_of(fill, step, **(wanted | changes))
