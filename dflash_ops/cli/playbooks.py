"""`dflash-ops playbooks list | show KIND | lint [DIR] | test FILE...`: the kinds that triage knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from dflash_ops.errors import DflashError, UsageError
from dflash_ops.playbooks import load_documents, load_file, proof_there, tests_at_hand
from dflash_ops.triage import Triage, compile_playbooks
from dflash_ops.triage.examples import check, examples
from dflash_ops.triage.lint import lint as find_faults

app = typer.Typer(
    help="The kinds of failure that triage knows, as data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FOLDER = typer.Option([], "--playbooks", metavar="DIR", help="A folder of your own kinds; adds or overrides.")


def _documents(folders: list[str], *, bundle: bool = True) -> list[dict[str, Any]]:
    try:
        return load_documents(folders, bundle=bundle)
    except DflashError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


@app.command("list")
def list_kinds(playbooks: list[str] = _FOLDER) -> None:
    """Every kind: id, role, safety grade, family, title."""
    kinds = compile_playbooks(_documents(playbooks)).kinds
    width = max((len(k) for k in kinds), default=0)
    for name in sorted(kinds):
        kind = kinds[name]
        typer.echo(f"{name:<{width}}  {kind.role:<12} {kind.grade}  {kind.family:<16} {kind.title}")


@app.command("show")
def show(kind: str = typer.Argument(..., metavar="KIND"), playbooks: list[str] = _FOLDER) -> None:
    """One kind: what it means, its texts, its remedies."""
    kinds = compile_playbooks(_documents(playbooks)).kinds
    found = kinds.get(kind)
    if found is None:
        near = ", ".join(k for k in sorted(kinds) if kind in k or k in kind) or "see `dflash-ops playbooks list`"
        error = UsageError(
            f"no kind {kind!r}", "the bundled playbooks" + (f" and {', '.join(playbooks)}" if playbooks else ""), near
        )
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code)
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


@app.command("lint")
def lint(
    folder: str = typer.Argument("", metavar="[DIR]"),
    notes: bool = typer.Option(False, "--notes", help="Also what only deserves a look."),
) -> None:
    """Check playbooks: the bundled ones, or those of DIR. Exit 1 where something is wrong."""
    documents = _documents([folder] if folder else [], bundle=not folder)
    faults = find_faults(documents, proof_there if tests_at_hand() else None)
    for fault in faults:
        if fault.error or notes:
            typer.echo(str(fault))
    wrong = sum(f.error for f in faults)
    typer.echo(f"{len(documents)} files, {wrong} errors, {len(faults) - wrong} notes")
    raise typer.Exit(1 if wrong else 0)


@app.command("test")
def test(files: list[Path] = typer.Argument(..., metavar="FILE...", exists=True, dir_okay=False)) -> None:
    """Diagnose every example of the given playbooks, the bundled ones beside them. Exit 1 where one is wrong."""
    try:
        own = [load_file(path) for path in files]
        bundled = [d for d in load_documents() if Path(d["_file"]).resolve() not in {p.resolve() for p in files}]
        triage = Triage([*bundled, *own])
    except DflashError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    wrong = 0
    cases = examples(own)
    for example in cases:
        for fault in check(triage, example):
            wrong += 1
            first = next((line for line in example.text.splitlines() if line.strip()), "")
            typer.echo(f"{example.name}: {fault}\n    example: {first[:100]}")
    typer.echo(f"{len(cases)} examples, {wrong} faults")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    app()
