"""Incidents for people: one line each, or one whole with its time line."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dflash_ops.contracts import Deed, Incident, IncidentState, clock
from dflash_ops.view.text import DASH, clean, counted, duration

_COLOURS = {
    IncidentState.OPEN: "yellow",
    IncidentState.ACTING: "cyan",
    IncidentState.WAITING: "cyan",
    IncidentState.PROPOSED: "yellow",
    IncidentState.HELD: "bold red",
    IncidentState.STOPPED: "bright_black",
    IncidentState.REPAIRED: "green",
    IncidentState.PASSED: "green",
}
_MEANS = {
    IncidentState.OPEN: "nothing was done about it yet",
    IncidentState.ACTING: "something is being done",
    IncidentState.WAITING: "something was done; no step has shown yet that it helped",
    IncidentState.PROPOSED: "the policy only observes",
    IncidentState.HELD: "a person has to look",
    IncidentState.STOPPED: "a person stopped the job",
    IncidentState.REPAIRED: "the supervisor repaired it",
    IncidentState.PASSED: "over, by no action of the supervisor",
}


def table(found: Sequence[Incident]) -> Table:
    """One row each, oldest first."""
    out = Table(box=None, pad_edge=False, header_style="bright_black")
    for head in ("no", "when", "attempt", "what", "done", "", "steps lost", "time"):
        out.add_column(head, no_wrap=head not in ("what", "done"), overflow="fold")
    for one in found:
        done = [deed.action for deed in one.deeds if deed.action != "dump_stacks"]
        out.add_row(
            str(one.number),
            clock(one.t),
            ", ".join(map(str, one.attempts)),
            clean(one.kind or "not diagnosed"),
            ", ".join(done) or "-",
            Text(one.state.value, style=_COLOURS[one.state]),
            DASH if one.lost_steps is None else str(one.lost_steps),
            duration(one.down_s),
        )
    return out


def whole(one: Incident, job: str) -> list[Text]:
    """Everything about one, as lines; nothing is cut."""
    head = f"{job}, incident {one.number}: {one.title or one.kind or 'not diagnosed'}"
    out = [Text(clean(head), style="bold")]
    out.append(Text.assemble((one.state.value, _COLOURS[one.state]), f": {_MEANS[one.state]}"))

    def section(title: str, rows: Sequence[str]) -> None:
        if rows:
            out.append(Text(title, style="bold"))
            out.extend(Text(f"  {clean(row)}".rstrip()) for row in rows)

    section("Time line (UTC)", [f"{_clock(x.t)}  {_who(x.who)}  {x.text}" for x in one.lines])
    section("Evidence", [f"{e.number if e.number is not None else '-'}  {e.text}" for e in one.evidence])
    section("Diagnosis", _diagnosis(one))
    for number, deed in enumerate(one.deeds, 1):
        section(f"Done {number}: {deed.action}", _deed(deed))
    section("A person was told", one.told.splitlines())
    section("Proof", _proof(one))
    section("Cost", _cost(one))
    return out


def _diagnosis(one: Incident) -> list[str]:
    if not one.kind:
        return ["none yet"]
    certain = f", confidence {one.confidence:.2f}" if one.confidence is not None else ""
    rows = [f"{one.kind}{certain}, fingerprint {one.fingerprint or DASH}"]
    rows += [one.root_exception] if one.root_exception else []
    rows += [f"about: {one.entity}"] if one.entity else []
    return rows


def _deed(deed: Deed) -> list[str]:
    rows = [f"why: {deed.reason}"] if deed.reason else []
    rows += deed.command.splitlines()
    rows += [f"undo: {deed.undo}"] if deed.undo else []
    begun = f", attempt {deed.started}" if deed.started is not None else ""
    return [*rows, f"outcome: {deed.outcome}{begun}" + (f" ({deed.detail})" if deed.detail else "")]


def _proof(one: Incident) -> list[str]:
    if one.proof is None:
        return ["none yet"]
    reached = f"reached step {one.proof.step}" if one.proof.step is not None else "finished"
    struck = f"it had struck at step {one.step}" if one.step is not None else "it had struck before the first step"
    return [f"attempt {one.proof.attempt} {reached}; {struck}"]


def _cost(one: Incident) -> list[str]:
    if one.proof is None:
        return ["not known before it is over"]
    if one.lost_steps is None:
        steps = "steps done again: not known (the trainer does not say what it went on from)"
    else:
        since = f", from step {one.resumed} on" if one.resumed is not None and one.lost_steps else ""
        steps = f"{counted(one.lost_steps, 'step')} done again{since}"
    return [steps, f"{duration(one.down_s)} from its first strike to a step beyond it"]


def _clock(t: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.gmtime(t))


def _who(actor: str) -> str:
    return actor.ljust(10)
