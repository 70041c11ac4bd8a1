"""A diagnosis for a person: what happened, where it stands, why we think so, what to do. One screen."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from dflash_ops.contracts.diagnosis import Diagnosis, EvidenceLine

_COLOURS = {"cause": "bold red", "match": "red", "frame": "cyan", "wrapper": "yellow", "cut": "yellow"}
_GRADES = {
    "A": "[green]safe to do without asking[/]",
    "B": "[yellow]only where the job's policy allows it[/]",
    "N": "[dim]for you to decide[/]",
    "-": "",
}
_SHORT_EVIDENCE = 4
_SHORT_STEPS = 4


def show(path: str, d: Diagnosis, *, explain: bool = False, console: Console | None = None) -> None:
    """Print one diagnosis; coloured where the console is a terminal. `explain`: all evidence and the whole meaning."""
    out = console or Console(highlight=False)
    for line in lines(path, d, explain=explain):
        if out.is_terminal:  # continuation lines keep their indent
            indent = len(line.plain) - len(line.plain.lstrip())
            out.print(Padding(line[indent:], (0, 0, 0, indent)), highlight=False)
        else:
            out.print(line, highlight=False, soft_wrap=True)


def lines(path: str, d: Diagnosis, *, explain: bool = False) -> list[Text]:
    """The lines of one diagnosis, styled."""
    out: list[Text] = []

    def add(markup: str) -> None:
        out.append(Text.from_markup(markup))

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
        add("[bold]Evidence[/]")
        out.extend(_evidence(item, explain) for item in (d.evidence if explain else d.evidence[:_SHORT_EVIDENCE]))
    if d.meaning and not healthy:
        add("[bold]What it means[/]")
        add("  " + escape(" ".join(d.meaning.split())))
    if d.why:
        add("[bold]Why we think so[/]")
        for reason in d.why if explain else d.why[:3]:
            add(f"  {escape(reason)}")
    if d.remedies:
        add("[bold]What to do[/]")
        for n, step in enumerate(d.remedies if explain else d.remedies[:_SHORT_STEPS], 1):
            condition = f" [dim](when: {escape(step.when)})[/]" if step.when else ""
            add(f"  {n}. {escape(step.text)}{condition}")
            if step.command:
                add(f"     [cyan]$ {escape(step.command)}[/]")
            if explain and _GRADES.get(step.grade):
                add(f"     {step.grade}: {_GRADES[step.grade]}")
    if d.fetch:
        add("[bold]What to read next[/]")
        for place in d.fetch:
            add(f"  - {escape(place)}")
    if d.also and explain:
        add(f"[dim]also seen: {escape(', '.join(d.also))}[/]")
    if d.facts.get("missing"):
        add(f"[yellow]not available: {escape(', '.join(map(str, d.facts['missing'])))}[/]")
    if d.fingerprint and explain:
        add(f"[dim]fingerprint {d.fingerprint}[/]")
    return out


def _evidence(item: EvidenceLine, explain: bool) -> Text:
    limit = 2000 if explain else 200
    text = item.text if len(item.text) <= limit else item.text[:limit] + " ..."
    number = f"{item.number:>7}" if item.number is not None else "      -"
    return Text.assemble("  ", (number, "dim"), "  ", (text, _COLOURS.get(item.role, "")))
