"""Workers and cards of the watch: each in full, two a line, folded, or all in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from rich.text import Text

from dflash_ops.contracts import GpuInfo, WorkerShares
from dflash_ops.view.text import counted
from dflash_ops.view.watch_draw import (
    DIM,
    SHARE_NAMES,
    SHARE_STYLES,
    Pen,
    bar,
    cut,
    gib,
    mean,
    number,
    percent,
    stacked,
    tame,
)  # fmt: skip
from dflash_ops.view.watch_fit import Block, Form, block

#: What nvidia-smi does not tell.
NA = "NA"

#: Words for why a card's clocks are held down; others are said as nvidia-smi says them.
THROTTLE: Mapping[str, str] = {
    "sw_power_cap": "power cap",
    "sw_thermal_slowdown": "heat",
    "hw_thermal_slowdown": "heat (hw)",
    "hw_slowdown": "slowed (hw)",
    "hw_power_brake_slowdown": "power brake",
    "applications_clocks_setting": "set clocks",
    "sync_boost": "sync boost",
    "display_clock_setting": "display",
}
#: No reason to worry: nothing runs there.
_IDLE = frozenset({"gpu_idle", "none"})

#: The kinds of block that are folded, with the ranks at which each form gives way (dflash_ops.view.watch_fit).
FULL, PAIRS, FEWER, ONE = 12, 44, 58, 74


def several(
    heads: tuple[Text, Text],
    full: Sequence[Text],
    pairs: Sequence[Text] | None,
    summary: Sequence[Text],
    *,
    tail: Sequence[Text] = (),
    lift: int = 0,
    indent: int = 0,
) -> Block:
    """A block of many alike: in full, in pairs, ever fewer of them with "+5 more", all in one line, gone.

    Args:
        heads: above the full form and above pairs.
        pairs: the short form of each where two stand on a line already; None where the screen is too narrow.
        tail: what is below all in full. lift: is added to the ranks. indent: spaces before "+5 more".
    """
    forms: list[Form] = [(FULL + lift, [heads[0], *full, *tail])]
    rows, each, head = (full, 1, heads[0]) if pairs is None else (pairs, 2, heads[1])
    count = len(full)
    if pairs is not None and len(pairs) < len(full):
        forms.append((PAIRS + lift, [head, *pairs]))
    for shown in range(len(rows) - 1, 1, -1):
        more = Text(f"{' ' * indent}+{count - (shown - 1) * each} more", DIM)
        forms.append((PAIRS + lift + 1 if shown > 3 else FEWER + lift, [head, *rows[: shown - 1], more]))
    if len(summary) < 1 + len(full):
        forms.append((ONE + lift, summary))
    return block(*forms, column=2)


def paired(cells: Sequence[Text], width: int) -> list[Text] | None:
    """Two a line, down the left side first; None where two do not fit."""
    half = (width - 2) // 2
    if any(c.cell_len > half for c in cells):
        return None
    lines = (len(cells) + 1) // 2
    out = []
    for n in range(lines):
        line = cells[n].copy()
        if n + lines < len(cells):
            line.append(" " * (half + 2 - line.cell_len))
            line.append_text(cells[n + lines])
        out.append(line)
    return out


def workers(found: Mapping[str, WorkerShares], width: int, pen: Pen) -> Block | None:
    """Who waits, computes, copies and syncs for how much of its time."""
    if not found:
        return None
    label = max(8, min(14, max(len(tame(name, pen)) for name in found)))
    cells = max(8, min(40, width - label - 44))
    legend = Text("workers".ljust(label + 1), DIM)
    for name, mark, style in _legend(pen):
        legend.append_text(Text.assemble((mark, style), (f" {name}  ", DIM)))
    head = Text("workers".ljust(label + cells + 1), DIM)
    for name, mark, style in _legend(pen):
        head.append_text(Text.assemble(" " * (8 - len(name)), (mark, style), (f" {name}", DIM)))
    head.append(" %", DIM)
    if head.cell_len > width:
        head = legend

    def one(name: str, w: WorkerShares) -> Text:
        line = Text(cut(tame(name, pen), label, pen).ljust(label + 1))
        line.append_text(stacked(_values(w), cells, pen))
        line.append("".join(f"{percent(v, pen):>10}" for v in _values(w)))
        if w.life:
            line.append(f"  life {w.life}", "yellow")
        return line

    def short(name: str, w: WorkerShares) -> Text:
        line = Text(cut(tame(name, pen), label, pen).ljust(label + 1))
        line.append_text(stacked(_values(w), max(6, (width - 2) // 2 - label - 7), pen))
        line.append(f" {percent(w.compute, pen)} %")
        return line

    full = [one(*item) for item in found.items()]
    pairs = paired([short(*item) for item in found.items()], width) if len(found) > 2 else None
    return several((head, legend), full, pairs, list(_roles(found, width, pen)), lift=2, indent=label + 1)


def _legend(pen: Pen) -> list[tuple[str, str, str]]:
    return list(zip(SHARE_NAMES, pen.shares, SHARE_STYLES, strict=True))


def _values(w: WorkerShares) -> list[float | None]:
    return [getattr(w, name) for name in SHARE_NAMES]


def _roles(found: Mapping[str, WorkerShares], width: int, pen: Pen) -> Iterable[Text]:
    """All targets in one line, all drafters in one."""

    def role(name: str) -> str:
        return name.rsplit("/", 1)[-1].rstrip("0123456789")

    for kind, group in groupby(sorted(found, key=role), key=role):
        mine = [_values(found[name]) for name in group]
        means = [mean(v) for v in zip(*mine, strict=True)]
        line = Text(cut(f"{len(mine)} {tame(kind, pen)}s", 12, pen).ljust(13))
        line.append_text(stacked(means, max(8, min(24, width - 58)), pen))
        for name, value in zip(SHARE_NAMES, means, strict=True):
            line.append(f" {name} ", DIM)
            line.append(percent(value, pen))
        line.append(" %")
        yield line


def gpus(cards: Sequence[tuple[str, GpuInfo]], note: str, width: int, pen: Pen) -> Block | None:
    """The cards, each with its label (`0`, or `1/0` on node 1)."""
    if not cards:
        return block((36, [Text.assemble(("GPUs     ", DIM), tame(note, pen))]), column=2) if note else None
    label = max(3, max(len(name) for name, _ in cards))
    head = Text(f"{'GPU':<{label}}  {'util %':<14}  memory GiB    C   power W    ECC", DIM)
    if width >= label + 75:
        head.append("  why slow    who holds memory, GiB")
    small = Text("GPUs", DIM)
    small.append("   T: clocks held down   E: uncorrected memory errors" if width >= 60 else "", DIM)
    full = [_card(name.ljust(label), card, width, pen) for name, card in cards]
    pairs = (
        paired([_short_card(name.ljust(label), card, pen) for name, card in cards], width) if len(cards) > 2 else None
    )
    tail = [Text(f"{'':<{label}}  {tame(note, pen)}", DIM)] if note else []
    return several((head, small), full, pairs, [_all_cards([c for _, c in cards], pen)], tail=tail, indent=label + 2)


def _card(label: str, g: GpuInfo, width: int, pen: Pen) -> Text:
    bad = bool(g.ecc_uncorrected)
    line = Text.assemble(label, "  ", bar(g.util, 10, pen), " ", _na(g.util, lambda v: percent(v, pen), 3))
    line.append(f"  {_memory(g, pen):<9}")
    line.append(f"  {_na(g.temp_c, lambda v: number(v, 0, 3, pen), 3)}")
    line.append(f"  {_power(g, pen)}")
    line.append(f"  {_ecc(g):>5}", "bold red" if bad else "")
    why = tame(", ".join(throttled(g)), pen)
    if width - line.cell_len >= 14 or why:
        line.append(f"  {why:<10}", "yellow")
    room = width - line.cell_len - 2
    if room >= 12 and (held := _holders(g, pen)):
        line.append(f"  {cut(held, room, pen)}", DIM)
    return line


def _short_card(label: str, g: GpuInfo, pen: Pen) -> Text:
    flags = "".join(("T" if throttled(g) else " ", "E" if g.ecc_uncorrected else " "))
    line = Text(f"{label} {_na(g.util, lambda v: percent(v, pen), 3)} % {_memory(g, pen) + ' G':<11}")
    line.append(
        f" {_na(g.temp_c, lambda v: number(v, 0, 3, pen), 3)} C {_na(g.power_w, lambda v: number(v, 0, 4, pen), 4)} W"
    )
    line.append(f" {flags}", "bold red" if "E" in flags else "yellow")
    return line


def _all_cards(cards: Sequence[GpuInfo], pen: Pen) -> Text:
    used = [g.mem_used for g in cards if g.mem_used is not None]
    hot = [g.temp_c for g in cards if g.temp_c is not None]
    line = Text.assemble((f"{counted(len(cards), 'GPU')}  util ", DIM))
    line.append(_na(mean(g.util for g in cards), lambda v: percent(v, pen), 3))
    line.append(f" %  memory at most {_na(max(used, default=None), lambda v: gib(v, pen), 4)} GiB")
    line.append(f"  hottest {_na(max(hot, default=None), lambda v: number(v, 0, 3, pen), 3)} C")
    slowed, failing = sum(bool(throttled(g)) for g in cards), sum(bool(g.ecc_uncorrected) for g in cards)
    if slowed:
        line.append(f"  {slowed} slowed", "yellow")
    if failing:
        line.append(f"  {failing} with ECC errors", "bold red")
    return line


def throttled(g: GpuInfo) -> list[str]:
    """Why its clocks are held down, in words; that nothing runs there is none."""
    return [THROTTLE.get(why, why.replace("_", " ")) for why in g.throttle or () if why not in _IDLE]


def _na(value: float | None, say: Callable[[float], str], width: int) -> str:
    return NA.rjust(width) if value is None else say(value)


def _memory(g: GpuInfo, pen: Pen) -> str:
    used, total = (_na(v, lambda v: gib(v, pen), 4) for v in (g.mem_used, g.mem_total))
    return f"{used}/{total.strip()}"


def _power(g: GpuInfo, pen: Pen) -> str:
    now = _na(g.power_w, lambda v: number(v, 0, 4, pen), 4)
    limit = _na(g.power_limit_w, lambda v: number(v, 0, 4, pen).strip(), 2)
    return f"{now}/{limit:<4}"


def _ecc(g: GpuInfo) -> str:
    """Corrected and uncorrected memory errors."""
    if g.ecc_corrected is None and g.ecc_uncorrected is None:
        return NA
    return "/".join(NA if v is None else str(v) for v in (g.ecc_corrected, g.ecc_uncorrected))


def _holders(g: GpuInfo, pen: Pen) -> str:
    """`target0 118, python3 (977) 2`: who holds memory, in GiB."""
    said = []
    for h in g.holders or ():
        who = h.worker or f"{h.name or '?'} ({h.pid})"
        said.append(tame(f"{who} {_na(h.bytes, lambda v: gib(v, pen).strip(), 2)}", pen))
    return ", ".join(said)
