"""From findings to one cause: the first cause wins, not the loudest (laws of supervision, 3).

Order: the kernel's word about our process -> roots -> other confirmations -> either -> what nobody knows -> cascades ->
launcher's wrappers. Inside a rank of that order the earliest wins. An error after which the same worker went on is no
crash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dflash_ops.triage.case import Case, Text
from dflash_ops.triage.frames import user_frame
from dflash_ops.triage.outlived import Progress
from dflash_ops.triage.parse_traceback import EXCEPTION
from dflash_ops.triage.predicates import PREDICATES
from dflash_ops.triage.types import Finding, Line, Record

#: Somebody from outside ended it: decides where it comes before every error.
INTENT = frozenset(("keyboard_interrupt", "slurm_cancelled", "sigterm_external", "sighup_terminal_closed"))
WRAPPER = "root_cause_not_shown"
_LATE = 30  # kinds of a lower priority give way to others of the same role
#: Said by the program itself: it goes on. Behind the error only words that can mean nothing else.
_SOFT = re.compile(
    r"\bretrying\b|will (?:be )?retr(?:y|ied)\b|\bretry \d|\bskip(?:ping|ped)\b|falling back|recover(?:ed|ing)\b"
    r"|\(ignored\)|\bignoring\b|non-fatal|\bcontinuing\b|reconnect|dropping (?:sample|batch)|using .{1,40} instead",
    re.IGNORECASE,
)
_SOFT_AFTER = re.compile(
    r"\bskip(?:ping|ped)\b|falling back|\brecovered\b|\(ignored\)|\bignoring\b|\bcontinuing\b|^\W*retrying\b",
    re.IGNORECASE,
)
_TRIES = re.compile(r"(?:attempt|try|retry) (\d+)(?:/| of )(\d+)", re.IGNORECASE)
_EXITCODE = re.compile(r"^\s*exitcode\s*:")
_OUR_PROCESS = re.compile(
    r"\((?:python[\d.]*|pt_main_thread|pt_\w+|torchrun|ray\S*|train\w*|dflash\S*|accelerate|deepspeed|ray::\S*)\)"
)
_RANK = (
    re.compile(r"\[(?:PG[^\]]*?)?[Rr]ank (\d+)\]"),
    re.compile(r"\(RANK (\d+)\)"),
    re.compile(r"local_rank: (\d+)\b"),
    re.compile(r"--local[-_]rank[= ]'?(\d+)"),
    re.compile(r"\bon rank (\d+)\b|\brank[ :=]+(\d+)\b", re.IGNORECASE),
)


def order(finding: Finding) -> float:
    """The finding's place in the order of causes; smaller is nearer to the cause."""
    role = finding.role
    if finding.kind.id == WRAPPER:
        return 6.0
    if role == "confirmation":
        kernel = finding.line.kernel or finding.signature.where == "kernel"
        if kernel and finding.kind.id.startswith("host_oom") and _OUR_PROCESS.search(finding.line.text):
            return 0.0
        return 1.5 if kernel else 2.0
    return {"root": 1.0, "either": 3.0, "cascade": 5.0}.get(role, 7.0)


def best_of(findings: Iterable[Finding]) -> Finding | None:
    """Among kinds that match the same error: the larger priority, then the nearer role, then the longer literal."""
    best: Finding | None = None
    for finding in findings:
        if best is None or _weight(finding) > _weight(best):
            best = finding
    return best


def _weight(finding: Finding) -> tuple[float, ...]:
    wrapper = finding.kind.id == WRAPPER
    return (
        not wrapper,
        finding.kind.priority,
        -order(finding),
        bool(finding.signature.regex),
        len(finding.signature.literal),
        -finding.line.no,
    )


def reduce(case: Case, findings: list[Finding]) -> list[Finding]:
    """One finding for each error (segment, or loose line): predicates asked, the most specific kind kept."""
    groups: dict[tuple[int, int], list[Finding]] = {}
    for finding in findings:
        key = (id(finding.record), id(finding.segment) if finding.segment is not None else 0)
        groups.setdefault(key, []).append(finding)
    out: list[Finding] = []
    for group in groups.values():
        agreed = []
        for finding in group:
            predicate = finding.kind.predicate
            if predicate and predicate in PREDICATES and not PREDICATES[predicate](finding, case):
                continue
            agreed.append(finding)
        best = best_of(agreed)
        if best is not None:
            best.facts["also"] = sorted({f.kind.id for f in agreed} - {best.kind.id})
            out.append(best)
    return out


def mark_outlived(case: Case, finding: Finding) -> None:
    """Whether the same worker made progress after the error."""
    outside = finding.role == "confirmation" or finding.line.kernel or finding.signature.where == "kernel"
    finding.outlived = outlived(case.texts[finding.source], finding.record, outside)


def outlived(text: Text, record: Record, outside: bool = False) -> bool:
    if text.progress is None:
        text.progress = Progress(text)
    return text.progress.outlived(record, outside)


def mark_soft(text: Text, record: Record) -> None:
    """Caught, retried, skipped: said in the error's own lines, before a traceback, or just after a line of its own."""
    near = [line for line in _after(text, record, 2) if line.stream == record.stream and line.progress is None]
    if record.form not in ("loose", "headless"):
        record.soft = record.soft or bool(_SOFT.search(record.title))
        record.mild = any(_SOFT_AFTER.search(line.body) for line in [*record.lines[-3:], *near])
        return
    said = any(_SOFT.search(line.body) for line in record.lines)
    tries = next((m for line in record.lines if (m := _TRIES.search(line.body))), None)
    if tries is not None:
        said = int(tries.group(1)) < int(tries.group(2))
    if not said:
        said = any(_SOFT_AFTER.search(line.body) and line.level != "E" for line in near)
    record.soft = record.soft or said


