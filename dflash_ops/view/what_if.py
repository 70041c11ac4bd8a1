"""A decision for people: what would be done, why, the exact command, what shows that it helped, how it is undone."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from dflash_ops.contracts import Decision, Verdict, clock
from dflash_ops.view.text import clean

_HEADS = {
    Verdict.NONE: ("green", "nothing would be done"),
    Verdict.WAIT: ("yellow", "this would be done after a pause"),
    Verdict.PROPOSE: ("cyan", "this would be done if the policy said act"),
    Verdict.ACT: ("cyan", "this would be done now"),
    Verdict.HOLD: ("red", "nothing would be done: a person has to look"),
}


def lines(decision: Decision) -> list[Text]:
    """One paragraph after the other; nothing is cut."""
    colour, head = _HEADS[decision.verdict]
    action = f" [bold]{escape(decision.action)}[/] (grade {decision.grade})" if decision.action else ""
    out = [Text.from_markup(f"[bold {colour}]{head}[/]:{action}" if action else f"[bold {colour}]{head}[/]")]

    def section(title: str, rows: list[str]) -> None:
        if rows:
            out.append(Text.from_markup(f"[bold]{title}[/]"))
            out.extend(Text(f"  {clean(row)}") for row in rows)

    section("Reason", [decision.reason])
    section("Evidence", [f"{e.number if e.number is not None else '-'}  {e.text}" for e in decision.evidence])
    section("Exactly", decision.command.splitlines())
    section("It helped if", [decision.verify.text] if decision.verify is not None and decision.verify.text else [])
    section("Undo", [decision.undo] if decision.undo else [])
    if decision.not_before is not None:
        section("Not before", [clock(decision.not_before)])
    section("Passed over", list(decision.skipped))
    return out


def show(title: str, decisions: tuple[Decision, ...]) -> None:
    """Print decisions, first to last; commands stay whole lines, so that they can be copied."""
    out = Console(highlight=False)
    out.print(Text(title), soft_wrap=True)
    for number, decision in enumerate(decisions):
        if number:
            out.print(Text("then:"), soft_wrap=True)
        for line in lines(decision):
            out.print(line, soft_wrap=True)
