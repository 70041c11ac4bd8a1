"""Python's help texts as training text and prompts, with some topics held out whole.

Topics repeat each other (`specialnames` holds most of `attribute-access`), so holding out topics is not enough: a
paragraph of a held-out topic that also stands in a training topic is dropped, and so is a held-out prompt of which
either half occurs in the training text.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.errors import DataError

#: One topic in this many is held out (chosen by the hash of its name, so that an added topic moves no other one).
HELD_OUT_ONE_IN = 10
#: Characters of a prompt. All are ASCII, so this is also its number of tokens.
PROMPT_CHARS = 64


@dataclass(frozen=True)
class Text:
    """`train` is what the target learns and training prompts are cut from; `held_out` has prompts only."""

    train: str
    held_out: str

    def digest(self) -> str:
        return hashlib.sha256(f"{self.train}\0{self.held_out}".encode()).hexdigest()


def python_topics() -> Mapping[str, str]:
    """Python's help topics by name.

    Raises:
        DataError: this Python came without them (some minimal distributions strip `pydoc_data`).
    """
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise DataError(
            f"this Python has no help texts ({error}); the demo target is trained from them",
            "module pydoc_data.topics",
            "install the full standard library (Debian and Ubuntu: libpython3-stdlib), or use another Python",
        ) from error
    found = {name: text for name, text in vars(topics).get("topics", {}).items() if isinstance(text, str)}
    if sum(map(len, found.values())) < 100_000:
        raise DataError(
            f"this Python's help texts hold only {sum(map(len, found.values()))} characters",
            "module pydoc_data.topics",
            "use a Python with its full help texts (0.4 MB and more)",
        )
    return found


def split(topics: Mapping[str, str]) -> Text:
    """Training text and held-out text: no paragraph is in both."""
    train: list[str] = []
    held: list[str] = []
    for name in sorted(topics):
        chosen = int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0
        (held if chosen else train).extend(_paragraphs(topics[name]))
    in_train = set(train)
    return Text("\n\n".join(dict.fromkeys(train)), "\n\n".join(p for p in dict.fromkeys(held) if p not in in_train))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            yield paragraph.rstrip()


def prompts(text: Text, train: int, held_out: int, seed: int) -> tuple[list[str], list[str]]:
    """Prompts of PROMPT_CHARS ASCII characters, each starting at a word, all different.

    Returns:
        `train` prompts from the training text and `held_out` from the held-out text, of which neither half stands in
        the training text.

    Raises:
        DataError: the text has too few different places to start at.
    """
    half = PROMPT_CHARS // 2
    made = _cut(text.train, train, random.Random(f"train {seed}"), lambda _: True)
    kept = _cut(
        text.held_out,
        held_out,
        random.Random(f"held out {seed}"),
        lambda p: p[:half] not in text.train and p[half:] not in text.train,
    )
    return made, kept


def _cut(text: str, count: int, order: random.Random, wanted: object) -> list[str]:
    assert callable(wanted)
    starts = [i for i in range(1, len(text) - PROMPT_CHARS) if text[i - 1].isspace() and not text[i].isspace()]
    order.shuffle(starts)
    found: dict[str, None] = {}
    for start in starts:
        if len(found) == count:
            break
        prompt = text[start : start + PROMPT_CHARS]
        if prompt.isascii() and wanted(prompt):
            found[prompt] = None
    if len(found) < count:
        raise DataError(
            f"the text has only {len(found)} different prompts, {count} were asked for",
            "pydoc_data.topics",
            "ask for fewer prompts",
        )
    return list(found)