def _after(text: Text, record: Record, count: int) -> list[Line]:
    at = text.after(record.last)
    return [line for line in text.lines[at : at + 12] if line.body.strip()][:count]


def choose(case: Case, findings: list[Finding]) -> Finding | None:
    """The primary finding, None where nothing stands that counts."""
    counting = [f for f in findings if f.role not in ("noise", "none")]
    standing = [f for f in counting if not (f.record.noise or f.record.soft or f.outlived)]
    if not standing:
        return None
    errors = [f for f in standing if order(f) <= 3.0]
    early = min(errors, key=_place, default=None)
    if early is not None and early.kind.id in INTENT:
        return _exception_of(early, standing)
    first = min(standing, key=lambda f: (order(f), f.kind.priority < _LATE, _place(f)))
    if first.kind.id == WRAPPER and (rank := summary_rank(case)) is not None:
        # the launcher says that this rank failed: its error counts, whatever steps of its peers stand behind it
        own = [f for f in counting if f.outlived and f.record.form == "traceback" and f.record.rank == rank]
        first = max(own, key=_place, default=first)
    if order(first) < 3.0:
        # what may be cause or consequence is the cause where it came first and is the more specific of the two
        before = [
            f
            for f in standing
            if order(f) == 3.0
            and _place(f) < _place(first)
            and f.kind.priority >= first.kind.priority
            and not f.record.soft
        ]
        first = min(before, key=_place, default=first)
    return _exception_of(_group_of(first, standing), standing)


def _group_of(first: Finding, standing: list[Finding]) -> Finding:
    """The exception group itself, where its leaves are of different kinds: none is more the cause than another."""
    if first.record.form != "group":
        return first
    beside = [f for f in standing if f.record is first.record]
    group = next((f for f in beside if f.kind.id == "exception_group"), None)
    leaves = {f.kind.id for f in beside if f is not group}
    return group if group is not None and len(leaves) > 1 else first


def _exception_of(first: Finding, standing: list[Finding]) -> Finding:
    """The exception's own line, where a loose line just announced the same (`ERROR: Unexpected bus error` ...)."""
    own = EXCEPTION.match(first.line.body)
    if first.record.form == "traceback" or (own is not None and own["message"]) or "Assertion" in first.line.body:
        return first
    if _EXITCODE.match(first.line.body):  # of the launcher's report the line that names the signal
        return next((o for o in standing if o.kind is first.kind and 0 < o.line.no - first.line.no <= 4), first)
    for other in standing:
        if (
            other.kind is first.kind
            and other.source == first.source
            and other.record.stream == first.record.stream
            and not other.record.soft
            and other.record.form != "stack"
            and 0 < other.line.no - first.line.no <= (60 if other.segment is not None else 3)
            and (other.segment is not None or EXCEPTION.match(other.line.body))
        ):
            return other
    return first


def _place(finding: Finding) -> tuple[float, ...]:
    """When it happened, as far as the texts tell: error.json's time first, else the order of reading."""
    chain = 0.0
    if finding.segment is not None and finding.segment in finding.record.segments:
        at = finding.record.segments.index(finding.segment)
        # a nested or remote traceback is printed after the exception that carries it, but came first
        chain = at - 1.5 if finding.segment.relation == "inner" else float(at)
    # error.json knows the time of its error; what has none comes after it, in the order in which it was handed in
    when = (0.0, finding.stamp) if finding.stamp is not None else (1.0, float(finding.source))
    return (*when, float(finding.record.first), chain, float(finding.line.no))


def rank_of(case: Case, finding: Finding) -> int | None:
    """The rank that failed: of the line, its record, its wording, or the launcher's summary."""
    if finding.kind.id == WRAPPER:
        return summary_rank(case)
    if finding.rank is not None:
        return finding.rank
    if finding.record.rank is not None:
        return finding.record.rank
    lines = [finding.line, *finding.record.lines[-3:]] if finding.segment is not None else [finding.line]
    for line in lines:
        for pattern in _RANK:
            if match := pattern.search(line.text):
                return int(next(g for g in match.groups() if g is not None))
    for other in case.findings:
        if other.kind is finding.kind and not other.outlived and other.rank is not None:
            return other.rank
    return summary_rank(case)


def summary_rank(case: Case) -> int | None:
    """The rank that the launcher's report names first."""
    for text in case.texts:
        if text.summary.root_rank is not None:
            return text.summary.root_rank
    return next((t.summary.failed_rank for t in case.texts if t.summary.failed_rank is not None), None)


def frame_of(finding: Finding, case: Case) -> str | None:
    """The user's frame: of the cause's own chain, else of the same writer, else of whoever shows one."""
    found = user_frame(finding.record, finding.segment)
    if found is not None or not finding.kind.user_frame:
        return str(found) if found is not None else None
    text = case.texts[finding.source]
    near = sorted(text.records, key=lambda r: (r.stream != finding.record.stream, abs(r.first - finding.line.no)))
    for record in near:
        if record.form == "loose" or record.noise or record is finding.record:
            continue
        if (other := user_frame(record, None)) is not None:
            return str(other)
    for line in text.lines:
        if match := _CODE_AT.search(line.text):
            return match.group(1)
    return None


_CODE_AT = re.compile(r"function: '[\w<>]+' \(([^():]+\.py:\d+)\)")
