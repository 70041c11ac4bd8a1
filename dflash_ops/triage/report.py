"""From the chosen finding to a Diagnosis: cause line, rank, frame, evidence, why, remedies in order, what to fetch."""

from __future__ import annotations

from dflash_ops.contracts.diagnosis import Diagnosis, EvidenceLine, Remedy
from dflash_ops.triage import judge, unnamed
from dflash_ops.triage.case import Case
from dflash_ops.triage.fingerprint import of_finding
from dflash_ops.triage.frames import user_frame
from dflash_ops.triage.predicates import PREDICATES
from dflash_ops.triage.types import Finding, Record
from dflash_ops.triage.wording import CUT, HEALTHY, NOT_SHOWN, clip, facts_of, fetch, shown


def write(case: Case, findings: list[Finding], chosen: Finding | None) -> Diagnosis:
    """The diagnosis for the chosen finding; without one: what a cut text, an unknown error or an exit code says."""
    ended = unnamed.ended_well(case)
    if ended is not None:
        return ended
    unknown = unnamed.unknown_error(case, findings)
    if chosen is not None and unknown is not None and _before_cascade(unknown, chosen):
        return unnamed.unrecognised(case, unknown, chosen)
    if chosen is not None and chosen.kind.id != NOT_SHOWN:
        return _known(case, findings, chosen)
    if unknown is not None:
        return unnamed.unrecognised(case, unknown, chosen)
    killed = unnamed.by_exit(case)
    if killed is not None:
        return killed
    cut = unnamed.cut_traceback(case)
    if chosen is not None or cut is not None:
        return unnamed.not_shown(case, chosen, cut)
    return Diagnosis(
        kind=HEALTHY,
        title="Nothing needs doing",
        confidence=0.9,
        also=tuple(sorted({k for f in findings for k in (f.kind.id, *f.facts.get("also", ()))})),
        facts=facts_of(case),
        why=unnamed.healthy_why(case, findings),
    )


def _known(case: Case, findings: list[Finding], f: Finding) -> Diagnosis:
    kind = f.kind
    cause = f.cause
    frame = judge.frame_of(f, case)
    also = [*f.facts.get("also", ()), *(o.kind.id for o in findings if o is not f and o.role != "none")]
    also = [k for k in dict.fromkeys(also) if k != kind.id]
    rank = judge.rank_of(case, f)
    remedies, why_remedies = _remedies(kind.remedies, f, case)
    why = [*_why(case, f), *f.why, *why_remedies]
    facts = facts_of(case)
    facts.update({k: v for k, v in f.facts.items() if k != "also"})
    if kind.id == "fx_dynamo_conflict":
        facts["fx_cause"] = _fx_cause(f, case, why)
    return Diagnosis(
        kind=kind.id,
        title=kind.title,
        root_exception=_cause_text(f) if cause is not None else None,
        root_rank=rank,
        user_frame=frame,
        confidence=round(_confidence(case, findings, f), 2),
        fingerprint=of_finding(f),
        entity=f.entity,
        meaning=kind.meaning,
        evidence=_evidence(case, findings, f),
        remedies=remedies,
        auto_safe=bool(remedies) and any(r.grade == "A" and r.action != "tell" for r in remedies) and kind.grade == "A",
        also=tuple(also),
        fetch=fetch(case, f.record) if kind.id == NOT_SHOWN or cause is None else (),
        why=tuple(dict.fromkeys(why)),
        facts=facts,
    )


def _cause_text(f: Finding) -> str:
    """The exception's own line; with the line of its message that names the kind, where that is another one."""
    segment = f.segment
    if segment is None or segment.head is None:
        return clip(shown(f.line), f)
    text = shown(segment.head)
    if f.record.form == "group":
        text = text.lstrip("| ")  # the margin of an exception group
    said = segment.lines[segment.lines.index(segment.head) + 1 :] if segment.head in segment.lines else []
    if not segment.message:
        following = next((line for line in said[:4] if line.body.strip()), None)
        if following is not None and not following.body.strip().startswith(
            ("Traceback", "The above exception", "During handling")
        ):
            text = f"{text.rstrip()} {following.body.strip()}"
            if following is f.line:
                return text[:CUT]
    if f.line is not segment.head and f.line in said and f.signature.where != "frame":
        near = f.line is said[0]
        return f"{text[: CUT // 2]}{' ' if near else ' ... '}{clip(f.line.body.strip(), f)[: CUT // 2]}"
    return clip(text, f)


