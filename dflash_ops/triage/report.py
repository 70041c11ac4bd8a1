"""From the chosen finding to a Diagnosis: cause line, rank, frame, evidence, why, remedies in order, what to fetch."""

from __future__ import annotations

import re
from typing import Any

from dflash_ops.contracts.diagnosis import Diagnosis, EvidenceLine, Remedy
from dflash_ops.triage import judge
from dflash_ops.triage.case import Case
from dflash_ops.triage.fingerprint import fingerprint, of_finding, site_of
from dflash_ops.triage.frames import user_frame
from dflash_ops.triage.predicates import PREDICATES
from dflash_ops.triage.types import Finding, Line, Record

UNKNOWN = "unrecognised_error"
NOT_SHOWN = "root_cause_not_shown"
HEALTHY = "healthy"
_CUT = 1200
_PREFIX = re.compile(r"^\s*\[(?:rank|default)?\d+\]:\s?")
_WRAPPED_BY = re.compile(
    r"(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException|RayTaskError|ActorUnavailableError)\b"
    r"|exited with (?:a )?non-zero (?:exit )?(?:status|code)|returned non-zero exit status|exited with (?:exit)?code|one (?:or more )?(?:of the )?(?:child|process|worker)\w* (?:failed|died)", re.I)
_LOG_NAMED = re.compile(r"(?:^|[\s'\"=:(])((?:/|\.{0,2}/|[\w-]+/)[\w./-]+\.(?:log|out|err|txt))\b")
_ERROR_FILE = re.compile(r"error_file\s*:\s*(/\S+)")

#: Signals of a launcher that ended without a word, and the trainer's own exit codes (docs/contracts.md).
_SIGNALS = {"SIGKILL": "host_oom_sigkill", "SIGSEGV": "segfault", "SIGBUS": "dataloader_shm_bus_error", "SIGABRT": "process_abort",
            "SIGTERM": "sigterm_external", "SIGHUP": "sighup_terminal_closed", "SIGINT": "keyboard_interrupt"}
_CODES = {137: "SIGKILL", 139: "SIGSEGV", 135: "SIGBUS", 134: "SIGABRT", 143: "SIGTERM", 129: "SIGHUP", 130: "SIGINT"}
_EXITS = {2: "bad_arguments", 4: "nan_loss", 5: "corrupted_checkpoint", 6: "dataset_malformed_sample"}


def write(case: Case, findings: list[Finding], chosen: Finding | None) -> Diagnosis:
    """The diagnosis for the chosen finding; without one: what a cut text, an unknown error or an exit code says."""
    unknown = _unknown(case, findings)
    if chosen is not None and unknown is not None and _before_cascade(unknown, chosen):
        return _unrecognised(case, unknown, chosen)
    if chosen is not None and chosen.kind.id != NOT_SHOWN:
        return _known(case, findings, chosen)
    if unknown is not None:
        return _unrecognised(case, unknown, chosen)
    ended = _by_exit(case)
    if ended is not None:
        return ended
    cut = _cut(case)
    if chosen is not None or cut is not None:
        return _not_shown(case, chosen, cut)
    also = tuple(sorted({k for f in findings for k in (f.kind.id, *f.facts.get("also", ()))}))
    return Diagnosis(kind=HEALTHY, title="Nothing needs doing", confidence=0.9, also=also, facts=_facts(case),
                     why=_healthy_why(case, findings))


def _known(case: Case, findings: list[Finding], f: Finding) -> Diagnosis:
    kind = f.kind
    cause = f.cause
    frame = judge.frame_of(f, case)
    also = [*f.facts.get("also", ()), *(o.kind.id for o in findings if o is not f and o.role not in ("none",))]
    also = [k for k in dict.fromkeys(also) if k != kind.id]
    rank = judge.rank_of(case, f)
    remedies, why_remedies = _remedies(kind.remedies, f, case)
    why = [*_why(case, f), *f.why, *why_remedies]
    facts = _facts(case)
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
        fetch=_fetch(case, f.record) if kind.id == NOT_SHOWN or cause is None else (),
        why=tuple(dict.fromkeys(why)),
        facts=facts,
    )


