"""What was asked of `rebalance`, and what came of it: the fields of `rebalance --json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_ops.balance import Plan, Prediction, Row, Split, Worth
from dflash_ops.contracts import to_dict
from dflash_ops.errors import StartError
from dflash_ops.fleet.rebalance_judge import Pace
from dflash_ops.resident.preflight import Check


@dataclass(frozen=True)
class Asked:
    """What the operator asked for.

    Args:
        split: the one to go to; None with `auto` (the best one) or with `plan` alone.
        plan: show the table, touch nothing. auto: go to the best one if that pays within `horizon_s`.
        devices: those that may be divided; None: the running attempt's.
        settle, measure: steps; None: by the trainer's config. limit_s: seconds for both.
        grace_s: seconds between TERM and KILL; None: the job's. gate: try it first. back: go back where it is worse.
    """

    split: Split | None = None
    plan: bool = False
    auto: bool = False
    devices: tuple[str, ...] | None = None
    horizon_s: float = 86400.0
    settle: int | None = None
    measure: int | None = None
    limit_s: float = 7200.0
    grace_s: float | None = None
    gate: bool = True
    back: bool = True
    reason: str = ""
    actor: str = "operator"


@dataclass
class Result:
    """`outcome`: `planned`, `same` (it runs so already), `not_worth` (`--auto`), `kept`, `went_back`, `unmeasured` (it
    runs, and was not measured), or empty where it was refused. `measured_at` = the attempt whose records the table is
    from. `back` = the attempt that runs as before, again."""

    job: str
    host: str
    plan: bool
    auto: bool
    current: Split | None = None
    asked: Split | None = None
    devices: dict[str, list[str]] = field(default_factory=dict)
    measured_at: int | None = None
    exact: bool | None = None
    why: str = ""
    table: Plan | None = None
    extra: Row | None = None
    worth: Worth | None = None
    restart_s: float | None = None
    before: Pace | None = None
    checks: tuple[Check, ...] = ()
    gate: dict[str, Any] | None = None
    stopped: dict[str, Any] | None = None
    attempt: int | None = None
    predicted: Prediction | None = None
    measured: Pace | None = None
    outcome: str = ""
    reason: str = ""
    back: int | None = None
    inventory: str = ""
    notes: list[str] = field(default_factory=list)
    execs: int = 0

    @property
    def rows(self) -> list[Row]:
        """All splits that are known: those of the table, and the one beside it."""
        return [*(self.table.rows if self.table is not None else ()), *([self.extra] if self.extra is not None else ())]

    def to_json(self) -> dict[str, Any]:
        skip = ("table", "extra", "current", "asked", "before", "measured", "predicted", "worth")
        plain = {k: v for k, v in vars(self).items() if k not in skip}
        return {
            "schema": 1,
            "kind": "rebalance",
            **{k: to_dict(v) for k, v in plain.items()},
            "current": split_json(self.current),
            "asked": split_json(self.asked),
            "rows": [row_json(row, self) for row in self.rows],
            "worth": {k: to_dict(v) for k, v in vars(self.worth).items()} if self.worth is not None else None,
            "predicted": prediction_json(self.predicted),
            "before": self.before.to_json() if self.before is not None else None,
            "measured": self.measured.to_json() if self.measured is not None else None,
        }


class WentBack(StartError):
    """The new split was worse, or failed, and what ran before runs again; `result` is what `--json` prints."""

    result: dict[str, Any]


def split_json(split: Split | None) -> dict[str, int] | None:
    return {"targets": split.targets, "drafters": split.drafters} if split is not None else None


def prediction_json(found: Prediction | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        k: round(v, 4) if isinstance(v, float) else v
        for k, v in vars(found).items()
        if k != "split"
    }  # fmt: skip


def row_json(row: Row, result: Result) -> dict[str, Any]:
    table = result.table
    return {
        "targets": row.split.targets,
        "drafters": row.split.drafters,
        "current": row.split == result.current,
        "best": table is not None and row.split == table.best,
        "prediction": prediction_json(row.prediction),
        "refused": row.refused,
        "memory": {"state": row.memory.state, "text": row.memory.text},
    }
