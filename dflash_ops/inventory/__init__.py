"""inventory.toml -> frozen dataclasses; every fault names file, key, line and fix (docs/inventory.md)."""

from dflash_ops.contracts import Budgets, Policy, Way
from dflash_ops.inventory.find import find_inventory
from dflash_ops.inventory.loader import InventoryErrors, load
from dflash_ops.inventory.model import (
    REMEDIES,
    SCHEMA,
    TRAINER_TABLES,
    Host,
    Inventory,
    Job,
    LocalHost,
    LxcHost,
    Node,
    SecretEnv,
    SshHost,
    Trainer,
    Venv,
)

__all__ = [
    "REMEDIES",
    "SCHEMA",
    "TRAINER_TABLES",
    "Budgets",
    "Host",
    "Inventory",
    "InventoryErrors",
    "Job",
    "LocalHost",
    "LxcHost",
    "Node",
    "Policy",
    "SecretEnv",
    "SshHost",
    "Trainer",
    "Venv",
    "Way",
    "find_inventory",
    "load",
]
