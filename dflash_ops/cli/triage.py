"""`dflash-ops triage [PATH...|-] | --job JOB`: name the cause in any text, or in all the texts of a job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import InventoryOption, error_json, print_json, render_error
from dflash_ops.cli.watching import asking, waiting
from dflash_ops.collect.files import Found, ReadError, chunks, expand
from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.errors import DflashError, UsageError
from dflash_ops.playbooks import load_documents
from dflash_ops.triage import Source, Triage

if TYPE_CHECKING:
    from dflash_ops.client import JobClient
    from dflash_ops.collect.job import Examined
    from dflash_ops.collect.nodes import Across
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.view.stages import Stage


def command(
    paths: list[str] = typer.Argument(
        None, metavar="[PATH...|-]", help="Logs, folders of logs, or - for standard input; gz and zst too."
    ),
    job: str | None = typer.Option(
        None,
        "--job",
        metavar="JOB",
        help="Instead of paths: all texts of this job's newest attempt, and the kernel's.",
        autocompletion=complete.jobs,
    ),
    attempt: int | None = typer.Option(
        None,
        "--attempt",
        metavar="N",
        min=1,
        help="With --job: an earlier attempt.",
        autocompletion=complete.attempts,
    ),
    node: int | None = typer.Option(None, "--node", metavar="K", min=0, help="With --job: one node of several."),
    mib: float = typer.Option(16.0, "--mib", metavar="N", min=0.1, help="With --job: how much of the log's end."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
    what_if: bool = typer.Option(
        False, "--what-if", help="With --job: what the supervisor would do now, and exactly how. Does nothing."
    ),
    explain: bool = typer.Option(False, "--explain", help="All evidence, what else was seen, and the whole meaning."),
    playbooks: list[str] = typer.Option(
        [], "--playbooks", metavar="DIR", help="A folder of your own kinds; adds or overrides."
    ),
    inventory: InventoryOption = None,
) -> None:
    """Name the cause of a crash: the kind, the line, the rank, your frame, what it means and what to do."""
    if job is not None:
        if paths:
            raise UsageError(
                "--job and paths exclude each other",
                "dflash-ops triage",
                f"give one of them: dflash-ops triage --job {job}, or: dflash-ops triage {' '.join(paths)}",
            )
        raise typer.Exit(
            run_job(
                job, inventory, attempt=attempt, node=node, mib=mib, as_json=as_json, explain=explain,
                playbooks=playbooks, what_if=what_if,
            )
        )  # fmt: skip
    given = {"--attempt": attempt is not None, "--node": node is not None, "--what-if": what_if}
    if any(given.values()) or inventory is not None:
        option = next((name for name, there in given.items() if there), "--inventory")
        raise UsageError(f"{option} needs --job", "dflash-ops triage", "add --job JOB")
    if not paths and sys.stdin.isatty():
        raise UsageError(
            "nothing to read", "no path, and standard input is a terminal", "name a log, pipe one in, or give --job JOB"
        )
    raise typer.Exit(run(paths or ["-"], as_json=as_json, explain=explain, playbooks=playbooks))


def run_job(
    name: str,
    inventory: Path | None,
    *,
    attempt: int | None = None,
    node: int | None = None,
    mib: float = 16.0,
    as_json: bool = False,
    explain: bool = False,
    playbooks: list[str] | None = None,
    what_if: bool = False,
) -> int:
    """Answer for a job of the inventory, or for one of its nodes; of several nodes the first cause across them.

    Raises:
        UsageError: `what_if` of an earlier attempt, or of several nodes at once.
        DflashError: no such job, never deployed, nothing started, the machine cannot be asked.
    """
    from dflash_ops.cli.common import load_inventory
    from dflash_ops.client import JobClient
    from dflash_ops.collect.job import examine
    from dflash_ops.collect.nodes import examine_nodes
    from dflash_ops.hosts.factory import Hosts

    loaded = load_inventory(inventory)
    job = loaded.job(name).at_node(node)
    if what_if and (attempt is not None or job.nodes):
        fix = f"name one: --node 0 ... --node {len(job.nodes) - 1}" if job.nodes else "leave --attempt out"
        raise UsageError("what would be done is asked of the newest attempt of one machine", "--what-if", fix)
    hosts = Hosts(loaded)
    clients = [JobClient(hosts[p.host], p, loaded.host_of(p).python) for p in job.parts]
    try:
        with waiting().stage("triage", f"fetching logs, error files and the kernel's words; {asking([job])}"):
            if job.nodes:
                across = examine_nodes(clients, loaded, attempt=attempt, playbooks=playbooks or (), mib=mib)
            else:
                seen = examine(clients[0], loaded, attempt=attempt, playbooks=playbooks or (), mib=mib)
        if what_if:
            return _what_if(clients[0], loaded, seen, tuple(playbooks or ()), as_json=as_json)
    finally:
        hosts.close()
    if job.nodes:
        return _across(job, across, as_json=as_json, explain=explain)
    if as_json:
        print_json(row(job.name, seen.diagnosis, job=job.name, attempt=seen.attempt))
    else:
        from dflash_ops.view.triage import show

        still = ", still running" if seen.alive else ""
        place = f", {job.label}" if job.node is not None else ""
        show(f"{job.name}{place}, attempt {seen.attempt}{still}", seen.diagnosis, explain=explain)
    return 0


def _what_if(client: JobClient, loaded: Inventory, seen: Examined, playbooks: tuple[str, ...], *, as_json: bool) -> int:
    """Print what the supervisor would do."""
    from dflash_ops.collect.what_if import what_if
    from dflash_ops.contracts import to_dict

    decisions = what_if(client, loaded, seen, playbooks)
    if as_json:
        said = {"schema": 1, "kind": "what_if", "job": client.job.name, "attempt": seen.attempt}
        print_json({**said, "decisions": to_dict(decisions)})
    else:
        from dflash_ops.view.what_if import show

        mode = "acts" if client.job.policy.mode == "act" else "only observes"
        show(f"{client.job.name}, attempt {seen.attempt}: {seen.diagnosis.kind}; its policy {mode}", decisions)
    return 0


def _across(job: Job, across: Across, *, as_json: bool, explain: bool) -> int:
    """Print the first cause of a job on several machines; the exit code of a node that could not be asked, or 0."""
    chosen = across.chosen
    if as_json:
        said = row(job.name, across.diagnosis, job=job.name, attempt=chosen.attempt)
        cases = {case.rank: case for case in across.cases}
        nodes = []
        for rank, part in enumerate(job.nodes):
            case, error = cases.get(rank), across.errors.get(rank)
            nodes.append(
                {
                    "node": rank,
                    "host": part.host,
                    "attempt": case.attempt if case else None,
                    "alive": case.alive if case else None,
                    "class": case.diagnosis.kind if case else None,
                    "root_exception": case.diagnosis.root_exception if case else None,
                    "failed": case.failed if case else None,
                    "clock_s": case.clock_s if case else None,
                    "unsure_s": case.unsure_s if case else None,
                    "error": error.what if error else None,
                }
            )
        print_json({**said, "node": chosen.rank, "nodes": nodes})
    else:
        from dflash_ops.view.triage import show

        still = ", still running" if chosen.alive else ""
        show(f"{job.name}, {chosen.label}, attempt {chosen.attempt}{still}", across.diagnosis, explain=explain)
    for rank, error in across.errors.items():
        print(f"error: {job.nodes[rank].label}: {error}", file=sys.stderr)
    return max((error.exit_code for error in across.errors.values()), default=0)


def run(paths: list[str], *, as_json: bool, explain: bool = False, playbooks: list[str] | None = None) -> int:
    """Answer for each path; 0 if all could be read, else the exit code of the first error (said on stderr).

    Raises:
        DflashError: a playbook cannot be used.
    """
    triage = Triage(load_documents(playbooks or []))
    found, missing = expand(paths)
    errors: list[DflashError] = []
    answered = False
    for item in found:
        try:
            with waiting().stage("triage", f"reading {item.name}") as stage:
                diagnosis = triage.diagnose([Source(item.name, _counted(item, stage), item.kind)])
        except ReadError as error:
            render_error(error, sys.stderr)
            errors.append(error)
            continue
        if as_json:
            print_json(row(item.name, diagnosis))
        else:
            from dflash_ops.view.triage import show  # rich is slow to import and JSON does not need it

            if answered:
                print()
            show(item.name, diagnosis, explain=explain)
        answered = True
    for fault in missing:
        render_error(fault, sys.stderr)
    errors += missing
    if as_json and errors and not answered:
        print_json(error_json(errors[0], errors[0].exit_code))
    return errors[0].exit_code if errors else 0


def _counted(item: Found, stage: Stage) -> Iterator[bytes]:
    """The bytes of a source, told how far they are where its size says that; a packed one is read to an unknown end."""
    total = done = 0
    if item.path is not None and item.path.suffix not in (".gz", ".zst"):
        with contextlib.suppress(OSError):  # whoever reads it says what is wrong
            total = item.path.stat().st_size
    for piece in chunks(item):
        yield piece
        done += len(piece)
        if total:
            stage.bytes(min(done, total), total)


def row(path: str, d: Diagnosis, *, job: str | None = None, attempt: int | None = None) -> dict[str, Any]:
    """The JSON line of one path, or of a job's attempt (docs/contracts.md, `triage --json`)."""
    return {
        "schema": d.schema,
        "kind": "triage",
        "path": path,
        "job": job,
        "attempt": attempt,
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
