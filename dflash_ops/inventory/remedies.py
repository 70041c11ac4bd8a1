"""How a job's trainer does what the supervisor asks for: its remedies table, with the config values in force."""

from __future__ import annotations

import json

from dflash_ops.bundle import bundled
from dflash_ops.contracts import RemedyTable, from_dict
from dflash_ops.inventory.model import Job


def remedy_table(job: Job) -> RemedyTable:
    """How the job's trainer does the supervisor's actions: the bundled one ships its table (trainer/remedies.json).

    Raises:
        ContractError: the bundled table is damaged.
    """
    if job.trainer is None:
        return RemedyTable(dict(job.remedies))
    file = bundled("trainer") / "remedies.json"
    table = from_dict(RemedyTable, json.loads(file.read_text("utf-8")), str(file))
    said = {f"{name}.{key}": value for name, keys in job.trainer.tables.items() for key, value in keys.items()}
    devices = {
        "workers.target_devices": list(job.trainer.target_devices),
        "workers.drafter_devices": list(job.trainer.drafter_devices),
    }
    return RemedyTable(table.ways, {**table.values, **said, **devices}, table.reasons)
