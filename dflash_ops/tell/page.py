"""A report as one html file: no script, no request to anywhere, light and dark, good on paper. Pure.

The rule here: every text that is not ours is escaped in one place (`_e`), and what is not known is a dash.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_ops import __version__
from dflash_ops.resident.thin import SHARES
from dflash_ops.tell import svg
from dflash_ops.tell.style import CSS
from dflash_ops.tell.svg import At, Bar, Curve, Mark, Slab
from dflash_ops.view.text import DASH, counted, duration, fixed, ktok, percent, size

#: Workers that have a picture each; of more their roles have one.
_WORKERS = 16

#: Incidents whose time line is told line by line, and lines of each.
_TOLD = 40
_LINES = 60

#: Curves of which every point is drawn, however far off.
_WHOLE = frozenset({"lr", "acc", "ring_ready"})

_CURVES = (
    ("Loss", (("loss", "loss", 1),)),
    ("Tau: accepted tokens a forward", (("tau", "tau", 1),)),
    ("Tokens a second", (("block_tok_s", "block", 1), ("ctx_tok_s", "context", 2))),
    ("Rate, as the trainer says", (("rate", "rate", 1),)),
    ("Learning rate", (("lr", "lr", 1),)),
    ("Accuracy", (("acc", "acc", 1),)),
    ("Gradient norm", (("grad_norm", "grad_norm", 1),)),
    ("Ring: slots that wait", (("ring_ready", "ready", 1),)),
)  # fmt: skip


def _e(value: object) -> str:
    """Anything as text for html."""
    return svg.plain("" if value is None else str(value))


def _when(t: float | None) -> str:
    if t is None or not 0 <= t < 253e9:
        return DASH
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`heads` that begin with `#` are of numbers, with `=` of long texts; cells are html."""
    if not rows:
        return ""
    kinds = [{"#": ' class="n"', "=": ' class="w"'}.get(head[0], "") for head in heads]
    top = "".join(f"<th{kind}>{_e(head.lstrip('#='))}</th>" for head, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table>"


_TONES = {"finished": "good", "stepping": "good", "crashed": "bad", "hung": "bad", "held": "bad", "open": "warn"}


def _toned(state: str) -> str:
    return f'<span class="{_TONES.get(state, "")}">{_e(state)}</span>'


def page(report: Mapping[str, Any]) -> str:
    """The whole file.

    Args:
        report: as `report.build` makes it, and `report --json` prints it.
    """
    title = f"{report['job']}: report of a run"
    body = "\n".join(
        part for part in (_head(report), _attempts(report), _curves(report), _workers(report), _line(report),
                          _incidents(report), _config(report), _gpus(report)) if part
    )  # fmt: skip
    made = f"made {_when(report['made'])} UTC by dflash-ops {__version__}; times are UTC, by the job's machine"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_e(title)}</title>\n<style>{CSS}</style></head>\n<body>\n{body}\n"
        f'<p class="note">{_e(made)}</p>\n</body></html>\n'
    )


