"""From the texts of an attempt (`contracts.Evidence`) to one Diagnosis: the same here and beside the trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.contracts.evidence import Evidence, Part
from dflash_ops.triage.diagnose import Triage
from dflash_ops.triage.types import SOURCE_KINDS, Source

#: In which order texts are believed where nothing else tells: the worker's own report first, the pane last.
ORDER = ("error_json", "kernel", "log", "pane", "exit_json")
#: Bytes of the log's end in which the pane's lines are looked for.
PANE_IN = 4 << 20
_PANE_END = (b"Pane is dead", b"==== dflash-ops attempt ")


def diagnose_attempt(
    triage: Triage,
    found: Evidence,
    more: Sequence[Part] = (),
    *,
    finished_rc: Sequence[int] = (0,),
    progress: str = "",
) -> Diagnosis:
    """Judge one attempt.

    Args:
        found: its texts. more: texts from outside its machine, such as the host's kernel log.
        finished_rc: exit codes that this job calls finished. progress: its own progress pattern, if it has one.

    Raises:
        ContractError: `progress` is no usable pattern.
    """
    parts = [*found.parts, *more]
    read = [p for p in parts if p.kind in SOURCE_KINDS and not _says_no_more(p, found) and p.status != "none"]
    sources = [
        Source(name_of(p, found), _finished(p.data, finished_rc) if p.kind == "exit_json" else p.data, p.kind)
        for p in read
        if p.status != "missing"
    ]
    sources.sort(key=lambda source: ORDER.index(source.kind))
    facts = [p for p in parts if p.kind == "facts"]
    missing = [_missing(name_of(p, found), p) for p in read if p.status == "missing"]
    missing += [_missing(p.name, p) for p in facts if p.status == "missing"]
    if _killed(found) and not any(source.kind == "kernel" for source in sources):
        # Counters have no time: they speak only of a KILL that nobody here sent and that no kernel log can explain.
        sources += [Source(p.name, p.data, "log") for p in facts if p.name == "memory events" and p.data]
    context: dict[str, Any] = {"missing": missing}
    if progress:
        context["progress"] = progress
    return _numbered(_once(triage.diagnose(sources, context)), parts, found)


def name_of(part: Part, found: Evidence) -> str:
    """What a person calls this text."""
    return f"attempt {found.attempt}, {part.name}" if part.name in ("log", "pane", "exit.json") else part.name


def _missing(name: str, part: Part) -> str:
    return f"{name} ({part.note or 'it could not be had'})"


def _finished(data: bytes, finished_rc: Sequence[int]) -> bytes:
    """exit.json in the trainer's own terms: what this job calls finished is 0."""
    said = json.loads(data)
    if said.get("rc") in finished_rc and said.get("rc") is not None:
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
    skipped = {name_of(p, found): p.first_line - 1 for p in parts if p.first_line is not None and p.first_line > 1}
    if not skipped or not d.evidence:
        return d
    evidence = tuple(
        replace(e, number=e.number + skipped.get(e.source, 0)) if e.number is not None else e for e in d.evidence
    )
    more = skipped.get(d.evidence[0].source, 0)
    # what is said of a line is said of one in the text of the cause
    why = tuple(re.sub(r"^line (\d+):", lambda m: f"line {int(m[1]) + more}:", reason) for reason in d.why)
    return replace(d, evidence=evidence, why=why)
