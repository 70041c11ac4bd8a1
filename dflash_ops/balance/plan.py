"""The table of all splits, the best one, and whether going there pays."""

from __future__ import annotations

import math
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
    """All splits of `devices`, most targets first, and the present one if it uses fewer devices.

    Attributes:
        best: highest block_tok_s of those not refused; of equal ones (within 0.1 %) the present one, then the one whose
            drafters are fewest: fewer averagings, and the same samples in more steps.
        measured: block tokens a second of the run as it is; None = not known.
        notes: what a reader should know of the measurement.
    """

    devices: int
    current: Split
    rows: tuple[Row, ...]
    best: Split
    measured: float | None = None
    notes: tuple[str, ...] = ()

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
    """Whether going to the plan's best split pays within the horizon.

    Attributes:
        gained, lost: block tokens that the better split makes more of within the horizon, and those that the restart
            costs. payback_s: seconds from the stop until both are equal; None = never.
        certain: the gain is larger than both intervals together.
        why: one sentence.
    """

    split: Split
    yes: bool
    gained: float
    lost: float
    payback_s: float | None
    certain: bool
    why: str


def plan(rates: StageRates, devices: int, current: Split, memory: Memory) -> Plan:
    """Every split of `devices`.

    Raises:
        UsageError: less than 2 devices without features, or no split is possible.
    """
    if devices < 1 or current.devices > devices:
        raise UsageError(
            f"{devices} devices cannot be split, {current.devices} are in use now", "plan", "give the number of devices"
        )
    splits = [Split(targets, devices - targets) for targets in range(devices, -1, -1)]
    if current not in splits:
        splits.append(current)
    rows = []
    for split in splits:
        refused, found = feasible(split, memory), None
        if refused is None:
            try:
                found = predict(rates, split)
            except UsageError as error:
                refused = error.what
        rows.append(Row(split, found, refused, judge_memory(split, memory)))
    possible = [row.prediction for row in rows if row.prediction is not None]
    if not possible:
        reasons = "; ".join(f"{row.split}: {row.refused}" for row in rows)
        raise UsageError("no split is possible", reasons, "use more or larger devices, or a smaller model")
    most = max(p.block_tok_s for p in possible)
    near = [p.split for p in possible if p.block_tok_s >= most * 0.999]
    best = current if current in near else min(near, key=lambda split: split.drafters)
    return Plan(
        devices, current, tuple(rows), best, None if rates.measured is None else rates.measured.mean, rates.notes
    )


def worth(plan: Plan, current: Split, restart_s: float, horizon_s: float) -> Worth:
    """Whether changing to the best split gains more within the horizon than the restart loses.

    Args:
        restart_s: seconds without training: checkpoint, stop, start, first step. horizon_s: seconds from now, cut to
            what is left of the run.

    Raises:
        UsageError: a time is not a finite number of seconds, or the present split has no prediction.
    """
    for name, value in (("restart_s", restart_s), ("horizon_s", horizon_s)):
        if not math.isfinite(value) or value < 0:
            raise UsageError(f"{name} is {value!r}", "rebalance", "give a finite number of seconds, at least 0")
    row, now = plan.row(plan.best), plan.row(current).prediction
    best = row.prediction
    if best is None or now is None:
        raise UsageError(
            f"{current} has no prediction to compare with", plan.row(current).refused or "", "name a split of the plan"
        )
    before = plan.measured if plan.measured and current == plan.current else now.block_tok_s
    # What was measured beside what was predicted for the present split: the same factor is expected of the other one.
    after = best.block_tok_s * before / now.block_tok_s if now.block_tok_s else best.block_tok_s
    left = horizon_s if now.eta_s is None else min(horizon_s, now.eta_s)
    lost = restart_s * before
    more = after - before
    gained = more * max(0.0, left - restart_s)
    payback = restart_s * after / more if more > 0 else None
    certain = best.low > now.high
    if plan.best == current:
        return Worth(plan.best, False, 0.0, lost, None, False, f"No: {current} is the best split already.")
    change = f"{plan.best} is predicted to make {after / before - 1:+.1%}" if before else f"{plan.best} is predicted"
    if payback is None or gained <= lost:
        why = f"No: {change}, which {left:.0f} s do not pay back after {restart_s:.0f} s without training."
        return Worth(plan.best, False, gained, lost, payback, certain, why)
    why = f"Yes: {change} and pays back {restart_s:.0f} s without training after {payback:.0f} s."
    if not certain:
        why = (
            f"No: {change}, but the intervals of {plan.best} ({best.low:.0f} to {best.high:.0f}) and {current} "
            f"({now.low:.0f} to {now.high:.0f} block tokens/s) overlap."
        )
    return Worth(plan.best, certain, gained, lost, payback, certain, why)
