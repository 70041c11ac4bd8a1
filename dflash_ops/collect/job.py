"""`triage --job`: one exec in the job's machine and one on the layer below, then the diagnosis of what both gave."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_ops.client import JobClient
from dflash_ops.collect import kernel
from dflash_ops.collect.playbooks import load_documents
from dflash_ops.collect.sources import Wanted, gather
from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.contracts.evidence import Evidence, Part
from dflash_ops.errors import CommandFailed, InventoryError
from dflash_ops.inventory import Inventory, Job, LxcHost
from dflash_ops.triage import SOURCE_KINDS, Triage

#: Characters of nvidia-smi's table and of the counters that the diagnosis carries along.
FACT = 8000
#: Bytes of the log's end in which the pane's lines are looked for.
PANE_IN = 4 << 20
_PANE_END = (b"Pane is dead", b"==== dflash-ops attempt ")


@dataclass(frozen=True)
class Examined:
    """The diagnosis of one attempt, and what it was made from."""

    job: str
    host: str
    attempt: int
    alive: bool
    diagnosis: Diagnosis


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
    read = [p for p in parts if p.kind in SOURCE_KINDS and not _says_no_more(p, found)]
    wanted = [Wanted(_name(p, found), p.kind, _reader(p, job)) for p in read if p.status != "none"]
    sources, missing = gather([w for w in wanted if w.kind in SOURCE_KINDS])
    facts = [p for p in parts if p.kind == "facts"]
    said = [*map(str, missing), *(f"{p.name} ({p.note})" for p in facts if p.status == "missing")]
    kernel_read = any(source.kind == "kernel" for source in sources)
    if _killed(found) and not kernel_read:
        # Counters have no time: they speak only of a KILL that nobody here sent and that no kernel log can explain.
        counted = [Wanted(p.name, "log", _reader(p, job)) for p in facts if p.name == "memory events" and p.data]
        sources += gather(counted)[0]
    context: dict[str, Any] = {"missing": said}
    if job.progress:
        context["progress"] = job.progress
    diagnosis = triage.diagnose(sources, context)
    return Examined(
        job.name, client.host.name, found.attempt, found.alive, _told(diagnosis, parts, found, inventory, job)
    )


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


def _name(part: Part, found: Evidence) -> str:
    return f"attempt {found.attempt}, {part.name}" if part.name in ("log", "pane", "exit.json") else part.name


def _reader(part: Part, job: Job) -> Callable[[], bytes | None]:
    def read() -> bytes | None:
        if part.status == "missing":
            raise CommandFailed(part.note or "it could not be had")
        return _finished(part.data, job) if part.kind == "exit_json" else part.data

    return read


def _finished(data: bytes, job: Job) -> bytes:
    """exit.json in the trainer's own terms: what this job calls finished is 0."""
    said = json.loads(data)
    if said.get("rc") in job.finished_rc and said.get("rc") is not None:
        said["rc"] = 0
    return json.dumps(said).encode()


def _says_no_more(part: Part, found: Evidence) -> bool:
    """Whether the pane only repeats the log: its lines would stand there twice as evidence."""
    log = found.part("log")
    if part.kind != "pane" or part.status != "ok" or log is None or log.status != "ok":
        return False
    # the wrapper's and tmux's own lines say how the pane ended; exit.json says that better
    ended = (found.part("exit.json") or part).status == "ok"
    known = {b" ".join(line.split()) for line in log.data[-PANE_IN:].splitlines()}
    rows = [b" ".join(line.split()) for line in part.data.splitlines() if line.strip()]
    return all(row in known or (ended and row.startswith(_PANE_END)) for row in rows)


def _killed(found: Evidence) -> bool:
    part = found.part("exit.json")
    if part is None or part.status != "ok":
        return not found.alive  # nobody lived to write it
    said = json.loads(part.data)
    return not said.get("requested") and (said.get("signal") == "SIGKILL" or said.get("rc") in (137, -9))


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
    d = _numbered(_once(d), parts, found)
    return replace(
        d,
        facts=facts,
        remedies=tuple(replace(r, command=fill(r.command)) for r in d.remedies),
        fetch=tuple(re.sub(r"\bdflash-ops logs JOB\b", f"dflash-ops logs {words['job']}", f) for f in d.fetch),
    )


def _once(d: Diagnosis) -> Diagnosis:
    """Each evidence line once: log, worker's log and pane repeat each other."""
    seen: set[str] = set()
    kept = []
    for item in d.evidence:
        text = " ".join(item.text.split())
        if text not in seen or item.role == "match":
            kept.append(item)
        seen.add(text)
    return replace(d, evidence=tuple(kept))


def _numbered(d: Diagnosis, parts: Sequence[Part], found: Evidence) -> Diagnosis:
    """Line numbers of the file, where only its end was read and it is known where that begins."""
    skipped = {_name(p, found): p.first_line - 1 for p in parts if p.first_line is not None and p.first_line > 1}
    if not skipped or not d.evidence:
        return d
    evidence = tuple(
        replace(e, number=e.number + skipped.get(e.source, 0)) if e.number is not None else e for e in d.evidence
    )
    more = skipped.get(d.evidence[0].source, 0)
    # what is said of a line is said of one in the text of the cause
    why = tuple(re.sub(r"^line (\d+):", lambda m: f"line {int(m[1]) + more}:", reason) for reason in d.why)
    return replace(d, evidence=evidence, why=why)
