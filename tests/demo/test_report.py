"""The demo's last words: what a script reads and what a person reads."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dflash_ops.demo.report import Outcome, Training, table, training_numbers

EVALUATION: dict[str, Any] = {
    "tau": 5.08123,
    "lossless": True,
    "prompts": 32,
    "plain_forwards": 3072,
    "speculative_forwards": 640,
    "speedup_forwards": 4.8,
}
GOOD = Outcome(Training(500, 0.45, 13500.0, 20100.0), EVALUATION, "/root/export", 301.26, "finished")


def test_last_line_of_a_success() -> None:
    said = json.loads(GOOD.last_line())
    assert "\n" not in GOOD.last_line()
    assert said == {
        "schema": 1,
        "kind": "demo",
        "ok": True,
        "tau": 5.0812,
        "lossless": True,
        "steps": 500,
        "export": "/root/export",
        "seconds": 301.3,
        "state": "finished",
    }


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tau": 2.99}, "2.99, below 3"),
        ({"lossless": False}, "changed the target's text"),
    ],
)
def test_a_bad_drafter_is_no_success(change: dict[str, Any], fault: str) -> None:
    bad = replace(GOOD, evaluation={**EVALUATION, **change})
    assert [fault in f for f in bad.faults()] == [True]
    assert json.loads(bad.last_line())["ok"] is False


def test_last_line_of_a_crash_holds_no_invented_number() -> None:
    crashed = Outcome(Training(None, None, None, None), None, None, 12.0, "crashed")
    said = json.loads(crashed.last_line())
    assert said["ok"] is False and said["state"] == "crashed"
    assert said["tau"] is said["lossless"] is said["export"] is said["steps"] is None
    assert crashed.faults() == ["the training is crashed"]


def test_table_says_all_of_it_in_80_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(table(GOOD))
    text = out.getvalue()
    for part in ("500", "13.5 Ktok/s", "20.1 Ktok/s", "0.450", "5.08", "32 held-out", "yes", "4.80x", "640", "3072"):
        assert part in text
    assert "/root/export" in text and max(map(len, text.splitlines())) <= 80
    out.truncate(0)
    Console(file=out, width=80, color_system=None).print(
        table(replace(GOOD, evaluation={**EVALUATION, "lossless": False}))
    )
    assert "NO" in out.getvalue()


def test_numbers_come_from_whole_records_only() -> None:
    records = [
        {"step": 10, "loss": 5.0, "block_tok_s": 10.0, "ctx_tok_s": 1.0},
        {"step": 20, "loss": 4.0, "block_tok_s": 1000.0, "ctx_tok_s": None},
        {"step": 30, "loss": 3.0, "block_tok_s": 1100.0, "ctx_tok_s": 3.0},
    ]
    lines = [json.dumps(r).encode() for r in records]
    assert training_numbers([*lines, b'{"step": 40, "lo', b"[]"]) == Training(30, 3.0, 1000.0, 2.0)
    assert training_numbers([]) == Training(None, None, None, None)
