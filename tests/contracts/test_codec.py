"""The codec: what goes out comes in again, and what is not understood is an error that names the key."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.contracts import (
    CheckpointInfo,
    ErrorInfo,
    Event,
    ExitRecord,
    JobSpec,
    Limits,
    Process,
    Progress,
    ProgressPattern,
    ResidentInfo,
    SessionInfo,
    Snapshot,
    StageInfo,
    StartRecord,
    State,
    WorkerShares,
    decode_journal,
    dumps,
    encode_event,
    format_progress,
    from_dict,
    parse_line,
    to_dict,
)
from dflash_ops.errors import ContractError

TEXT = st.text(max_size=20)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(0, 2**53)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PROCESS = st.builds(Process, COUNT, COUNT)
EXIT = st.builds(
    ExitRecord,
    attempt=COUNT,
    rc=st.none() | st.integers(0, 255),
    signal=st.none() | TEXT,
    t=NUMBER,
    duration_s=NUMBER,
    requested=st.none() | st.sampled_from(["stop", "INT", "TERM"]),
    log_bytes=COUNT,
    detail=TEXT,
)
EVENT = st.builds(
    Event,
    seq=COUNT,
    t=NUMBER,
    event=TEXT,
    actor=TEXT,
    attempt=st.none() | COUNT,
    data=st.dictionaries(TEXT, JSON, max_size=3),
)
PROGRESS = st.builds(
    Progress,
    t=NUMBER,
    **{f.name: st.none() | NUMBER for f in dataclasses.fields(Progress) if f.type == "float | None"},
    **{f.name: st.none() | COUNT for f in dataclasses.fields(Progress) if f.type == "int | None"},
)
SNAPSHOT = st.builds(
    Snapshot,
    job=TEXT,
    t=NUMBER,
    state=st.sampled_from(State),
    since=NUMBER,
    detail=TEXT,
    seq=COUNT,
    stage=st.none() | st.builds(StageInfo, TEXT, st.none() | COUNT, st.none() | COUNT, TEXT),
    attempt=st.none() | COUNT,
    progress=st.none() | PROGRESS,
    rates=st.dictionaries(TEXT, st.none() | NUMBER, max_size=3),
    workers=st.dictionaries(TEXT, st.builds(WorkerShares, wait=st.none() | NUMBER, life=COUNT), max_size=3),
    exit=st.none() | EXIT,
    error=st.none() | st.builds(ErrorInfo, TEXT, TEXT, st.none() | NUMBER),
    last_event=st.none() | EVENT,
    checkpoint=st.none() | st.builds(CheckpointInfo, COUNT, TEXT, NUMBER),
    session=st.none() | st.builds(SessionInfo, TEXT, TEXT, st.booleans()),
    resident=st.none() | st.builds(ResidentInfo, st.booleans(), st.none() | COUNT),
    warnings=st.lists(TEXT, max_size=3).map(tuple),
)
JOB = st.builds(
    JobSpec,
    job=TEXT,
    root=TEXT,
    session=TEXT,
    argv=st.lists(TEXT, max_size=4).map(tuple),
    checkpoints=TEXT,
    env=st.dictionaries(TEXT, TEXT, max_size=3),
    secret_env=st.lists(TEXT, max_size=3).map(tuple),
    files=st.dictionaries(TEXT, TEXT, max_size=2),
    release=st.none() | TEXT,
    finished_rc=st.lists(st.integers(0, 255), max_size=3).map(tuple),
    limits=st.builds(Limits, NUMBER, NUMBER, NUMBER, NUMBER),
)
START = st.builds(
    StartRecord,
    attempt=COUNT,
    job=TEXT,
    release=st.none() | TEXT,
    argv=st.lists(TEXT, max_size=3).map(tuple),
    cwd=TEXT,
    t=NUMBER,
    wrapper=PROCESS,
    launcher=PROCESS,
    env_names=st.lists(TEXT, max_size=3).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(SNAPSHOT, JOB, START, EXIT, EVENT))
def test_what_goes_out_comes_in_again(value: Any) -> None:
    line = dumps(value)
    assert "\n" not in line
    assert from_dict(type(value), json.loads(line)) == value


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([Snapshot, JobSpec, StartRecord, ExitRecord, Event]), JSON)
def test_any_json_is_a_record_or_a_named_error(cls: type[Any], data: Any) -> None:
    try:
        from_dict(cls, data)
    except ContractError as error:
        assert error.where


@settings(max_examples=60, deadline=None)
@given(SNAPSHOT, st.data())
def test_a_wrong_type_anywhere_names_its_key(snapshot: Snapshot, data: st.DataObject) -> None:
    form = to_dict(snapshot)
    key = data.draw(st.sampled_from(sorted(form)))
    form[key] = {"schema": "x", "not": object} if not isinstance(form[key], dict) else 5
    if key == "schema":
        form[key] = "one"
    with pytest.raises(ContractError) as caught:
        from_dict(Snapshot, form)
    assert key in caught.value.where


def test_what_json_cannot_say_becomes_null() -> None:
    assert from_dict(Progress, json.loads('{"t": 1, "loss": NaN, "tau": Infinity}')) == Progress(t=1.0)
    with pytest.raises(ContractError, match="finite"):
        from_dict(Progress, json.loads('{"t": NaN}'))
    assert json.loads(dumps(Progress(t=1.0, loss=float("nan"), tau=float("inf"))))["loss"] is None
    assert json.loads(dumps({"a": [float("-inf")]})) == {"a": [None]}


@settings(max_examples=40, deadline=None)
@given(st.lists(EVENT, max_size=4), st.data())
def test_a_journal_cut_at_any_byte_keeps_all_events_before_the_cut(events: list[Event], data: st.DataObject) -> None:
    lines = [encode_event(e) for e in events]
    raw = b"".join(lines)
    cut = data.draw(st.integers(0, len(raw)))
    read, torn = decode_journal(raw[:cut])
    whole = sum(1 for i in range(len(lines)) if sum(map(len, lines[: i + 1])) - 1 <= cut)
    assert read == events[:whole]
    assert torn <= 1


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=200))
def test_no_line_of_text_breaks_the_reader_of_progress_lines(text: str) -> None:
    for line in (text, f"dflash step={text}", f"dflash {text}"):
        found = parse_line(line)
        if found is not None:
            found.progress(1.0)


@given(st.integers(0, 10**9), st.floats(0, 1e9), st.floats(1e-9, 1))
@settings(max_examples=40, deadline=None)
def test_a_line_written_is_a_line_read(step: int, loss: float, lr: float) -> None:
    line = parse_line(format_progress(step=f"{step}/500", loss=repr(loss), lr=repr(lr), life=0))
    assert line is not None
    progress = line.progress(3.0)
    assert (progress.step, progress.total, progress.loss, progress.lr) == (step, 500, loss, lr)


def test_a_foreign_line_with_thousands_is_a_number() -> None:
    pattern = ProgressPattern(r"it (?P<step>[\d,]+) of (?P<total>[\d,]+), loss=(?P<loss>\S+)")
    line = pattern.parse("2025-11-29 it 1,200 of 5,000, loss=2.5 more")
    assert line is not None
    assert (line.progress(1.0).step, line.progress(1.0).total, line.progress(1.0).loss) == (1200, 5000, 2.5)
    assert pattern.parse("nothing of it") is None


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(?P<step>", "no regular expression"),
        (r"(?P<iter>\d+)", "unknown groups: iter"),
        (r"\d+", "no group named step"),
    ],
)
def test_a_bad_pattern_says_what_to_write(pattern: str, says: str) -> None:
    with pytest.raises(ContractError, match=says):
        ProgressPattern(pattern)
