"""A job's texts for triage, each of which may be missing: then it is said to be missing, and the others are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflash_ops.errors import DflashError
from dflash_ops.triage import SOURCE_KINDS, Source

#: In which order texts are believed where nothing else tells: the worker's own report first, the pane last.
ORDER = ("error_json", "kernel", "log", "pane", "exit_json")


@dataclass(frozen=True)
class Wanted:
    """One text to fetch: `read` gives its bytes (whole or in chunks), or raises DflashError or OSError.

    Attributes:
        name: what a person calls it ("attempt 3, log", "host, dmesg").
        kind: one of triage.SOURCE_KINDS.
        read: fetches it; called once.
    """

    name: str
    kind: str
    read: Callable[[], bytes | Iterable[bytes] | None]


@dataclass(frozen=True)
class Missing:
    """A text that could not be had, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def gather(wanted: Sequence[Wanted]) -> tuple[list[Source], list[Missing]]:
    """Fetch every text; what fails is named, never taken for an empty text.

    Returns:
        The sources in the order in which they are believed, ready for `Triage.diagnose`, and what is missing; hand the
        latter on as `context["missing"]`, so that the diagnosis says it.
    """
    sources: list[Source] = []
    missing: list[Missing] = []
    for item in wanted:
        if item.kind not in SOURCE_KINDS:
            raise ValueError(f"{item.name}: kind {item.kind!r} is none of {', '.join(SOURCE_KINDS)}")
        try:
            data = item.read()
        except DflashError as error:
            missing.append(Missing(item.name, error.what))
            continue
        except OSError as error:
            missing.append(Missing(item.name, error.strerror or str(error)))
            continue
        if data is None:
            missing.append(Missing(item.name, "not there"))
            continue
        sources.append(Source(item.name, data, item.kind))
    sources.sort(key=lambda source: ORDER.index(source.kind))
    return sources, missing
