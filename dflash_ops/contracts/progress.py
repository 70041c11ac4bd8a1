"""Progress lines: ours, and a foreign trainer's by its own regular expression (docs/contracts.md, Progress line)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from dflash_ops.contracts.snapshot import Progress
from dflash_ops.errors import ContractError

#: Keys of a line that carry a number, in the order in which they are printed.
NUMBERS = ("epoch", "loss", "acc", "tau", "block_tok_s", "ctx_tok_s", "rate", "lr", "eta_s")

#: Groups that a foreign trainer's pattern may name.
GROUPS = ("step", "total", "epoch", "loss", "acc", "tau", "rate", "lr", "eta_s")

_PAIR = re.compile(r"([a-z_][a-z0-9_]*)=(\S+)")
_PREFIX = "dflash "
_KINDS = frozenset({"step", "stage", "event"})


@dataclass(frozen=True)
class ProgressLine:
    """What one line said: `kind` is `step`, `stage` or `event`; `fields` are its pairs as text."""

    kind: str
    fields: Mapping[str, str]

    def number(self, key: str) -> float | None:
        try:
            return float(self.fields[key])
        except (KeyError, ValueError):
            return None

    def integer(self, key: str) -> int | None:
        value = self.number(key)
        return int(value) if value is not None and value == value and abs(value) < 2**53 else None

    @property
    def path(self) -> str:
        """The path that an event names, empty without one; blanks and `%` of it stand percent-encoded in the line."""
        return unquote(self.fields.get("path", ""))

    def progress(self, t: float) -> Progress:
        """The numbers of a `step` line, read at time `t`."""
        step, _, total = self.fields.get("step", "").partition("/")
        ready, _, slots = self.fields.get("ring", "").partition("/")
        return Progress(
            t=t,
            step=_integer(step),
            total=_integer(total or self.fields.get("total", "")),
            ring_ready=_integer(ready),
            ring_slots=_integer(slots),
            **{key: self.number(key) for key in NUMBERS},
        )


def _integer(text: str) -> int | None:
    digits = text.replace(",", "").replace("_", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None


def parse_line(line: str) -> ProgressLine | None:
    """One of our own lines, or None. `line` is clean text; a rank prefix before `dflash ` is allowed."""
    at = line.find(_PREFIX)
    if at < 0 or (at > 0 and line[at - 1] not in " :]"):
        return None
    fields = dict(_PAIR.findall(line[at + len(_PREFIX) :]))
    # The first of them decides: `event=checkpoint step=100` is an event.
    for key in fields:
        if key in _KINDS:
            return ProgressLine(key, fields)
    return None


def format_progress(**fields: object) -> str:
    """`dflash key=value ...`, one line; a float is given as it should be read (already a string, or repr)."""
    return _PREFIX + " ".join(f"{k}={v}" for k, v in fields.items() if v is not None)


class ProgressPattern:
    """A foreign trainer's progress lines.

    Raises:
        ContractError: the expression does not compile, names an unknown group, or has no `step` group.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._regex = re.compile(pattern)
        except re.error as error:
            raise ContractError(f"the progress pattern is no regular expression: {error}", pattern) from None
        names = set(self._regex.groupindex)
        if unknown := sorted(names - set(GROUPS)):
            raise ContractError(
                f"the progress pattern names unknown groups: {', '.join(unknown)}",
                pattern,
                f"use some of {', '.join(GROUPS)}",
            )
        if "step" not in names:
            raise ContractError(
                "the progress pattern has no group named step", pattern, "write (?P<step>\\d+) where the step stands"
            )

    def parse(self, line: str) -> ProgressLine | None:
        match = self._regex.search(line)
        if match is None:
            return None
        return ProgressLine("step", {k: v for k, v in match.groupdict().items() if v is not None})
