"""Which job the demo runs: the inventory's, or one of an inventory that it writes under its own root."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dflash_ops.errors import InventoryError, UsageError
from dflash_ops.inventory import Inventory, Job, LocalHost, Trainer, find_inventory, load
from dflash_ops.inventory.create import create
from dflash_ops.inventory.template import quote

JOB = "demo"
DEFAULT_ROOT = Path(".dflash/demo")


@dataclass(frozen=True)
class Setup:
    """The demo's inventory, its job and the folders that the job names.

    Attributes:
        option: what a person adds to `dflash-ops status` and the others to mean this inventory; may be empty.
    """

    inventory: Inventory
    job: Job
    option: str

    @property
    def trainer(self) -> Trainer:
        assert self.job.trainer is not None
        return self.job.trainer

    @property
    def root(self) -> Path:
        return Path(self.job.root)

    @property
    def target(self) -> Path:
        return self._path("target")

    @property
    def data(self) -> Path:
        return self._path("data")

    @property
    def prompts(self) -> Path:
        """Where `demo-target` puts the training prompts, and beside them the held-out ones."""
        return self.target.parent / "data" / "prompts.jsonl"

    @property
    def held_out(self) -> Path:
        return self.prompts.with_name("heldout.jsonl")

    @property
    def export(self) -> Path:
        return self.root / "export"

    def _path(self, table: str) -> Path:
        return self.root / str(self.trainer.tables[table]["path"])


def find(inventory: Path | None, root: Path | None, *, environ: Mapping[str, str], cwd: Path) -> Setup:
    """The demo's job.

    With `root`, or where no inventory is found, one is written to `root`/inventory.toml and used from then on.

    Raises:
        InventoryError: an inventory with faults.
        UsageError: both are given; or the inventory's demo job is not one that can be run here.
    """
    if inventory is not None and root is not None:
        raise UsageError(
            "--inventory and --root exclude each other", "dflash-ops demo", "the inventory's job names its own root"
        )
    if root is None:
        try:
            loaded = load(find_inventory(inventory, environ=environ, cwd=cwd))
        except InventoryError as error:
            if inventory is not None or not error.what.startswith("no inventory.toml was found"):
                raise
        else:
            if JOB in loaded.jobs:
                return _checked(loaded, "" if inventory is None else f" -i {inventory}")
            if inventory is not None:
                raise UsageError(
                    "the inventory has no job named demo", loaded.file, "add one: dflash-ops init shows it"
                )
    return _own((cwd / (root or DEFAULT_ROOT)).absolute())


def _own(root: Path) -> Setup:
    """An inventory of the demo's own; its session is named after the root, so that two demos do not collide."""
    file = root / "inventory.toml"
    if not file.exists():
        create(file, root=str(root), interpreter=sys.executable)
        session = f"dflash-demo-{hashlib.sha256(str(root).encode()).hexdigest()[:6]}"
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace('session = "dflash-demo"', f"session = {quote(session)}"), encoding="utf-8")
    return _checked(load(file), f" -i {file}")


def _checked(loaded: Inventory, option: str) -> Setup:
    job = loaded.job(JOB)
    where = f"{loaded.file}, key jobs.{JOB}"
    if not isinstance(loaded.host_of(job), LocalHost):
        raise UsageError(
            f"the demo's job is on host {job.host}, which is not this machine",
            where,
            "give it a host of kind local, or run the demo apart: dflash-ops demo --root DIR",
        )
    if job.trainer is None:
        raise UsageError("the demo's job does not run the bundled trainer", where, "dflash-ops demo --root DIR")
    for table in ("target", "data"):
        path = job.trainer.tables.get(table, {}).get("path")
        if not isinstance(path, str) or not path or PurePosixPath(path).is_absolute():
            raise UsageError(
                f"the demo makes its {table} itself and needs a path relative to the job's root for it",
                f"{where}.trainer.{table}.path",
                "write one, or run the demo apart: dflash-ops demo --root DIR",
            )
    return Setup(loaded, job, option)