def _head(report: Mapping[str, Any]) -> str:
    attempts, state = report["attempts"], report["state"]
    newest = attempts[-1]
    last = newest["course"].get("last") or {}
    now = state["state"] if state is not None else newest["state"]
    detail = state["detail"] if state is not None else newest["detail"]
    ran = [a["duration_s"] for a in attempts if a["duration_s"] is not None]
    step = _count(last.get("step")) + (f" of {_count(last.get('total'))}" if last.get("total") else "")
    point = newest["points"][-1] if newest["points"] else {}
    facts = [
        (step, "step"),
        (_count(last.get("samples")), "samples"),
        (fixed(last.get("epoch"), 2), "epoch"),
        (fixed(_mean(point, "loss"), 4), "loss, at the end"),
        (fixed(_mean(point, "tau"), 2), "tau, at the end"),
        (ktok(_mean(point, "block_tok_s")), "block Ktok/s"),
        (duration(sum(ran)) if ran else DASH, "ran"),
        (str(len(report["incidents"])), "incident" if len(report["incidents"]) == 1 else "incidents"),
    ]
    told = "".join(f"<div><b>{_e(value)}</b><span>{_e(name)}</span></div>" for value, name in facts if value != DASH)
    of = (
        f"attempt {newest['attempt']}"
        if len(attempts) == 1
        else f"attempts {attempts[0]['attempt']} to {newest['attempt']}"
    )
    left = report["attempts_there"] - len(attempts)
    more = f" ({counted(left, 'other attempt')} not shown)" if left else ""
    notes = []
    if report["torn_lines"]:
        notes.append(f"{counted(report['torn_lines'], 'line')} of the journal cannot be read.")
    return (
        f"<h1>{_e(report['job'])}</h1>\n<p>{_toned(now)}{': ' if detail else ''}{_e(detail)}</p>\n"
        f'<p class="dim">on {_e(report["host"])}, <code>{_e(report["root"])}</code>; {_e(of)}{_e(more)}; '
        f"release <code>{_e(newest['release'] or DASH)}</code></p>\n"
        f'<div class="facts">{told}</div>' + "".join(f'\n<p class="warn">{_e(n)}</p>' for n in notes)
    )


def _count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def _mean(point: Mapping[str, Any], key: str) -> float | None:
    found = point.get(key)
    return found[0] if found else None


def _attempts(report: Mapping[str, Any]) -> str:
    rows = []
    for one in report["attempts"]:
        points = one["points"]
        steps = f"{points[0]['step'][0]} to {points[-1]['step'][1]}" if points else DASH
        why = "; ".join(filter(None, [one["reason"], *(f"{k}={v}" for k, v in one["overrides"].items())]))
        rows.append(
            [str(one["attempt"]), _toned(one["state"]), _e(_when(one["started"])), _e(duration(one["duration_s"])),
             _e(steps), f"<code>{_e(one['release'] or DASH)}</code>",
             _e(one["detail"]) + (f'<br><span class="dim">{_e(why)}</span>' if why else "")]
        )  # fmt: skip
    heads = ("#attempt", "state", "started", "#ran", "#steps", "release", "=how it ended, why it was started")
    notes = [note for one in report["attempts"] for note in _notes(one, len(report["attempts"]) > 1)]
    return "<h2>Attempts</h2>\n" + _table(heads, rows) + "".join(f'<p class="note">{_e(note)}</p>\n' for note in notes)


def _notes(one: Mapping[str, Any], several: bool) -> Iterator[str]:
    """What a reader of the curves must know of this attempt's lines."""
    course = one["course"]
    who = f"Attempt {one['attempt']}: " if several else ""
    if course["fault"]:
        yield f"{who}its lines could not be read: {course['fault']}."
    elif not course["lines"]:
        yield f"{who}it told no step."
    for key, found in course["not_finite"].items():
        yield (
            f"{who}{key} is no finite number in {counted(found['count'], 'line')} of {course['lines']}, first at step "
            f"{found['step']} (×); there is no curve where all lines of a point are so."
        )
    if course["lives_count"]:
        yield f"{who}workers started anew, or went back to an earlier step, {counted(course['lives_count'], 'time')}."
    if course["gaps_count"]:
        longest = max(course["gaps"], key=lambda gap: gap["seconds"])
        where = f"steps {longest['steps'][0]} to {longest['steps'][1]}"
        times = counted(course["gaps_count"], "time")
        yield f"{who}no line came for long {times}; the longest {duration(longest['seconds'])}, {where}."
    if course["bad_lines"]:
        yield f"{who}{counted(course['bad_lines'], 'line')} could not be understood."
    if course["read"] < 1.0:
        yield f"{who}the file is so large that {percent(course['read'])} of it was read, in evenly spaced parts."
    for text in one["damaged"]:
        yield f"{who}damaged: {text}"