def _cause_text(f: Finding) -> str:
    """The exception's own line; with the line of its message that names the kind, where that is another one."""
    segment = f.segment
    if segment is None or segment.head is None:
        return _clip(_shown(f.line), f)
    text = _shown(segment.head)
    said = segment.lines[segment.lines.index(segment.head) + 1 :] if segment.head in segment.lines else []
    if not segment.message:
        following = next((line for line in said[:4] if line.body.strip()), None)
        if following is not None and not following.body.strip().startswith(("Traceback", "The above exception", "During handling")):
            text = f"{text.rstrip()} {following.body.strip()}"
            if following is f.line:
                return text[:_CUT]
    if f.line is not segment.head and f.line in said and f.signature.where != "frame":
        near = f.line is said[0]
        return f"{text[: _CUT // 2]}{' ' if near else ' ... '}{_clip(f.line.body.strip(), f)[: _CUT // 2]}"
    return _clip(text, f)


def _shown(line: Line) -> str:
    return _PREFIX.sub("", line.text if line.body not in line.text or not line.stream.startswith("rank") else line.text).strip()


def _clip(text: str, f: Finding) -> str:
    if len(text) <= _CUT:
        return text
    at = max(0, text.find(f.signature.literal) - 200)
    return text[at : at + _CUT]


def _evidence(case: Case, findings: list[Finding], f: Finding) -> tuple[EvidenceLine, ...]:
    name = case.texts[f.source].name
    out = []
    if f.cause is not None:
        out.append(EvidenceLine(_clip(_shown(f.cause), f), f.cause.no, name, "cause"))
    if f.line is not f.cause:
        out.append(EvidenceLine(_clip(_shown(f.line), f), f.line.no, name, "match"))
    frame = user_frame(f.record, f.segment)
    if frame is not None:
        out.append(EvidenceLine(frame.line.text.strip()[:400], frame.line.no, name, "frame"))
    for other in sorted(findings, key=lambda o: (judge.order(o), o.source, o.line.no)):
        if other is f or other.outlived or other.record.noise or other.role == "noise" or len(out) >= 8:
            continue
        role = "same" if other.kind.id == f.kind.id else "follows"
        out.append(EvidenceLine(_shown(other.line)[:400], other.line.no, case.texts[other.source].name, role))
    return tuple(out)


def _why(case: Case, f: Finding) -> list[str]:
    role = {"root": "names a cause", "either": "may be cause or consequence, and no nearer cause stands here",
            "cascade": "follows another failure, but nothing nearer to the cause stands here",
            "confirmation": "is evidence from outside the program"}.get(f.role, "")
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
        why.append(f"{said}, several threads in the process: up to torch 2.13 one flag serves all threads, and another thread's compilation made this call fail")
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
    rivals = {o.kind.id for o in findings if not o.outlived and judge.order(o) == judge.order(f) and o.kind.id != f.kind.id}
    value -= 0.08 * min(2, len(rivals))
    return max(0.3, min(0.99, value))


def _unknown(case: Case, findings: list[Finding]) -> Record | None:
    """The first error with an exception line that no kind names."""
    named = {id(f.record) for f in findings}
    for text in case.texts:
        for record in sorted(text.records, key=lambda r: r.first):
            if record.form not in ("traceback", "group") or record.noise or record.cut or id(record) in named:
                continue
            head = record.segments[-1].head
            if head is None or _WRAPPED_BY.search(head.body) or "sys.excepthook" in record.title:
                continue
            if record.segments[-1].exception.endswith("Warning"):
                continue
            judge.mark_soft(text, record)
            if record.soft or judge.outlived(text, record):
                continue
            return record
    return None


def _before_cascade(unknown: Record, chosen: Finding) -> bool:
    return judge.order(chosen) >= 5.0 and (unknown.source, unknown.first) < (chosen.source, chosen.record.first)


