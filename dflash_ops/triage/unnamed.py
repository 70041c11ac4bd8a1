"""Verdicts where no kind names the cause: an unknown error, a text that was cut, an exit code alone, nothing at all."""

from __future__ import annotations

import re

from dflash_ops.contracts.diagnosis import Diagnosis, EvidenceLine, Remedy
from dflash_ops.triage import judge
from dflash_ops.triage.case import Case
from dflash_ops.triage.fingerprint import fingerprint, site_of
from dflash_ops.triage.frames import user_frame
from dflash_ops.triage.types import Finding, Record
from dflash_ops.triage.wording import CUT, HEALTHY, NOT_SHOWN, UNKNOWN, clip, facts_of, fetch, shown

_WRAPPED_BY = re.compile(
    r"(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException|RayTaskError|ActorUnavailableError)\b"
    r"|exited with (?:a )?non-zero (?:exit )?(?:status|code)|returned non-zero exit status"
    r"|exited with (?:exit)?code|one (?:or more )?(?:of the )?(?:child|process|worker)\w* (?:failed|died)",
    re.IGNORECASE,
)
#: Signals of a launcher that ended without a word, and the trainer's own exit codes (docs/contracts.md).
_SIGNALS = {
    "SIGKILL": "host_oom_sigkill",
    "SIGSEGV": "segfault",
    "SIGBUS": "dataloader_shm_bus_error",
    "SIGABRT": "process_abort",
    "SIGTERM": "sigterm_external",
    "SIGHUP": "sighup_terminal_closed",
    "SIGINT": "keyboard_interrupt",
}
_CODES = {137: "SIGKILL", 139: "SIGSEGV", 135: "SIGBUS", 134: "SIGABRT", 143: "SIGTERM", 129: "SIGHUP", 130: "SIGINT"}
_EXITS = {2: "bad_arguments", 4: "nan_loss", 5: "corrupted_checkpoint", 6: "dataset_malformed_sample"}


def unknown_error(case: Case, findings: list[Finding]) -> Record | None:
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


def unrecognised(case: Case, record: Record, other: Finding | None) -> Diagnosis:
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
    text = shown(head)
    evidence = [EvidenceLine(text[:CUT], head.no, case.texts[record.source].name, "cause")]
    if frame is not None:
        evidence.append(
            EvidenceLine(frame.line.text.strip()[:400], frame.line.no, case.texts[record.source].name, "frame")
        )
    rank = (
        record.rank
        if record.rank is not None
        else next((t.summary.root_rank for t in case.texts if t.summary.root_rank is not None), None)
    )
    return Diagnosis(
        kind=UNKNOWN,
        title="An error that no playbook names",
        root_exception=text[:CUT],
        root_rank=rank,
        user_frame=str(frame) if frame is not None else None,
        confidence=0.5,
        fingerprint=fingerprint(UNKNOWN, segment.exception, site_of(record, segment), segment.message or text),
        meaning="The error is here in full, but no playbook describes it. Read the line and the frame; "
        "a playbook of your own can name it.",
        evidence=tuple(evidence),
        remedies=(
            Remedy(
                "tell",
                "N",
                "Read the cause line and the frame; nothing is done automatically.",
                "dflash-ops playbooks show",
            ),
        ),
        also=(other.kind.id,) if other is not None else (),
        why=(f"line {head.no}: an uncaught error, and no kind's text stands in it",),
        facts=facts_of(case),
    )


def cut_traceback(case: Case) -> Record | None:
    """The last traceback that ends before its exception."""
    cut = None
    for text in case.texts:
        for record in text.records:
            if (
                record.form in ("traceback", "group")
                and record.cut
                and not record.noise
                and not judge.outlived(text, record)
            ) and any(s.frames for s in record.segments):
                cut = record
    return cut


