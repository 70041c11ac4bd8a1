"""Every contract has a golden file that must load for ever (docs/contracts.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.contracts import (
    Decision,
    ErrorInfo,
    ExitRecord,
    Finding,
    JobSpec,
    Ledger,
    Overlay,
    Progress,
    Release,
    Snapshot,
    StartRecord,
    State,
    StopRecord,
    WorkerShares,
    decode_journal,
    dumps,
    encode_event,
    from_dict,
    parse_line,
    release_id,
)
from dflash_ops.errors import ContractError
from dflash_ops.resident.daemon import LoopRecord
from dflash_ops.resident.scan import MetricsScanner
from dflash_ops.supervise.learned import Learned

DATA = Path(__file__).parent.parent / "data" / "contracts"
DOC = Path(__file__).parent.parent.parent / "docs" / "contracts.md"

RECORDS: dict[str, type[Any]] = {
    "job.json": JobSpec,
    "job_policy.json": JobSpec,
    "overlay.json": Overlay,
    "decision.json": Decision,
    "ledger.json": Ledger,
    "finding.json": Finding,
    "learned.json": Learned,
    "start.json": StartRecord,
    "exit.json": ExitRecord,
    "stop.json": StopRecord,
    "resident.json": LoopRecord,
    "release.json": Release,
    "snapshot.json": Snapshot,
    "snapshot_crashed.json": Snapshot,
    "snapshot_watch.json": Snapshot,
}


def _load(name: str) -> dict[str, Any]:
    data = json.loads((DATA / name).read_text())
    assert isinstance(data, dict)
    return data


@pytest.fixture(params=sorted(RECORDS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_golden_file_loads_and_goes_round(name: str) -> None:
    record = from_dict(RECORDS[name], _load(name))
    again = from_dict(RECORDS[name], json.loads(dumps(record)))
    assert again == record


def test_keys_of_a_later_version_are_ignored(name: str) -> None:
    data = _load(name)
    assert from_dict(RECORDS[name], {**data, "a_later_key": {"deep": [1]}}) == from_dict(RECORDS[name], data)


def test_a_later_schema_is_refused_with_advice(name: str) -> None:
    with pytest.raises(ContractError, match="written in schema 99") as caught:
        from_dict(RECORDS[name], {**_load(name), "schema": 99})
    assert "newer dflash-ops" in caught.value.next


def test_all_that_the_file_says_is_read(name: str) -> None:
    """A key that the golden file has and the dataclass lost would be ignored silently."""
    _covers(json.loads(dumps(from_dict(RECORDS[name], _load(name)))), _load(name), name)


def _covers(got: Any, golden: Any, where: str) -> None:
    if isinstance(golden, dict):
        for key, value in golden.items():
            assert key in got, f"{where}: {key} is lost"
            _covers(got[key], value, f"{where}.{key}")
    else:
        assert got == golden, where


def test_an_old_exit_record_without_the_newer_keys_loads() -> None:
    old = {"attempt": 1, "rc": 0, "signal": None, "t": 5, "duration_s": 1}
    record = from_dict(ExitRecord, old)
    assert (record.requested, record.log_lost_bytes, record.state()) == (None, 0, State.FINISHED)


def test_every_golden_progress_line_is_understood() -> None:
    lines = (DATA / "progress.txt").read_text().splitlines()
    assert len(lines) == 22
    kinds = []
    for line in lines:
        found = parse_line(line)
        assert found is not None, line
        kinds.append(found.kind)
    assert kinds == ["stage"] * 3 + ["step"] * 4 + ["stage"] + ["event"] * 14


def test_the_golden_step_line_says_these_numbers() -> None:
    line = parse_line((DATA / "progress.txt").read_text().splitlines()[4])
    assert line is not None
    assert line.progress(10.0) == Progress(
        t=10.0, step=120, total=500, epoch=0.48, loss=2.3101, acc=0.412, tau=2.91, block_tok_s=13500.0,
        ctx_tok_s=20100.0, lr=5.9e-4, ring_ready=3, ring_slots=8, eta_s=812.0,
    )  # fmt: skip


def test_every_event_of_the_document_is_in_the_golden_journal() -> None:
    raw = (DATA / "journal.jsonl").read_bytes()
    events, torn = decode_journal(raw)
    assert torn == 0
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    text = DOC.read_text().split("## journal.jsonl", 1)[1].split("Events:", 1)[1].split("\n## ", 1)[0]
    assert {e.event for e in events} == set(re.findall(r"`([a-z_]+)`", text))
    assert decode_journal(b"".join(encode_event(e) for e in events))[0] == events


def test_the_golden_metrics_are_understood() -> None:
    scanner = MetricsScanner()
    raw = (DATA / "metrics.jsonl").read_bytes()
    scanner.feed(raw.splitlines(keepends=True)[0])
    assert scanner.workers["drafter0"] == WorkerShares(0.02, 0.93, 0.02, 0.03, 0)
    scanner.feed(raw.splitlines(keepends=True)[1])
    assert scanner.bad_lines == 0
    assert scanner.progress is not None
    assert (scanner.progress.step, scanner.progress.loss, scanner.life) == (130, None, 1)


def test_the_golden_error_file_is_torchs() -> None:
    from dflash_ops.resident.growing import error_of

    found = error_of("drafter0", (DATA / "error.json").read_bytes(), 0.0)
    assert isinstance(found, ErrorInfo)
    assert found.message.startswith("RuntimeError: Detected that you are using FX")
    assert found.t == 1764441072.0


def test_the_golden_release_has_its_id_by_content() -> None:
    release = from_dict(Release, _load("release.json"))
    assert release_id(release.files) == release.id


def test_states_and_exit_codes_are_those_of_the_document() -> None:
    text = DOC.read_text()
    table = text.split("## States", 1)[1].split("```", 1)[0]
    assert set(re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)) == {s.value for s in State}


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ({"rc": 0, "signal": None}, State.FINISHED),
        ({"rc": 3, "signal": None}, State.STOPPED),
        ({"rc": 1, "signal": None}, State.CRASHED),
        ({"rc": 1, "signal": None, "requested": "stop"}, State.STOPPED),
        ({"rc": 0, "signal": None, "requested": "stop"}, State.FINISHED),
        ({"rc": None, "signal": "SIGKILL"}, State.CRASHED),
        ({"rc": None, "signal": "SIGKILL", "requested": "stop"}, State.STOPPED),
        ({"rc": None, "signal": "SIGTERM"}, State.STOPPED),
        ({"rc": None, "signal": "SIGINT", "requested": "INT"}, State.STOPPED),
        ({"rc": None, "signal": "SIGSEGV"}, State.CRASHED),
    ],
)
def test_an_operators_own_stop_is_never_a_crash(record: dict[str, Any], state: State) -> None:
    assert from_dict(ExitRecord, {"attempt": 1, "t": 1.0, "duration_s": 1.0, **record}).state() is state