def _parts(points: Sequence[Mapping[str, Any]], key: str) -> list[list[At]]:
    """Stretches of points that are joined: a cut, or a point without this number, ends one."""
    parts: list[list[At]] = [[]]
    for point in points:
        found = point.get(key)
        if (point.get("cut") or found is None) and parts[-1]:
            parts.append([])
        if found is not None:
            parts[-1].append(At((point["step"][0] + point["step"][1]) / 2, *found))
    return [part for part in parts if part]


def _steps(report: Mapping[str, Any]) -> tuple[float, float] | None:
    steps = [s for a in report["attempts"] for p in a["points"] for s in p["step"]]
    return (float(min(steps)), float(max(steps))) if steps else None


def _marks(report: Mapping[str, Any]) -> list[Mark]:
    """By step."""
    found = [Mark(c["step"], "checkpoint", f"checkpoint at step {c['step']}") for c in report["checkpoints"]]
    for one in report["attempts"]:
        if one["points"] and len(report["attempts"]) > 1:
            found.append(Mark(one["points"][0]["step"][0], "attempt", f"attempt {one['attempt']} begins"))
        found += [
            Mark(life["step"], "life", f"life {life['life']}: from step {life['from']} to {life['step']}")
            for life in one["course"]["lives"]
        ]
    for one in report["incidents"]:
        if one["step"] is not None:
            found.append(Mark(one["step"], "incident", _named(one)))
    return found


def _named(incident: Mapping[str, Any]) -> str:
    return f"{incident['number']}: {incident['title'] or incident['kind'] or 'not diagnosed'}"


def _curves(report: Mapping[str, Any]) -> str:
    xs = _steps(report)
    if xs is None:
        return '<h2>Curves</h2>\n<p class="dim">There is no line with a step: nothing to draw.</p>'
    marks, out = _marks(report), []
    odd = {
        key: [
            Mark(a["course"]["not_finite"][key]["step"], "odd", f"{key} is no finite number")
            for a in report["attempts"] if key in a["course"]["not_finite"]
        ]
        for key in ("loss", "tau")
    }  # fmt: skip
    for title, keys in _CURVES:
        curves = [
            Curve(name, [part for a in report["attempts"] for part in _parts(a["points"], key)], style)
            for key, name, style in keys
        ]
        if not any(curve.parts for curve in curves) and not odd.get(keys[0][0]):
            continue
        drawn, outside = svg.chart(title, curves, xs, [*marks, *odd.get(keys[0][0], ())], whole=keys[0][0] in _WHOLE)
        out.append(f"<h3>{_e(title)}</h3>\n<figure>{drawn}</figure>")
        if outside:
            out.append(
                f'<p class="note">{counted(outside, "point")} far off the others: above or below the picture.</p>'
            )
    signs = "By step. A line is the mean of the lines that a point stands for, its shade the least and the most. "
    signs += "Ticks below are checkpoints; dashed lines attempts, dotted ones lives of workers; ▼ incidents."
    return f'<h2>Curves</h2>\n<p class="note">{_e(signs)}</p>\n' + "\n".join(out)


def _times(report: Mapping[str, Any]) -> tuple[float, float] | None:
    """From the first to the last moment that is known."""
    found: list[float] = []
    for one in report["attempts"]:
        found += [t for t in (one["started"], one["ended"]) if t is not None]
        found += [t for p in one["points"] for t in p["t"] if t is not None]
        if one["alive"] and one["started"] is not None:
            found.append(report["now"])
    return (min(found), max(found)) if found else None


