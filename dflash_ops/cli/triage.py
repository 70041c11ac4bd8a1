"""`dflash-ops triage [PATH...|-] [--json] [--explain] [--playbooks DIR]`: name the cause in any text."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from dflash_ops.collect.files import ReadError, chunks, expand
from dflash_ops.collect.playbooks import load_documents
from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.errors import DflashError, UsageError
from dflash_ops.triage import Source, Triage


def command(
    paths: list[str] = typer.Argument(
        None, metavar="[PATH...|-]", help="Logs, folders of logs, or - for standard input; gz and zst too."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
    explain: bool = typer.Option(False, "--explain", help="All evidence, what else was seen, and the whole meaning."),
    playbooks: list[str] = typer.Option(
        [], "--playbooks", metavar="DIR", help="A folder of your own kinds; adds or overrides."
    ),
) -> None:
    """Name the cause of a crash: the kind, the line, the rank, your frame, what it means and what to do."""
    if not paths and sys.stdin.isatty():
        error = UsageError("nothing to read", "no path, and standard input is a terminal", "name a log, or pipe one in")
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code)
    raise typer.Exit(run(paths or ["-"], as_json=as_json, explain=explain, playbooks=playbooks))


def run(paths: list[str], *, as_json: bool, explain: bool = False, playbooks: list[str] | None = None) -> int:
    """Answer for each path; 0 if all could be read, else the exit code of the first error (said on stderr)."""
    code = 0
    try:
        triage = Triage(load_documents(playbooks or []))
    except DflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    found, errors = expand(paths)
    for item in found:
        try:
            diagnosis = triage.diagnose([Source(item.name, chunks(item), item.kind)])
        except ReadError as error:
            print(f"error: {error}", file=sys.stderr)
            code = code or error.exit_code
            continue
        if as_json:
            print(json.dumps(row(item.name, diagnosis), ensure_ascii=False))
        else:
            from dflash_ops.view.triage import show  # rich is slow to import and JSON does not need it

            show(item.name, diagnosis, explain=explain)
    for missing in errors:
        print(f"error: {missing}", file=sys.stderr)
        code = code or missing.exit_code
    return code


def row(path: str, d: Diagnosis) -> dict[str, Any]:
    """The JSON line of one path (docs/contracts.md, `triage --json`)."""
    return {
        "schema": d.schema,
        "path": path,
        "class": d.kind,
        "title": d.title,
        "root_exception": d.root_exception,
        "root_rank": d.root_rank,
        "user_frame": d.user_frame,
        "confidence": d.confidence,
        "fingerprint": d.fingerprint,
        "entity": d.entity,
        "meaning": d.meaning,
        "evidence": [{"number": e.number, "text": e.text, "source": e.source, "role": e.role} for e in d.evidence],
        "remedies": [
            {
                "action": r.action,
                "grade": r.grade,
                "text": r.text,
                "command": r.command,
                "when": r.when,
                "limit": r.limit,
                "proven": r.proven,
            }
            for r in d.remedies
        ],
        "auto_safe": d.auto_safe,
        "also": list(d.also),
        "fetch": list(d.fetch),
        "why": list(d.why),
        "facts": d.facts,
    }


if __name__ == "__main__":
    typer.run(command)
