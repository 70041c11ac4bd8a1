"""The examples of playbooks as tests: each must be diagnosed as its own kind and no other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.triage.diagnose import Triage
from dflash_ops.triage.types import Source


@dataclass(frozen=True)
class Example:
    """One example of a playbook: what must come out for its text. None where the playbook does not say."""

    family: str
    kind: str
    text: str
    cause: str | None = None
    rank: int | None = None
    frame: str | None = None
    counter: bool = False
    noise: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}/{self.kind}" + (" counterexample" if self.counter else "")


def examples(documents: Iterable[Mapping[str, Any]]) -> list[Example]:
    """All examples and counterexamples of decoded playbooks, in their order."""
    out: list[Example] = []
    for document in documents:
        family = str(document.get("family", "?"))
        for table in document.get("kind", ()):
            kind = str(table.get("id", "?"))
            noise = table.get("role") == "noise"
            for e in table.get("example", ()):
                wanted = (e.get("cause"), e.get("rank"), e.get("frame"))
                out.append(Example(family, str(e.get("kind", kind)), str(e.get("text", "")), *wanted, noise=noise))
            out.extend(
                Example(family, str(e.get("kind", "healthy")), str(e.get("text", "")), counter=True)
                for e in table.get("counterexample", ())
            )
    return out


def check(triage: Triage, example: Example) -> list[str]:
    """What is wrong with the diagnosis of an example; empty where it is right."""
    diagnosis = triage.diagnose([Source(example.name, example.text.lstrip("\n").encode())])
    return faults(example, diagnosis)


def faults(example: Example, d: Diagnosis) -> list[str]:
    """Differences between what an example wants and a diagnosis."""
    out: list[str] = []
    if example.noise and d.kind == "healthy" and example.kind in d.also:
        return out  # a kind that ends nothing is mentioned, never the diagnosis
    if d.kind != example.kind:
        out.append(f"wants {example.kind}, is {d.kind} ({(d.root_exception or '-')[:90]})")
        return out
    if example.cause and not same_text(d.root_exception, example.cause):
        out.append(f"cause: wants {example.cause[:90]!r}, is {(d.root_exception or '-')[:120]!r}")
    if example.rank is not None and d.root_rank != example.rank:
        out.append(f"rank: wants {example.rank}, is {d.root_rank}")
    if example.frame and not same_frame(d.user_frame, example.frame):
        out.append(f"frame: wants {example.frame}, is {d.user_frame}")
    return out


def same_text(found: str | None, wanted: str) -> bool:
    """Whether the found line is, begins like, or contains the wanted one, blanks aside."""
    f, w = (re.sub(r"\s+", "", t or "") for t in (found, wanted))
    return bool(f) and bool(w) and (w in f or (len(f) >= 12 and w.startswith(f)))


def same_frame(found: str | None, wanted: str) -> bool:
    """Whether two `path:line` name the same file and line; of the path the shorter one's parts count."""
    if not found:
        return False
    (fp, _, fl), (wp, _, wl) = found.rpartition(":"), wanted.rpartition(":")
    return fl == wl and (fp == wp or fp.endswith("/" + wp) or wp.endswith("/" + fp))
