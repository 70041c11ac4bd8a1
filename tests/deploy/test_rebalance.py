"""`dflash-ops rebalance` on this machine, real tmux and real processes: told, applied, kept, taken back, cut off."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from schemas import valid
from split_trainer import rates_of, write_source

if TYPE_CHECKING:
    from conftest import Toy

PYTHON = os.path.realpath(sys.executable)
TABLES = {
    "target": {"path": "target"},
    "drafter": {"mask_token_id": 3},
    "data": {"path": "data.jsonl"},
    "train": {"epochs": 4, "average_every": 4, "log_every": 1},
}


@pytest.fixture
def job(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A job of 2 CPU devices, 1 target and 1 drafter, under a stand-in of the bundled trainer."""
    monkeypatch.setattr("dflash_ops.fleet.rebalance_look.measure", rates_of)
    drop = dict.fromkeys(("command", "progress", "source"))
    source = write_source(toy.folder / "split-src")
    trainer = {"target_devices": ["cpu"], "drafter_devices": ["cpu"], **TABLES}
    toy.write(**drop | {"source": str(source), "trainer": trainer, "interpreter": PYTHON, "watch_s": 60, "gate_s": 30})
    return toy


def running(job: Toy, steps: int = 16) -> None:
    """Deployed, and so many steps on its way."""
    assert job.ops("deploy").code == 0
    job.until(lambda s: (s["progress"] or {}).get("step", 0) >= steps)


def rebalance(job: Toy, *args: str) -> Any:
    return job.ops("rebalance", *args, "--devices", "cpu,cpu,cpu", "--json")


def odd(job: Toy, **splits: float | str) -> None:
    """Splits that do not do what is predicted: a factor, an error's text, `nan` or `hang`."""
    (job.root / "odd.json").write_text(
        json.dumps({k.replace("t", "", 1).replace("d", "+"): v for k, v in splits.items()})
    )


def told(job: Toy, event: str) -> list[dict[str, Any]]:
    return [e["data"] for e in job.journal if e["event"] == event]


def test_a_split_is_applied_measured_and_kept(job: Toy) -> None:
    running(job)
    plan = rebalance(job, "--plan", "--targets", "2", "--drafters", "1")
    assert plan.code == 0, plan.err
    valid("rebalance", plan.json)
    rows = {(r["targets"], r["drafters"]): r for r in plan.json["rows"]}
    assert rows[2, 1]["best"]
    assert rows[1, 1]["current"]
    assert "0 drafters" in rows[3, 0]["refused"]
    assert job.status["attempt"] == 1

    done = rebalance(job, "--targets", "2", "--drafters", "1")
    assert done.code == 0, done.err
    valid("rebalance", done.json)
    said = done.json
    assert (said["outcome"], said["attempt"], said["inventory"]) == ("kept", 2, "written")
    predicted, measured = said["predicted"]["block_tok_s"], said["measured"]["block_tok_s"]
    assert abs(measured / predicted - 1) < 0.25
    assert measured > said["before"]["block_tok_s"]