def _unrecognised(case: Case, record: Record, other: Finding | None) -> Diagnosis:
    segment = record.segments[0]
    for candidate in record.segments:
        if candidate.relation == "inner" or candidate.head is not None:
            segment = candidate
            break
    if record.segments[-1].relation == "inner":
        segment = record.segments[-1]
    head = segment.head or record.segments[-1].head
    assert head is not None
    frame = user_frame(record, segment)
    text = _shown(head)
    evidence = [EvidenceLine(text[:_CUT], head.no, case.texts[record.source].name, "cause")]
    if frame is not None:
        evidence.append(EvidenceLine(frame.line.text.strip()[:400], frame.line.no, case.texts[record.source].name, "frame"))
    rank = record.rank if record.rank is not None else next((t.summary.root_rank for t in case.texts if t.summary.root_rank is not None), None)
    return Diagnosis(
        kind=UNKNOWN,
        title="An error that no playbook names",
        root_exception=text[:_CUT],
        root_rank=rank,
        user_frame=str(frame) if frame is not None else None,
        confidence=0.5,
        fingerprint=fingerprint(UNKNOWN, segment.exception, site_of(record, segment), segment.message or text),
        meaning="The error is here in full, but no playbook describes it. Read the line and the frame; a playbook of your own can name it.",
        evidence=tuple(evidence),
        remedies=(Remedy("tell", "N", "Read the cause line and the frame; nothing is done automatically.", "dflash-ops playbooks show"),),
        also=(other.kind.id,) if other is not None else (),
        why=(f"line {head.no}: an uncaught error, and no kind's text stands in it",),
        facts=_facts(case),
    )


def _cut(case: Case) -> Record | None:
    """The last traceback that ends before its exception."""
    cut = None
    for text in case.texts:
        for record in text.records:
            if record.form in ("traceback", "group") and record.cut and not record.noise and not judge.outlived(text, record):
                if any(s.frames for s in record.segments):
                    cut = record
    return cut


def _not_shown(case: Case, chosen: Finding | None, cut: Record | None) -> Diagnosis:
    record = chosen.record if chosen is not None else cut
    assert record is not None
    segment = chosen.segment if chosen is not None else record.segments[-1]
    frame = user_frame(record, segment)
    if frame is None and cut is not None:
        frame = user_frame(cut, None)
    name = case.texts[record.source].name
    root: str | None = None
    evidence: list[EvidenceLine] = []
    if chosen is not None:
        evidence.append(EvidenceLine(_clip(_shown(chosen.line), chosen), chosen.line.no, name, "wrapper"))
        head = segment.head if segment is not None else None
        # a wrapper's exception that says something is all there is to quote; a launcher's summary names nothing
        if head is not None and segment is not None and segment.message and segment.frames:
            root = _shown(head)[:_CUT]
    if cut is not None:
        last = cut.lines[-1]
        evidence.append(EvidenceLine(last.text.strip()[:400], last.no, case.texts[cut.source].name, "cut"))
    kind = chosen.kind if chosen is not None else None
    rank = judge.rank_of(case, chosen) if chosen is not None else record.rank
    if rank is None:
        rank = next((t.summary.root_rank if t.summary.root_rank is not None else t.summary.failed_rank for t in case.texts
                     if t.summary.root_rank is not None or t.summary.failed_rank is not None), None)
    why = ("the traceback ends before its exception's own line",) if cut is not None else ("only a launcher's or wrapper's report stands here",)
    return Diagnosis(
        kind=NOT_SHOWN,
        title=kind.title if kind is not None else "The cause is not in this text",
        root_exception=root,
        root_rank=rank,
        user_frame=str(frame) if frame is not None else None,
        confidence=0.9 if cut is None else 0.92,
        fingerprint=fingerprint(NOT_SHOWN, "", site_of(record, segment), root or ""),
        meaning=kind.meaning if kind is not None else "The text ends, or was cut, before the line that names the cause. A guess would be worse than none.",
        evidence=tuple(evidence),
        remedies=kind.remedies if kind is not None else (),
        fetch=_fetch(case, record),
        why=why,
        facts=_facts(case),
    )