def _units(seconds: float) -> tuple[float, str]:
    """The unit in which so long a time is told, in seconds, and its name."""
    return next(((unit, name) for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")) if seconds > 2 * unit),
                (1.0, "s"))  # fmt: skip


def _workers(report: Mapping[str, Any]) -> str:
    xs = _times(report)
    slabs: dict[str, list[Slab]] = {}
    names = dict.fromkeys(n for a in report["attempts"] for p in a["points"] for n in p.get("workers", ()))
    together = len(names) > _WORKERS
    for one in report["attempts"]:
        before: float | None = None
        for point in one["points"]:
            begin, end = point["t"]
            if begin is None or end is None:
                continue
            start = before if before is not None and not point.get("cut") and before < begin else begin
            groups: dict[str, list[list[float]]] = {}
            for name, values in point.get("workers", {}).items():
                groups.setdefault(re.sub(r"\d+$", "", name) + "s" if together else name, []).append(values)
            for name, rows in groups.items():
                mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
                slabs.setdefault(name, []).append(Slab(start, end, mean))
            before = end
    if xs is None or not slabs:
        return ""
    key = "".join(f'<i class="s{n}"></i>{share}' for n, share in enumerate(SHARES, 1))
    of = f"the mean of all workers of a role ({len(names)} workers)" if together else "each worker"
    drawn = "".join(f"<figure>{svg.shares(name, found, xs)}</figure>" for name, found in slabs.items())
    note = f"Shares of the time of {of}, over {duration(xs[1] - xs[0])}:"
    return f'<h2>Who waits for whom</h2>\n<p class="note key">{_e(note)}{key}</p>\n<div class="small">{drawn}</div>'


def _line(report: Mapping[str, Any]) -> str:
    xs = _times(report)
    if xs is None:
        return ""
    since, (unit, name) = xs[0], _units(xs[1] - xs[0])

    def at(t: float) -> float:
        return (t - since) / unit

    bars = []
    for one in report["attempts"]:
        if one["started"] is not None:
            last = [p["t"][1] for p in one["points"] if p["t"][1] is not None][-1:]
            end = one["ended"] or (report["now"] if one["alive"] else (last or [one["started"]])[0])
            text = f"attempt {one['attempt']}, {one['state']}, {duration(end - one['started'])}"
            bars.append(Bar(at(one["started"]), at(end), re.sub(r"\W", "", one["state"]), text))
    marks = [Mark(at(c["t"]), "checkpoint", f"checkpoint at step {c['step']}") for c in report["checkpoints"]]
    marks += [
        Mark(at(life["t"]), "life", f"life {life['life']}")
        for a in report["attempts"] for life in a["course"]["lives"] if life["t"] is not None
    ]  # fmt: skip
    marks += [Mark(at(i["t"]), "incident", _named(i)) for i in report["incidents"]]
    inside = [at(t) for t in xs] + [m.x for m in marks]
    drawn = svg.timeline(
        "Attempts and what happened", bars, marks, (min(inside), max(inside)), lambda x: f"{x:.4g} {name}"
    )
    note = f"From {_when(since)} UTC on. ▼ incidents, by number; below the bars checkpoints and (dotted) lives."
    return f'<h2>Time line</h2>\n<p class="note">{_e(note)}</p>\n<figure>{drawn}</figure>'


def _incidents(report: Mapping[str, Any]) -> str:
    found = report["incidents"]
    if not found:
        return '<h2>Incidents</h2>\n<p class="dim">None in these attempts.</p>'
    rows = []
    for one in found:
        deeds = "<br>".join(f"{_e(d['action'])}: {_e(d['outcome'])}" for d in one["deeds"]) or DASH
        lost = DASH if one["lost_steps"] is None else f"{one['lost_steps']:,}"
        rows.append(
            [str(one["number"]), _e(_when(one["t"])), _e(_named(one).split(": ", 1)[1]), _toned(one["state"]),
             deeds, lost, _e(duration(one["down_s"]))]
        )  # fmt: skip
    heads = ("#no", "when", "=what", "state", "=done, and what came of it", "#steps lost", "#time lost")
    whole = "\n".join(_incident(one) for one in found[-_TOLD:])
    more = f'<p class="note">The newest {_TOLD} are told in full.</p>' if len(found) > _TOLD else ""
    return f"<h2>Incidents</h2>\n{_table(heads, rows)}\n{more}{whole}"


def _incident(one: Mapping[str, Any]) -> str:
    lines = [f"{_when(x['t'])}  {x['who']}: {x['text']}" for x in one["lines"]]
    if len(lines) > _LINES:
        left = len(lines) - _LINES
        lines = [*lines[: _LINES // 2], f"... {counted(left, 'line')} left out ...", *lines[-_LINES // 2 :]]
    evidence = [e["text"] for e in one["evidence"]][:12]
    out = [f'<div class="incident"><h3>{_e(_named(one))}</h3>']
    facts = [f"attempts {', '.join(map(str, one['attempts']))}"]
    facts += [f"kind {one['kind']}"] if one["kind"] else []
    facts += [f"confidence {one['confidence']:.2f}"] if one["confidence"] is not None else []
    facts += [f"fingerprint {one['fingerprint']}"] if one["fingerprint"] else []
    out.append(f'<p class="dim">{_e(", ".join(facts))}</p>')
    if one["root_exception"]:
        out.append(f"<pre>{_e(one['root_exception'])}</pre>")
    if evidence:
        out.append(f"<pre>{_e(chr(10).join(evidence))}</pre>")
    out.append(f"<pre>{_e(chr(10).join(lines))}</pre>")
    for deed in one["deeds"]:
        text = "\n".join(filter(None, (deed["command"], f"undo: {deed['undo']}" if deed["undo"] else "")))
        out.append(f"<p>{_e(deed['action'])}: {_e(deed['reason'])}</p>" + (f"<pre>{_e(text)}</pre>" if text else ""))
    if one["proof"] is not None:
        reached = f"reached step {one['proof']['step']}" if one["proof"]["step"] is not None else "finished"
        out.append(f'<p class="good">over: attempt {one["proof"]["attempt"]} {_e(reached)}</p>')
    elif one["told"]:
        out.append(f"<p>A person was told:</p><pre>{_e(one['told'])}</pre>")
    return "\n".join([*out, "</div>"])


def _config(report: Mapping[str, Any]) -> str:
    config = report["config"]
    more = (config["words"] or 1) - 1
    program = config["program"] + (f" and {counted(more, 'word')}" if more > 0 else "")
    rows = [["program", program], ["policy", config["mode"]], ["checkpoints", config["checkpoints"]]]
    rows.append(["variables (names only)", ", ".join(config["env"])])
    rows += [[key, value] for key, value in config["values"].items()]
    cells = [[f"<code>{_e(key)}</code>", _e(value)] for key, value in rows if value]
    fault = f'<p class="warn">{_e(config["fault"])}</p>' if config["fault"] else ""
    if not cells and not fault:
        return ""
    return f"<h2>Config of the newest attempt</h2>\n{fault}{_table(('=key', '=value'), cells)}"


def _gpus(report: Mapping[str, Any]) -> str:
    if not report["gpus"]:
        note = report["gpus_note"]
        return f'<h2>GPUs now</h2>\n<p class="dim">{_e(note)}</p>' if note else ""
    rows = []
    for gpu in report["gpus"]:
        memory = [DASH if gpu[k] is None else size(gpu[k]) for k in ("mem_used", "mem_total")]
        power = " / ".join(fixed(gpu[k], 0) for k in ("power_w", "power_limit_w"))
        ecc = " / ".join(DASH if gpu[k] is None else str(gpu[k]) for k in ("ecc_corrected", "ecc_uncorrected"))
        rows.append(
            [str(gpu["index"]), _e(gpu["name"]), percent(gpu["util"]), " / ".join(memory), fixed(gpu["temp_c"], 0),
             power, ecc, _e(", ".join(gpu["throttle"] or ()) or DASH)]
        )  # fmt: skip
    heads = ("#card", "=name", "#busy", "#memory", "#°C", "#W", "#ECC corrected / not", "=held down by")
    return f"<h2>GPUs now</h2>\n{_table(heads, rows)}"
