"""`dflash-ops playbooks list | show KIND | lint [DIR] | test FILE...`: the kinds that triage knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import JsonOption, print_json
from dflash_ops.cli.watching import waiting
from dflash_ops.errors import UsageError, did_you_mean
from dflash_ops.playbooks import load_documents, load_file, proof_there, tests_at_hand
from dflash_ops.triage import Triage, compile_playbooks
from dflash_ops.triage.examples import Example, check, examples
from dflash_ops.triage.lint import lint as find_faults
from dflash_ops.triage.playbook import Kind

app = typer.Typer(
    help="The kinds of failure that triage knows, as data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FOLDER = typer.Option([], "--playbooks", metavar="DIR", help="A folder of your own kinds; adds or overrides.")


@app.command("list")
def list_kinds(playbooks: list[str] = _FOLDER, json: JsonOption = False) -> None:
    """Every kind: id, role, safety grade, family, title."""
    kinds = compile_playbooks(load_documents(playbooks)).kinds
    if json:
        print_json({"schema": 1, "kind": "playbooks.list", "kinds": [_head(kinds[name]) for name in sorted(kinds)]})
        return
    width = max((len(k) for k in kinds), default=0)
    for name in sorted(kinds):
        kind = kinds[name]
        typer.echo(f"{name:<{width}}  {kind.role:<12} {kind.grade}  {kind.family:<16} {kind.title}")


@app.command("show")
def show(
    kind: str = typer.Argument(..., metavar="KIND", autocompletion=complete.kinds),
    playbooks: list[str] = _FOLDER,
    json: JsonOption = False,
) -> None:
    """One kind: what it means, its texts, its remedies."""
    kinds = compile_playbooks(load_documents(playbooks)).kinds
    found = kinds.get(kind)
    if found is None:
        raise _unknown(kind, list(kinds), playbooks)
    if json:
        print_json({"schema": 1, "kind": "playbooks.show", **_whole(found)})
        return
    typer.echo(
        f"{found.id}: {found.title}\nrole {found.role}, grade {found.grade}, family {found.family},"
        f" priority {found.priority}"
    )
    typer.echo(f"\n{found.meaning}\n")
    for s in found.signatures:
        typer.echo(
            f"  text   {s.literal}"
            + (f"\n  regex  {s.regex}" if s.regex else "")
            + (f"\n  where  {s.where}" if s.where != "any" else "")
        )
    if found.predicate:
        typer.echo(f"  and    {found.predicate} must hold (docs/playbooks.md)")
    for n, remedy in enumerate(found.remedies, 1):
        typer.echo(
            f"\n  {n}. [{remedy.grade}] {remedy.text}" + (f"\n     $ {remedy.command}" if remedy.command else "")
        )
    if found.references:
        typer.echo("\n  see    " + "\n         ".join(found.references))


def _unknown(kind: str, known: list[str], folders: list[str]) -> UsageError:
    """What to say of a kind that is not there: the nearest one, or those that have the word in them."""
    where = "the bundled playbooks" + (f" and {', '.join(folders)}" if folders else "")
    holding = ", ".join(k for k in sorted(known) if kind in k or k in kind)
    follow = f"kinds of that name: {holding}" if holding else "all of them: dflash-ops playbooks list"
    return UsageError(f"no kind {kind!r}{did_you_mean(kind, known)}", where, follow)


def _head(kind: Kind) -> dict[str, Any]:
    return {"id": kind.id, "role": kind.role, "grade": kind.grade, "family": kind.family, "title": kind.title}


def _whole(kind: Kind) -> dict[str, Any]:
    return {
        **_head(kind),
        "priority": kind.priority,
        "since": kind.since,
        "until": kind.until,
        "meaning": kind.meaning,
        "signatures": [{"literal": s.literal, "regex": s.regex, "where": s.where} for s in kind.signatures],
        "predicate": kind.predicate,
        "remedies": [
            {"action": r.action, "grade": r.grade, "text": r.text, "command": r.command} for r in kind.remedies
        ],
        "references": list(kind.references),
    }


@app.command("lint")
def lint(
    folder: str = typer.Argument("", metavar="[DIR]"),
    notes: bool = typer.Option(False, "--notes", help="Also what only deserves a look."),
    json: JsonOption = False,
) -> None:
    """Check playbooks: the bundled ones, or those of DIR. Exit 1 where something is wrong."""
    documents = load_documents([folder] if folder else [], bundle=not folder)
    faults = find_faults(documents, proof_there if tests_at_hand() else None)
    shown = [fault for fault in faults if fault.error or notes]
    wrong = sum(f.error for f in faults)
    if json:
        said = [{"where": f.where, "what": f.what, "error": f.error} for f in shown]
        count = {"files": len(documents), "errors": wrong, "notes": len(faults) - wrong}
        print_json({"schema": 1, "kind": "playbooks.lint", **count, "faults": said})
    else:
        for fault in shown:
            typer.echo(str(fault))
        typer.echo(f"{len(documents)} files, {wrong} errors, {len(faults) - wrong} notes")
    raise typer.Exit(1 if wrong else 0)


@app.command("test")
def test(
    files: list[Path] = typer.Argument(..., metavar="FILE...", exists=True, dir_okay=False), json: JsonOption = False
) -> None:
    """Diagnose every example of the given playbooks, the bundled ones beside them. Exit 1 where one is wrong."""
    own = [load_file(path) for path in files]
    bundled = [d for d in load_documents() if Path(d["_file"]).resolve() not in {p.resolve() for p in files}]
    triage = Triage([*bundled, *own])
    cases = examples(own)
    with waiting().stage("playbooks test", f"diagnosing {len(cases)} examples"):
        faults = _wrong(triage, cases)
    if json:
        print_json({"schema": 1, "kind": "playbooks.test", "examples": len(cases), "faults": faults})
    else:
        for one in faults:
            typer.echo(f"{one['example']}: {one['what']}\n    example: {one['text'][:100]}")
        typer.echo(f"{len(cases)} examples, {len(faults)} faults")
    raise typer.Exit(1 if faults else 0)


def _wrong(triage: Triage, cases: list[Example]) -> list[dict[str, str]]:
    """Each example that is diagnosed as something else."""
    return [
        {"example": example.name, "what": fault, "text": next((x for x in example.text.splitlines() if x.strip()), "")}
        for example in cases
        for fault in check(triage, example)
    ]
