"""What another split of the devices would do: measured stage times -> predicted throughput of each split -> a plan.

Pure: no files, clocks or processes. `measure` turns the trainer's records into `StageRates`; `predict` is the closed
form, `simulate` the same queue played through event by event; `feasible` looks at memory; `plan` makes the table of all
splits and `worth` says whether a change pays for its restart. docs/rebalance.md has the model, its sources and where it
is off.
"""

from __future__ import annotations

from dflash_ops.balance.measure import measure, pace, paces
from dflash_ops.balance.memory import Memory, Verdict, feasible, judge_memory, memory_from_check
from dflash_ops.balance.model import predict
from dflash_ops.balance.plan import Plan, Row, Worth, plan, worth
from dflash_ops.balance.rates import Bucket, Prediction, Split, StageRates, Timing
from dflash_ops.balance.simulate import Simulated, simulate

__all__ = [
    "Bucket",
    "Memory",
    "Plan",
    "Prediction",
    "Row",
    "Simulated",
    "Split",
    "StageRates",
    "Timing",
    "Verdict",
    "Worth",
    "feasible",
    "judge_memory",
    "measure",
    "memory_from_check",
    "pace",
    "paces",
    "plan",
    "predict",
    "simulate",
    "worth",
]
