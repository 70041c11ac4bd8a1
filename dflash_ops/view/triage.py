"""A diagnosis for a person: what happened, where it stands, why we think so, what to do. One screen."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from dflash_ops.contracts.diagnosis import Diagnosis, EvidenceLine
from dflash_ops.view.text import size

_COLOURS = {"cause": "bold red", "match": "red", "frame": "cyan", "wrapper": "yellow", "cut": "yellow"}
_GRADES = {
    "A": "[green]safe to do without asking[/]",
    "B": "[yellow]only where the job's policy allows it[/]",
    "N": "[dim]for you to decide[/]",
    "-": "",
}
#: What stands before a line's text: later rows of the same line begin under the text.
_HANG = re.compile(r"\s+(?:\d+\.? +|- +)?")
_SHORT_EVIDENCE = 4
_SHORT_STEPS = 4


def show(path: str, d: Diagnosis, *, explain: bool = False, console: Console | None = None) -> None:
    """Print one diagnosis; coloured where the console is a terminal. `explain`: all evidence and the whole meaning."""
    out = console or Console(highlight=False)
    for line in lines(path, d, explain=explain):
        match = _HANG.match(line.plain)
        hang = match.end() if match is not None else 0
        if not out.is_terminal or "     $ " in line.plain[:7] or hang > out.width // 2:
            # A command stays one line, so that it can be copied whole; a file has no width.
            out.print(line, highlight=False, soft_wrap=True)
            continue
        rows = line[hang:].wrap(out, out.width - hang) or [Text("")]
        for n, row in enumerate(rows):
            row.rstrip()
            out.print(Text.assemble(line[:hang] if n == 0 else " " * hang, row), highlight=False, soft_wrap=True)


def lines(path: str, d: Diagnosis, *, explain: bool = False) -> list[Text]:
    """The lines of one diagnosis, styled: the verdict, then sections with an empty line before each."""
    out: list[Text] = []

    def add(markup: str) -> None:
        out.append(Text.from_markup(markup))

    def section(title: str) -> None:
        out.append(Text(""))
        add(f"[bold]{title}[/]")

    healthy = d.kind == "healthy"
    colour = "green" if healthy else ("yellow" if d.kind in ("root_cause_not_shown", "unrecognised_error") else "red")
    add(f"[bold]{escape(path)}[/]: [bold {colour}]{d.kind}[/]  {escape(d.title)}  [dim]({d.confidence:.0%} sure)[/]")
    if not healthy:
        who = [f"rank {d.root_rank}"] if d.root_rank is not None else []
        if d.user_frame:
            who.append(f"your code: [cyan]{escape(d.user_frame)}[/]")
        if d.entity:
            who.append(f"about: {escape(d.entity)}")
        if who:
            add("  " + "   ".join(who))
    if d.evidence:
        section("Evidence")
        shown = d.evidence if explain else d.evidence[:_SHORT_EVIDENCE]
        several = len({item.source for item in shown}) > 1
        out.extend(_evidence(item, explain, several) for item in shown)
    if d.meaning and not healthy:
        section("What it means")
        meaning = " ".join(d.meaning.split())
        add("  " + escape(meaning if explain else _first_sentences(meaning)))
    if d.why:
        section("Why we think so")
        for reason in d.why if explain else d.why[:3]:
            add(f"  {escape(reason)}")
    if d.remedies:
        section("What to do")
        for n, step in enumerate(d.remedies if explain else d.remedies[:_SHORT_STEPS], 1):
            condition = f" [dim](when: {escape(step.when)})[/]" if step.when else ""
            add(f"  {n}. {escape(step.text)}{condition}")
            if step.command:
                add(f"     [cyan]$ {escape(step.command)}[/]")
            if explain and _GRADES.get(step.grade):
                add(f"     {step.grade}: {_GRADES[step.grade]}")
    if d.fetch:
        section("What to read next")
        for place in d.fetch:
            add(f"  - {escape(place)}")
    if d.facts.get("missing"):
        section("[yellow]Not available[/]")
        for name in d.facts["missing"]:
            add(f"  - [yellow]{escape(str(name))}[/]")
    if explain:
        _more(d, add, section)
    return out


def _more(d: Diagnosis, add: Callable[[str], None], section: Callable[[str], None]) -> None:
    """What only `--explain` shows: the sources with what became of each, other kinds, the fingerprint."""
    if d.facts.get("sources"):
        section("What was read")
        for source in d.facts["sources"]:
            if source["status"] == "missing":
                continue
            note = f"; {source['note']}" if source["note"] else ""
            amount = size(source["bytes"]) if source["status"] == "ok" else "nothing"
            add(f"  - {escape(source['name'])}: {amount}{escape(note)}")
    if d.also or d.fingerprint:
        section("For comparison")
        if d.also:
            add(f"  [dim]also seen: {escape(', '.join(d.also))}[/]")
        if d.fingerprint:
            add(f"  [dim]fingerprint {d.fingerprint}[/]")


def _first_sentences(text: str) -> str:
    """The first two sentences: what a person needs before acting; `--explain` has the rest."""
    ends = [m.end() for m in re.finditer(r"[.!?](?= [A-Z])", text)]
    return text[: ends[1]] if len(ends) > 1 else text


def _evidence(item: EvidenceLine, explain: bool, named: bool) -> Text:
    """A line with its number; `named`: also of which text, where there are several."""
    limit = 2000 if explain else 200
    text = item.text if len(item.text) <= limit else item.text[:limit] + " ..."
    number = f"{item.number:>7}" if item.number is not None else "      -"
    source = f"{item.source}: " if named else ""
    return Text.assemble("  ", (number, "dim"), "  ", (source, "dim"), (text, _COLOURS.get(item.role, "")))
