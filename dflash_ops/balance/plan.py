"""The table of all splits, the best one, and whether going there pays."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_ops.balance.memory import Memory, Verdict, feasible, judge_memory
from dflash_ops.balance.model import predict
from dflash_ops.balance.rates import Prediction, Split, StageRates
from dflash_ops.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One split: its prediction, or why it is refused; and what is known of its memory."""

    split: Split
    prediction: Prediction | None
    refused: str | None
    memory: Verdict


@dataclass(frozen=True)
class Plan:
    """All splits of `devices`, by targets, most first; `best` has the highest block_tok_s of those not refused."""

    devices: int
    current: Split
    rows: tuple[Row, ...]
    best: Split

    def row(self, split: Split) -> Row:
        """The split's row.

        Raises:
            UsageError: there is none.
        """
        for row in self.rows:
            if row.split == split:
                return row
        raise UsageError(f"{split} is no split of {self.devices} devices", "plan", "choose one of its rows")


@dataclass(frozen=True)
class Worth:
    """Whether going to `split` pays within the horizon.

    Attributes:
        gained, lost: block tokens within the horizon, and those that the restart costs. payback_s: None = never.
        why: one sentence.
    """

    split: Split
    yes: bool
    gained: float
    lost: float
    payback_s: float | None
    why: str


def plan(rates: StageRates, devices: int, current: Split, memory: Memory) -> Plan:
    rows = []
    for targets in range(devices, -1, -1):
        split = Split(targets, devices - targets)
        refused = feasible(split, memory)
        rows.append(Row(split, None if refused else predict(rates, split), refused, judge_memory(split, memory)))
    possible = [row.prediction for row in rows if row.prediction is not None]
    if not possible:
        raise UsageError("no split is possible", f"{devices} devices", rows[0].refused or "")
    return Plan(devices, current, tuple(rows), max(possible, key=lambda p: p.block_tok_s).split)


def worth(plan: Plan, current: Split, restart_s: float, horizon_s: float) -> Worth:
    best = plan.row(plan.best).prediction
    now = plan.row(current).prediction
    assert best is not None
    before = 0.0 if now is None else now.block_tok_s
    lost = restart_s * before
    gained = (best.block_tok_s - before) * max(0.0, horizon_s - restart_s)
    yes = plan.best != current and gained > lost
    return Worth(plan.best, yes, gained, lost, None, "yes" if yes else "no")
