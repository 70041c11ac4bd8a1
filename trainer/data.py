"""Tokenised samples in JSONL: one scan that refuses what cannot be trained, then reads by byte offset.

A line is `{"input_ids": [...], "loss_mask": [...]}` or `{"input_ids": [...], "prompt_length": n}` (everything from
token n on is supervised). A sample's id is its 0-based line number; other keys are ignored. Conversations are made
into such lines first (trainer.corpus), one for one; a line that could not be made is `{"refused": reason}` there.
Every line that cannot be used is named, counted and skipped, up to `max_bad_lines`. Imports no torch: launcher and
`check` scan, targets read.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import DataError

#: Bad lines whose text is kept for the message; the others are only counted.
NAMED = 20


@dataclass(frozen=True)
class Sample:
    """One training sequence, already cut to `max_length`.

    Attributes:
        id: 0-based line number.
        input_ids: tokens. loss_mask: 1 where the token is supervised, as long as `input_ids`.
    """

    id: int
    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class BadLine:
    """A line that is not used: 0-based number, and why."""

    number: int
    reason: str


@dataclass(frozen=True)
class DataIndex:
    """Where every accepted sample lies.

    Attributes:
        path: the file. source: the file that people know, whose line numbers these are. size: bytes.
        mtime_ns: its time of change, so that a worker notices another file.
        sha256: of all its bytes (empty if the scan had a limit).
        ids: accepted line numbers, ascending. offsets, sizes: of their lines, in bytes. lengths: in tokens, cut.
        bad: the first bad lines. bad_count: how many there are.
        cut: samples longer than max_length.
        whole: False if the scan stopped at its limit.
    """

    path: str
    source: str
    size: int
    mtime_ns: int
    sha256: str
    ids: array[int]
    offsets: array[int]
    sizes: array[int]
    lengths: array[int]
    bad: tuple[BadLine, ...]
    bad_count: int
    cut: int
    whole: bool

    def position(self, sample_id: int) -> int:
        """Index of a sample in the arrays.

        Raises:
            KeyError: it was not accepted.
        """
        from bisect import bisect_left

        at = bisect_left(self.ids, sample_id)
        if at == len(self.ids) or self.ids[at] != sample_id:
            raise KeyError(sample_id)
        return at

    def place(self, sample_id: int) -> tuple[int, int, int]:
        """(id, byte offset, bytes) of a sample: all that a target needs to read it."""
        at = self.position(sample_id)
        return sample_id, self.offsets[at], self.sizes[at]


def scan(
    path: str | Path,
    *,
    vocab_size: int,
    max_length: int,
    max_bad_lines: int,
    limit_lines: int | None = None,
    source: str | None = None,
) -> DataIndex:
    """Reads the whole file once.

    Args:
        path: JSONL. vocab_size: of the target. max_length: in tokens; longer samples are cut, not refused.
        max_bad_lines: more than these are an error.
        limit_lines: look at the first lines only (`check` on a large file).
        source: the file that `path` was made from, line for line, and that is named in its place.

    Raises:
        DataError: no such file, too many bad lines, or nothing left to train on.
    """
    file = Path(path)
    named = source or str(file)
    ids, offsets, sizes, lengths = array("q"), array("q"), array("q"), array("q")
    bad: list[BadLine] = []
    bad_count = cut = offset = 0
    whole = True
    digest = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            for number, line in enumerate(opened):
                if limit_lines is not None and number >= limit_lines:
                    whole = False
                    break
                digest.update(line)
                try:
                    ids_of, mask = _parse(line, vocab_size)
                    length = min(len(ids_of), max_length)
                    _trainable(mask, length)
                except ValueError as error:
                    bad_count += 1
                    if len(bad) < NAMED:
                        bad.append(BadLine(number, str(error)))
                else:
                    cut += len(ids_of) > max_length
                    ids.append(number)
                    offsets.append(offset)
                    sizes.append(len(line))
                    lengths.append(length)
                offset += len(line)
    except OSError as error:
        raise DataError(f"the data cannot be read: {error}", named, "correct data.path") from error
    if bad_count > max_bad_lines:
        first = bad[0]
        more = f" ({bad_count} bad lines in all, {max_bad_lines} allowed)" if bad_count > 1 or max_bad_lines else ""
        raise DataError(
            f"line {first.number + 1}: {first.reason}{more}",
            f"{named}:{first.number + 1}",
            "correct the lines, or raise data.max_bad_lines to skip them",
        )
    if not ids:
        raise DataError("there is no sample to train on", named, "correct data.path, or the lines of the file")
    found = digest.hexdigest() if whole else ""
    return DataIndex(
        path=str(file),
        source=named,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        sha256=found,
        ids=ids,
        offsets=offsets,
        sizes=sizes,
        lengths=lengths,
        bad=tuple(bad),
        bad_count=bad_count,
        cut=cut,
        whole=whole,
    )


class SampleReader:
    """Reads samples by their place in an open file.

    Raises:
        DataError: the file is gone, or is not the one that was scanned.
    """

    def __init__(self, path: str, size: int, mtime_ns: int, max_length: int) -> None:
        self._path = path
        self._max_length = max_length
        try:
            self._file = Path(path).open("rb")  # noqa: SIM115  lives as long as the worker
        except OSError as error:
            raise DataError(f"the data cannot be read: {error}", path, "put the file back") from error
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns) != (size, mtime_ns):
            self._file.close()
            raise DataError("the data changed while the run was going", path, "start a new run on the new data")

    def read(self, places: Sequence[Sequence[int]]) -> list[Sample]:
        """Samples at `DataIndex.place` triples, in their order."""
        samples = []
        for sample_id, offset, size in places:
            line = os.pread(self._file.fileno(), size, offset)
            try:
                ids, mask = _parse(line, None)
            except ValueError as error:
                spot = f"{self._path}:{sample_id + 1}"
                raise DataError(f"line {sample_id + 1} changed: {error}", spot, "start a new run") from error
            samples.append(Sample(sample_id, ids[: self._max_length], mask[: self._max_length]))
        return samples


def _parse(line: bytes, vocab_size: int | None) -> tuple[list[int], list[int]]:
    """Tokens and mask of one line.

    Args:
        line: UTF-8 JSON. vocab_size: ids are checked against it unless None.

    Raises:
        ValueError: with the reason, for people.
    """
    entry = decode(line)
    if isinstance(entry.get("refused"), str):
        raise ValueError(entry["refused"])
    ids = entry.get("input_ids")
    if not isinstance(ids, list):
        text = any(k in entry for k in ("messages", "conversations", "prompt"))
        raise ValueError("no list of input_ids" + (": text in a file of tokens, keep them apart" if text else ""))
    if not ids:
        raise ValueError("input_ids is empty")
    if not all(type(i) is int for i in ids):
        raise ValueError("input_ids holds something else than whole numbers")
    if vocab_size is not None and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise ValueError(f"token {wrong} is outside the target's vocabulary of {vocab_size}")
    return ids, _mask(entry, len(ids))


def decode(line: bytes) -> dict[str, Any]:
    """The object of one line.

    Raises:
        ValueError: with the reason, for people.
    """
    if not line.strip():
        raise ValueError("empty line")
    try:
        entry: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    except RecursionError:
        raise ValueError("no JSON that can be read: nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    return entry


def _mask(entry: dict[str, Any], length: int) -> list[int]:
    mask, prompt = entry.get("loss_mask"), entry.get("prompt_length")
    if mask is not None:
        if not isinstance(mask, list) or len(mask) != length:
            found = f"{len(mask)} entries" if isinstance(mask, list) else repr(mask)
            raise ValueError(f"loss_mask has {found}, input_ids has {length}")
        if not all(isinstance(m, (int, float)) and m in (0, 1) for m in mask):
            raise ValueError("loss_mask holds something else than 0 and 1")
        return [int(m) for m in mask]
    if prompt is None:
        raise ValueError("neither loss_mask nor prompt_length")
    if type(prompt) is not int or not 0 <= prompt <= length:
        raise ValueError(f"prompt_length {prompt!r} is not within 0..{length}")
    return [0] * prompt + [1] * (length - prompt)


def _trainable(mask: list[int], length: int) -> None:
    """An anchor needs itself and the next token supervised."""
    if not any(mask[i] and mask[i + 1] for i in range(length - 1)):
        raise ValueError(f"no two supervised tokens in a row within {length} tokens: nothing to train")