def _evidence(case: Case, findings: list[Finding], f: Finding) -> tuple[EvidenceLine, ...]:
    name = case.texts[f.source].name
    out = []
    if f.cause is not None:
        out.append(EvidenceLine(clip(shown(f.cause), f), f.cause.no, name, "cause"))
    if f.line is not f.cause:
        out.append(EvidenceLine(clip(shown(f.line), f), f.line.no, name, "match"))
    frame = user_frame(f.record, f.segment)
    if frame is not None:
        out.append(EvidenceLine(frame.line.text.strip()[:400], frame.line.no, name, "frame"))
    for other in sorted(findings, key=lambda o: (judge.order(o), o.source, o.line.no)):
        if other is f or other.outlived or other.record.noise or other.role == "noise" or len(out) >= 8:
            continue
        role = "same" if other.kind.id == f.kind.id else "follows"
        out.append(EvidenceLine(shown(other.line)[:400], other.line.no, case.texts[other.source].name, role))
    return tuple(out)


def _why(case: Case, f: Finding) -> list[str]:
    role = {
        "root": "names a cause",
        "either": "may be cause or consequence, and no nearer cause stands here",
        "cascade": "follows another failure, but nothing nearer to the cause stands here",
        "confirmation": "is evidence from outside the program",
    }.get(f.role, "")
    out = [f"line {f.line.no}: {f.kind.title}" + (f" ({role})" if role else "")]
    if f.segment is not None and len(f.record.segments) > 1:
        out.append("the first exception of its chain; the later ones only carry it")
    return out


def _fx_cause(f: Finding, case: Case, why: list[str]) -> str:
    version = case.torch_version()
    threads, nesting = PREDICATES["fx_threads"](f, case), PREDICATES["fx_nesting"](f, case)
    said = f"torch {version[0]}.{version[1]}" if version else "the torch version does not show"
    if nesting and not threads:
        why.append(f"{said}: true nesting, a compiled function is called while something traces")
        return "nesting"
    if threads:
        why.append(
            f"{said}, several threads in the process: up to torch 2.13 one flag serves all threads,"
            f" and another thread's compilation made this call fail"
        )
        return "threads"
    why.append(f"{said}: up to 2.13 another thread's compilation may be the cause, from 2.14 on only true nesting")
    return "unknown"


def _remedies(ladder: tuple[Remedy, ...], f: Finding, case: Case) -> tuple[tuple[Remedy, ...], list[str]]:
    first: list[Remedy] = []
    rest: list[Remedy] = []
    why: list[str] = []
    for remedy in ladder:
        predicate = PREDICATES.get(remedy.when)
        if predicate is None:
            rest.append(remedy)
            continue
        holds = predicate(f, case)
        if holds is False:
            why.append(f"left out: {remedy.action} ({remedy.when} does not hold)")
        elif holds:
            first.append(remedy)
        else:
            rest.append(remedy)
    return tuple(first + rest), why


def _confidence(case: Case, findings: list[Finding], f: Finding) -> float:
    value = {0.0: 0.97, 1.0: 0.93, 1.5: 0.85, 2.0: 0.86, 3.0: 0.85, 5.0: 0.7}.get(judge.order(f), 0.6)
    if f.segment is not None and f.segment.head is not None and f.segment.frames:
        value += 0.03
    if f.record.soft:
        value -= 0.2
    if f.line.level == "W":
        value -= 0.1
    rivals = {  # others that might as well be it: of the same order, no less specific
        o.kind.id
        for o in findings
        if not (o.outlived or o.record.soft or o.record.noise)
        and judge.order(o) == judge.order(f)
        and o.kind.id != f.kind.id
        and o.kind.priority >= f.kind.priority
    }
    value -= 0.08 * min(2, len(rivals))
    return max(0.3, min(0.99, value))


def _before_cascade(unknown: Record, chosen: Finding) -> bool:
    return judge.order(chosen) >= 5.0 and (unknown.source, unknown.first) < (chosen.source, chosen.record.first)
