"""Which kinds stand in a record: the literal, then the regular expression, then what must (not) stand beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dflash_ops.triage.playbook import Playbooks, Signature
from dflash_ops.triage.scan import STRUCTURE, Needles, fold
from dflash_ops.triage.types import Finding, Line, Record, Segment

#: Words before a match, in its own sentence, that make the sentence advice or a guess.
_CONDITIONAL = re.compile(
    r"\b(?:if|when(?:ever)?|in case|unless|e\.g\.|for example|such as|could|might|may|potential"
    r"|possibl[ey]|probably|typically|usually|"
    r"sometimes|consider|try|avoid|prevent|would|can (?:cause|lead|result)|tip|hint|note|see|docs?|documentation)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[.;!?]\s+|\(\d\)\s|\s-\s\(|\n")
_CACHE = 20_000


class Matcher:
    """The compiled playbooks as one search."""

    def __init__(self, playbooks: Playbooks) -> None:
        self.playbooks = playbooks
        self.signatures = playbooks.signatures
        self._needles = Needles(s.literal for s in self.signatures)
        self._cache: dict[bytes, tuple[int, ...]] = {}

    def needles(self) -> Needles:
        """What the scan of bytes looks for: every literal, and the grammar of errors."""
        return Needles([*(s.literal for s in self.signatures), *STRUCTURE])

    def candidates(self, text: str) -> tuple[int, ...]:
        template = fold(text.encode("utf-8", "replace"))
        found = self._cache.get(template)
        if found is None:
            if len(self._cache) > _CACHE:
                self._cache.clear()
            found = self._cache[template] = tuple(self._needles.find(template))
        return found

    def knows(self, text: str) -> bool:
        """Whether a literal of any kind stands in the text."""
        return bool(self.candidates(text))

    def spans_literal(self, left: str, right: str) -> bool:
        """Whether a literal of 10 characters or more, or a whole signature, stands across the border only."""
        end, begin = left[-400:], right[:400]
        both = end + begin
        for i in self.candidates(both):
            signature = self.signatures[i]
            literal = signature.literal
            if len(literal) < 10 and signature.pattern is None:
                continue
            if signature.pattern is None:
                at = both.find(literal)
                if 0 <= at < len(end) < at + len(literal) and literal not in end and literal not in begin:
                    return True
            elif (
                find(signature, end) is None
                and find(signature, begin) is None
                and (found := find(signature, both)) is not None
            ) and found[0] < len(end):
                return True
        return False

    def record(self, record: Record, tags: frozenset[str], extra: str = "") -> Iterator[Finding]:
        """Findings of a traceback, stack dump or loose block. `tags`: what `where` may ask for besides `any`."""
        text: str | None = None
        for segment, line, view, where in _views(record, tags):
            for i in self.candidates(view):
                signature = self.signatures[i]
                if signature.where not in where:
                    continue
                match = find(signature, view)
                if match is None and segment is None and line.text != view:
                    match = find(signature, line.text)
                if match is None:
                    continue
                start, entity = match
                if not signature.advice and signature.where not in ("frame", "progress"):
                    head = segment is not None and segment.head is line
                    if conditional(view, start, 1 if head else 0):
                        continue
                if signature.all or signature.any or signature.none:
                    if text is None:
                        text = record.text + ("\n" + extra if extra else "")
                    if not _beside(signature, text):
                        continue
                kind = self.playbooks.kinds[signature.kind]
                yield Finding(
                    kind=kind,
                    signature=signature,
                    record=record,
                    line=line,
                    role=signature.role or kind.role,
                    source=record.source,
                    segment=segment,
                    entity=entity,
                    rank=line.rank if line.rank is not None else record.rank,
                )

    def progress(self, line: Line, source: int) -> Iterator[Finding]:
        """Findings of a progress line (`loss nan`)."""
        for i in self.candidates(line.body):
            signature = self.signatures[i]
            if signature.where != "progress" or (match := find(signature, line.body)) is None:
                continue
            if not _beside(signature, line.body):
                continue
            kind = self.playbooks.kinds[signature.kind]
            record = Record("loose", line.stream, line.no, line.no, source, lines=[line], rank=line.rank)
            yield Finding(
                kind, signature, record, line, signature.role or kind.role, source, entity=match[1], rank=line.rank
            )


def find(signature: Signature, text: str) -> tuple[int, str | None] | None:
    """Where the signature begins in a line, and its entity; None where it does not stand there."""
    at = text.lower().find(signature.literal.lower()) if signature.ignore_case else text.find(signature.literal)
    if at < 0:
        return None
    entity: str | None = None
    pattern = signature.pattern
    if pattern is not None:
        match = pattern.search(text)
        if match is None:
            return None
        at = match.start()
        if "entity" in pattern.groupindex:
            entity = match["entity"]
    if entity is None and signature.entity_pattern is not None:
        found = signature.entity_pattern.search(text)
        if found is not None:
            entity = found["entity"] if "entity" in signature.entity_pattern.groupindex else found.group()
    return at, entity


def conditional(text: str, start: int, exempt: int = 0) -> bool:
    """Whether the match stands in advice or a guess: "could be", "if you", "possible cause (1)".

    `exempt`: so many sentences from the beginning are taken at their word (an exception's own message).
    """
    if start <= 0:
        return False
    before = text[max(0, start - 300) : start]
    parts = _SENTENCE.split(before)
    if start <= 300 and len(parts) <= exempt:
        return False
    sentence = parts[-1]
    if _CONDITIONAL.search(sentence):
        return True
    return "root causes" in before or "possible causes" in before.lower()


def _beside(signature: Signature, text: str) -> bool:
    if signature.all and not all(part in text for part in signature.all):
        return False
    if signature.any and not any(part in text for part in signature.any):
        return False
    return not (signature.none and any(part in text for part in signature.none))


def _views(record: Record, tags: frozenset[str]) -> Iterator[tuple[Segment | None, Line, str, frozenset[str]]]:
    """Each line that may hold a signature, as (segment, line, text to search, what `where` may be)."""
    plain = frozenset(("any",)) | tags
    if record.form == "loose":
        for line in record.lines:
            yield None, line, line.body, plain
        return
    said = plain | {"exception"}
    if record.title_line is not None and record.segments:
        yield record.segments[-1], record.title_line, record.title_line.body, said
    for segment in record.segments:
        for frame in segment.frames:
            yield segment, frame.line, f"{frame.line.body}\n    {frame.code}" if frame.code else frame.line.body, _FRAME
        if segment.head is None:
            continue
        started = False
        for line in segment.lines:
            if line is segment.head:
                started = True
            if started:
                yield segment, line, line.body, said
    if record.form == "stack":
        for line in record.lines:
            yield record.segments[0] if record.segments else None, line, line.body, plain


_FRAME = frozenset(("frame",))
