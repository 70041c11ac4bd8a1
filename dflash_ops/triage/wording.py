"""Words of a diagnosis that several verdicts share: a line as it is shown, facts, what to fetch next."""

from __future__ import annotations

import re
from typing import Any

from dflash_ops.triage.case import Case
from dflash_ops.triage.types import Finding, Line, Record

HEALTHY = "healthy"
NOT_SHOWN = "root_cause_not_shown"
UNKNOWN = "unrecognised_error"
CUT = 1200  # characters of one line that are kept
_PREFIX = re.compile(r"^\s*(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z\s)?\s*(?:\[(?:rank|default)?\d+\]:\s?)?")
_LOG_NAMED = re.compile(r"(?:^|[\s'\"=:(])((?:/|\.{0,2}/|[\w-]+/)[\w./-]+\.(?:log|out|err|txt))\b")
_ERROR_FILE = re.compile(r"error_file\s*:\s*(/\S+)")
_KERNEL = "the host's kernel log around the time of the end: dmesg -T | grep -E 'NVRM|Killed process|oom'"


def shown(line: Line) -> str:
    return _PREFIX.sub("", line.text).strip()


def clip(text: str, f: Finding) -> str:
    if len(text) <= CUT:
        return text
    at = max(0, text.find(f.signature.literal) - 200)
    return text[at : at + CUT]


def facts_of(case: Case) -> dict[str, Any]:
    facts: dict[str, Any] = {"lines": sum(t.total_lines for t in case.texts)}
    version = case.torch_version()
    if version is not None:
        facts["torch"] = f"{version[0]}.{version[1]}"
    attempt = next((t.attempt for t in reversed(case.texts) if t.attempt), None)
    if attempt is not None:
        facts["attempt"] = attempt
    steps = [(step.step, step.dialect) for t in case.texts for _, step in t.steps if step.step is not None]
    if steps:
        facts["last_step"], facts["dialect"] = steps[-1]
    if case.missing:
        facts["missing"] = case.missing
    return facts


def fetch(case: Case, record: Record | None) -> tuple[str, ...]:
    """What to read next, most telling first."""
    out: list[str] = []
    for text in case.texts:
        for line in text.lines:
            if match := _ERROR_FILE.search(line.text):
                out.append(f"the rank's own report: {match.group(1)}")
            if (
                record is not None
                and line.no >= record.first - 5
                and (match := _LOG_NAMED.search(line.text)) is not None
            ):
                out.append(f"the log that this text names: {match.group(1)}")
    have = {text.kind for text in case.texts}
    out.append("the attempt's whole log: dflash-ops logs JOB (run/attempts/<n>/log on the machine), not only the pane")
    if "error_json" not in have:
        out.append(
            "the workers' error.json and logs: run/attempts/<n>/errors/*/error.json, run/attempts/<n>/logs/*.log"
        )
    if "kernel" not in have:
        out.append(_KERNEL)
    return tuple(dict.fromkeys(out))[:6]
