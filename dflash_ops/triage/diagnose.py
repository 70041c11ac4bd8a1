"""The one entry: `diagnose(sources, playbooks, context) -> Diagnosis`. Pure: no files, no clock, no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.contracts.progress import ProgressPattern
from dflash_ops.triage import judge
from dflash_ops.triage.case import Case, Text
from dflash_ops.triage.match import Matcher
from dflash_ops.triage.parse_other import ERRORISH
from dflash_ops.triage.playbook import Playbooks, compile_playbooks
from dflash_ops.triage.read import read
from dflash_ops.triage.report import write
from dflash_ops.triage.types import Finding, Source

_EACH = 80  # findings of one kind and writer that are judged


class Triage:
    """Compiled playbooks, ready for many texts.

    Args:
        playbooks: decoded documents in the form of docs/playbooks.md, or what `compile_playbooks` made of them.
    """

    def __init__(self, playbooks: Playbooks | Iterable[Mapping[str, Any]]) -> None:
        self.playbooks = playbooks if isinstance(playbooks, Playbooks) else compile_playbooks(playbooks)
        self._matcher = Matcher(self.playbooks)
        self._needles = self._matcher.needles()

    def diagnose(self, sources: Sequence[Source], context: Mapping[str, Any] | None = None) -> Diagnosis:
        """The judgement over one job's texts, first to last as they should be believed.

        Args:
            sources: texts of one attempt (one log, or a log with its rank logs, error.json files, kernel lines ...).
            context: what the caller knows: `torch` ("2.13.0"), `threads` (bool), `attention_shape` [batch, heads,
                queries, keys], `overlay` (a change of ours is active), `progress` (a job's own pattern),
                `missing` (names of sources that could not be had).

        Raises:
            ContractError: `context["progress"]` is no usable pattern.
        """
        context = context or {}
        pattern = context.get("progress")
        own = ProgressPattern(str(pattern)) if pattern else None
        missing = [str(m) for m in context.get("missing", ())]
        case = Case(context=context, missing=missing, kinds=self.playbooks.kinds)
        for index, source in enumerate(sources):
            case.texts.append(read(source, index, self._matcher, self._needles, own))
        raw: list[Finding] = []
        for text in case.texts:
            found = _thinned(self._findings(text))
            text.marked = {id(finding.line) for finding in found}
            for finding in found:
                finding.stamp = text.stamp
            raw.extend(found)
        case.findings = raw
        for finding in raw:
            judge.mark_soft(case.texts[finding.source], finding.record)
        for finding in raw:
            judge.mark_outlived(case, finding)
        kept = judge.reduce(case, raw)
        case.findings = kept
        return write(case, kept, judge.choose(case, kept))

    def _findings(self, text: Text) -> list[Finding]:
        found: list[Finding] = []
        for record in sorted(text.records, key=lambda r: r.first):
            if record.form == "loose":
                for line in record.lines:
                    tags = set(text.summary.tags(line))
                    if "other" in tags:
                        continue
                    if line.kernel:
                        tags.add("kernel")
                    if ERRORISH.search(line.text) or line.level in ("E", "F"):
                        tags.add("exception")
                    part = [f for f in self._matcher.record(record, frozenset(tags)) if f.line is line]
                    found.extend(part)
                continue
            tags = set()
            for line in record.lines:
                tags |= text.summary.tags(line) - {"other"}
            found.extend(self._matcher.record(record, frozenset(tags)))
        for line, _ in text.steps:
            found.extend(self._matcher.progress(line, text.index))
        return found


def _thinned(findings: list[Finding]) -> list[Finding]:
    """Of a text that says the same thousands of times: the first and the last few of each kind and writer."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind.id, finding.record.stream), []).append(finding)
    if all(len(group) <= _EACH for group in groups.values()):
        return findings
    keep = {id(f) for group in groups.values() for f in [*group[: _EACH // 2], *group[-_EACH // 2 :]]}
    return [f for f in findings if id(f) in keep]


def diagnose(
    sources: Sequence[Source | tuple[str, bytes | Iterable[bytes], str]],
    playbooks: Playbooks | Iterable[Mapping[str, Any]],
    context: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """One text, one answer. For many texts make one `Triage` and keep it.

    Args:
        sources: (name, bytes or an iterator of chunks, kind) each; kinds: log, pane, kernel, error_json, exit_json.
        playbooks: decoded documents, or compiled ones.
        context: see `Triage.diagnose`.
    """
    given = [s if isinstance(s, Source) else Source(*s) for s in sources]
    return Triage(playbooks).diagnose(given, context)
