"""Samples: what is refused, how it is named, and that what is read later is what was scanned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.data import SampleReader, scan
from trainer.errors import DataError

OK = '{"input_ids": [1, 2, 3, 4], "prompt_length": 1}'


def write(path: Path, *lines: str) -> Path:
    path.write_bytes(b"".join(line.encode("utf-8", "surrogateescape") + b"\n" for line in lines))
    return path


def read(path: Path, bad: int = 0, longest: int = 64):  # type: ignore[no-untyped-def]
    return scan(path, vocab_size=260, max_length=longest, max_bad_lines=bad)


def test_both_forms_are_read_back_by_their_place(tmp_path: Path) -> None:
    file = write(
        tmp_path / "d.jsonl",
        OK,
        '{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "note": "é"}',
        '{"input_ids": [9, 9, 9, 9, 9, 9], "loss_mask": [1, 1, 1, 0, 0, 0]}',
    )
    index = read(file, longest=4)
    assert list(index.ids) == [0, 1, 2]
    assert list(index.lengths) == [4, 3, 4]
    assert index.cut == 1
    reader = SampleReader(str(file), index.size, index.mtime_ns, 4)
    samples = reader.read([index.place(i) for i in (2, 0, 1)])
    assert [s.id for s in samples] == [2, 0, 1]
    assert samples[0].input_ids == [9, 9, 9, 9]
    assert samples[0].loss_mask == [1, 1, 1, 0]
    assert samples[1].loss_mask == [0, 1, 1, 1]
    assert samples[2].loss_mask == [0, 1, 1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON"),
        ("", "empty line"),
        ("[1, 2]", "not an object"),
        ("\udcff", "not UTF-8"),
        ("[" * 5000, "no JSON"),
        ('{"prompt_length": 1}', "no list of input_ids"),
        ('{"messages": []}', "text in a file of tokens"),
        ('{"input_ids": [], "prompt_length": 0}', "input_ids is empty"),
        ('{"input_ids": [1, 2.5], "prompt_length": 0}', "whole numbers"),
        ('{"input_ids": [1, true], "prompt_length": 0}', "whole numbers"),
        ('{"input_ids": [1, 260], "prompt_length": 0}', "token 260 is outside the target's vocabulary of 260"),
        ('{"input_ids": [1, -1], "prompt_length": 0}', "token -1"),
        ('{"input_ids": [1, 2]}', "neither loss_mask nor prompt_length"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask has 1 entries, input_ids has 2"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "something else than 0 and 1"),
        ('{"input_ids": [1, 2], "prompt_length": 3}', "prompt_length 3"),
        ('{"input_ids": [1, 2], "prompt_length": 1}', "nothing to train"),
        ('{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 0]}', "nothing to train"),
    ],
)
def test_a_bad_line_is_named_and_refused_or_skipped(tmp_path: Path, line: str, reason: str) -> None:
    file = write(tmp_path / "d.jsonl", OK, line, OK)
    with pytest.raises(DataError) as caught:
        read(file)
    assert reason in caught.value.what
    assert caught.value.where == f"{file}:2"
    assert caught.value.exit_code == 6
    index = read(file, bad=1)
    assert list(index.ids) == [0, 2]
    assert index.bad_count == 1
    assert index.bad[0].number == 1
    assert reason in index.bad[0].reason


def test_too_many_bad_lines_are_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", OK, *["{"] * 30)
    with pytest.raises(DataError, match="30 bad lines in all, 3 allowed"):
        read(file, bad=3)
    assert len(read(file, bad=30).bad) == 20


def test_no_file_and_nothing_to_train(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "absent")
    with pytest.raises(DataError, match="no sample"):
        read(write(tmp_path / "empty.jsonl"))


def test_a_file_that_changed_under_the_run_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", OK, OK)
    index = read(file)
    write(file, OK, OK, OK)
    with pytest.raises(DataError, match="changed while the run"):
        SampleReader(str(file), index.size, index.mtime_ns, 64)


def test_the_last_line_may_lack_its_newline(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(OK + "\n" + json.dumps({"input_ids": [7, 8, 9], "prompt_length": 0}))
    index = read(file)
    reader = SampleReader(str(file), index.size, index.mtime_ns, 64)
    assert reader.read([index.place(1)])[0].input_ids == [7, 8, 9]
    with pytest.raises(KeyError):
        index.place(2)