def not_shown(case: Case, chosen: Finding | None, cut: Record | None) -> Diagnosis:
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
        evidence.append(EvidenceLine(clip(shown(chosen.line), chosen), chosen.line.no, name, "wrapper"))
        head = segment.head if segment is not None else None
        # a wrapper's exception that says something is all there is to quote; a launcher's summary names nothing
        if head is not None and segment is not None and segment.message and segment.frames:
            root = shown(head)[:CUT]
    if cut is not None:
        last = cut.lines[-1]
        evidence.append(EvidenceLine(last.text.strip()[:400], last.no, case.texts[cut.source].name, "cut"))
    kind = chosen.kind if chosen is not None else None
    rank = judge.rank_of(case, chosen) if chosen is not None else record.rank
    if rank is None:
        rank = judge.summary_rank(case)
    why = (
        ("the traceback ends before its exception's own line",)
        if cut is not None
        else ("only a launcher's or wrapper's report stands here",)
    )
    return Diagnosis(
        kind=NOT_SHOWN,
        title=kind.title if kind is not None else "The cause is not in this text",
        root_exception=root,
        root_rank=rank,
        user_frame=str(frame) if frame is not None else None,
        confidence=0.9 if cut is None else 0.92,
        fingerprint=fingerprint(NOT_SHOWN, "", site_of(record, segment), root or ""),
        meaning=kind.meaning
        if kind is not None
        else "The text ends, or was cut, before the line that names the cause. A guess would be worse than none.",
        evidence=tuple(evidence),
        remedies=kind.remedies if kind is not None else (),
        fetch=fetch(case, record),
        why=why,
        facts=facts_of(case),
    )


def ended_well(case: Case) -> Diagnosis | None:
    """exit.json says: finished, stopped on request, or somebody asked for it. Then no line of the log is a crash."""
    for text in case.texts:
        if text.exit is None:
            continue
        rc, requested = text.exit.get("rc"), text.exit.get("requested")
        if not requested and rc not in (0, 3):
            continue
        said = (
            f"ended after a request ({requested})" if requested else "finished" if rc == 0 else "stopped, state saved"
        )
        return Diagnosis(
            kind=HEALTHY,
            title="Nothing needs doing",
            confidence=0.95,
            why=(f"exit.json: {said}",),
            facts=facts_of(case),
        )
    return None


def by_exit(case: Case) -> Diagnosis | None:
    """What exit.json alone says, where the texts are silent."""
    for text in case.texts:
        if text.exit is None:
            continue
        rc, signal = text.exit.get("rc"), text.exit.get("signal")
        code = rc if isinstance(rc, int) and not isinstance(rc, bool) else None
        name = signal if isinstance(signal, str) else _CODES.get(code or 0, "")
        kind = _SIGNALS.get(name) or _EXITS.get(code or 0)
        if kind is None:
            continue
        known = case.kinds.get(kind)
        line = f"exit.json: signal {name}" if name else f"exit.json: rc {rc}"
        return Diagnosis(
            kind=kind,
            title=known.title if known is not None else f"Ended: {name or f'exit code {rc}'}",
            confidence=0.6,
            fingerprint=fingerprint(kind, name or str(rc), "", ""),
            meaning=known.meaning if known is not None else "",
            evidence=(EvidenceLine(line, None, text.name, "cause"),),
            remedies=known.remedies if known is not None else (),
            fetch=fetch(case, None),
            why=("the texts name no cause; this is what the exit record alone says",),
            facts=facts_of(case),
        )
    return None


def healthy_why(case: Case, findings: list[Finding]) -> tuple[str, ...]:
    out = []
    for f in findings:
        if f.outlived:
            out.append(f"line {f.line.no}: {f.kind.id}, but the same worker made progress afterwards")
        elif f.record.soft:
            out.append(f"line {f.line.no}: {f.kind.id}, but the program says that it goes on")
        elif f.record.noise or f.role == "noise":
            out.append(f"line {f.line.no}: {f.kind.id}, a warning that ends nothing")
    return tuple(dict.fromkeys(out))[:6] or ("no error stands in the text",)
