"""metrics.jsonl and run.json -> stage rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_ops.balance.rates import StageRates
from dflash_ops.errors import UsageError


def measure(records: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> StageRates:
    """Stage rates of one attempt.

    Args:
        records: objects of its metrics.jsonl, oldest first. config: its run.json.

    Raises:
        UsageError: there is too little to tell.
    """
    raise UsageError("too little was measured", "metrics.jsonl", "wait for more progress lines")
