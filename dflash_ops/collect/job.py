"""`triage --job`: one exec in the job's machine and one on the layer below, then the diagnosis of what both gave."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_ops.client import JobClient
from dflash_ops.collect import kernel
from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.contracts.evidence import Evidence, Part
from dflash_ops.errors import InventoryError
from dflash_ops.inventory import Inventory, Job, LxcHost
from dflash_ops.playbooks import load_documents
from dflash_ops.triage import Triage
from dflash_ops.triage.attempt import diagnose_attempt

#: Characters of nvidia-smi's table and of the counters that the diagnosis carries along.
FACT = 8000


@dataclass(frozen=True)
class Examined:
    """The diagnosis of one attempt, and what it was made from.

    `cascade`: its kind follows from a failure elsewhere. `failed`: when it failed, by that machine's clock
    (`failed_whole`: in whole seconds), None where that is not known.
    """

    job: str
    host: str
    attempt: int
    alive: bool
    diagnosis: Diagnosis
    cascade: bool = False
    failed: float | None = None
    failed_whole: bool = False


def examine(
    client: JobClient,
    inventory: Inventory,
    *,
    attempt: int | None = None,
    playbooks: Sequence[str] = (),
    mib: float = 16.0,
) -> Examined:
    """Diagnose an attempt of the client's job (None: the newest) from every text that can be had.

    Args:
        playbooks: folders of own kinds, beyond those of the inventory; later ones override earlier ones.

    Raises:
        InventoryError, UsageError, ContractError: a playbook folder or file is at fault.
        UsageError: nothing was ever started. HostError: the machine cannot be asked. CommandFailed: never deployed.
    """
    job = client.job
    triage = Triage(load_documents([*folders(inventory), *playbooks]))
    cpu_only = job.trainer is not None and all(
        d == "cpu" for d in (*job.trainer.target_devices, *job.trainer.drafter_devices)
    )
    found = client.evidence(attempt, mib=mib, gpu=not cpu_only)
    parts = [*found.parts, *kernel.asked(inventory, job, found)]
    diagnosis = diagnose_attempt(
        triage, found, parts[len(found.parts) :], finished_rc=job.finished_rc, progress=job.progress
    )
    kind = triage.playbooks.kinds.get(diagnosis.kind)
    failed, whole = failed_at(found)
    return Examined(
        job.name,
        client.host.name,
        found.attempt,
        found.alive,
        _told(diagnosis, parts, found, inventory, job),
        cascade=kind is not None and kind.role == "cascade",
        failed=failed,
        failed_whole=whole,
    )


def failed_at(found: Evidence) -> tuple[float | None, bool]:
    """When the attempt failed, by its own machine's clock, and whether that is known in whole seconds only.

    The smallest time of an error.json, since the launcher outlives its workers; else the end of the attempt.
    """
    times = [t for part in found.parts if part.kind == "error_json" if (t := _stamp(part.data)) is not None]
    return (min(times), True) if times else (found.ended, False)


def _stamp(data: bytes) -> float | None:
    try:
        return float(json.loads(data)["message"]["extraInfo"]["timestamp"])
    except (ValueError, KeyError, TypeError):
        return None  # of another writer, or torn: its text is judged all the same


def folders(inventory: Inventory) -> tuple[str, ...]:
    """The inventory's playbook folders.

    Raises:
        InventoryError: one is not there, or holds no playbook.
    """
    for folder in inventory.playbooks:
        place = Path(folder)
        if not place.is_dir():
            raise InventoryError(
                f"the playbooks folder is not there: {folder}",
                file=inventory.file,
                key="playbooks",
                fix="make it, or take it out; `dflash-ops playbooks lint DIR` checks one",
            )
        if not any(place.glob("*.toml")):
            raise InventoryError(
                f"the playbooks folder holds no *.toml: {folder}",
                file=inventory.file,
                key="playbooks",
                fix="see docs/playbooks.md for their form, or take it out",
            )
    return inventory.playbooks


def _told(d: Diagnosis, parts: Sequence[Part], found: Evidence, inventory: Inventory, job: Job) -> Diagnosis:
    """The diagnosis with the job's names in its commands, and with what was read."""
    words = {"job": shlex.quote(job.name), "root": shlex.quote(job.root)}
    words["attempt"] = shlex.quote(f"{job.root}/run/attempts/{found.attempt}")
    if found.release:
        words["release"] = shlex.quote(f"{job.root}/releases/{found.release}")
    host = inventory.host_of(job)
    if isinstance(host, LxcHost):
        words["ct"] = str(host.id)

    def fill(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda m: words.get(m[1], m[0]), text)

    facts = dict(d.facts)
    facts["sources"] = [{"name": p.name, "status": p.status, "bytes": len(p.data), "note": p.note} for p in parts]
    for part in parts:
        if part.kind == "facts" and part.data:
            facts[part.name.replace(" ", "_").replace("-", "_")] = part.data[:FACT].decode("utf-8", "replace")
    return replace(
        d,
        facts=facts,
        remedies=tuple(replace(r, command=fill(r.command)) for r in d.remedies),
        fetch=tuple(re.sub(r"\bdflash-ops logs JOB\b", f"dflash-ops logs {words['job']}", f) for f in d.fetch),
    )