def _fetch(case: Case, record: Record) -> tuple[str, ...]:
    """What to read next, most telling first."""
    out: list[str] = []
    for text in case.texts:
        for line in text.lines:
            if match := _ERROR_FILE.search(line.text):
                out.append(f"the rank's own report: {match.group(1)}")
            if line.no >= record.first - 5 and (match := _LOG_NAMED.search(line.text)) is not None:
                out.append(f"the log that this text names: {match.group(1)}")
    have = {text.kind for text in case.texts}
    out.append("the attempt's whole log: dflash-ops logs JOB (run/attempts/<n>/log on the machine), not only the pane")
    if "error_json" not in have:
        out.append("the workers' error.json and logs: run/attempts/<n>/errors/*/error.json, run/attempts/<n>/logs/*.log")
    if "kernel" not in have:
        out.append("the host's kernel log around the time of the end: dmesg -T | grep -E 'NVRM|Killed process|oom'")
    return tuple(dict.fromkeys(out))[:6]


def _by_exit(case: Case) -> Diagnosis | None:
    """What exit.json alone says, where the texts are silent."""
    for text in case.texts:
        record = text.exit
        if record is None:
            continue
        rc, signal = record.get("rc"), record.get("signal")
        requested = record.get("requested")
        if requested:
            return _stopped(case, f"ended after a request ({requested})")
        if rc in (0, 3):
            return _stopped(case, "finished" if rc == 0 else "stopped on request, state saved")
        name = signal if isinstance(signal, str) else _CODES.get(rc) if isinstance(rc, int) else None
        kind = _SIGNALS.get(name or "") or (_EXITS.get(rc) if isinstance(rc, int) and not isinstance(rc, bool) else None)
        if kind is None:
            continue
        line = f"exit.json: signal {name}" if name else f"exit.json: rc {rc}"
        return Diagnosis(kind=kind, title=f"Ended: {name or f'exit code {rc}'}", confidence=0.6, fingerprint=fingerprint(kind, name or str(rc), "", ""),
                         evidence=(EvidenceLine(line, None, text.name, "cause"),), fetch=_fetch_exit(case),
                         why=("the texts name no cause; this is what the exit record alone says",), facts=_facts(case))
    return None


def _fetch_exit(case: Case) -> tuple[str, ...]:
    return ("the host's kernel log around the time of the end: dmesg -T | grep -E 'NVRM|Killed process|oom'",)


def _stopped(case: Case, why: str) -> Diagnosis:
    return Diagnosis(kind=HEALTHY, title="Nothing needs doing", confidence=0.95, why=(f"exit.json: {why}",), facts=_facts(case))


def _healthy_why(case: Case, findings: list[Finding]) -> tuple[str, ...]:
    out = []
    for f in findings:
        if f.outlived:
            out.append(f"line {f.line.no}: {f.kind.id}, but the same worker made progress afterwards")
        elif f.record.noise or f.role == "noise":
            out.append(f"line {f.line.no}: {f.kind.id}, a warning that ends nothing")
    return tuple(dict.fromkeys(out))[:6] or ("no error stands in the text",)


def _facts(case: Case) -> dict[str, Any]:
    facts: dict[str, Any] = {"lines": sum(t.total_lines for t in case.texts)}
    version = case.torch_version()
    if version is not None:
        facts["torch"] = f"{version[0]}.{version[1]}"
    attempt = next((t.attempt for t in reversed(case.texts) if t.attempt), None)
    if attempt is not None:
        facts["attempt"] = attempt
    steps = [(step.step, step.dialect) for t in case.texts for _, step in t.steps if step.step is not None]
    if steps:
        facts["last_step"], facts["dialect"] = steps[-1]
    if case.missing:
        facts["missing"] = case.missing
    return facts
