"""The bundled trainer under a rebalance: 1+1 -> 2+1, nothing of the training is lost or done twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))
from pipeline_support import MASK, write_samples, write_target

from trainer.cli import main as trainer

if TYPE_CHECKING:
    from conftest import Toy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def records(toy: Toy, attempt: int) -> list[dict[str, Any]]:
    file = toy.root / f"run/attempts/{attempt}/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_training_goes_on_where_it_was(toy: Toy, capfd: pytest.CaptureFixture[str]) -> None:
    target = toy.folder / "target"
    target.mkdir()
    write_target(target)
    tables = {
        "target": {"path": str(target)},
        "drafter": {"layers": 1, "block_size": 4, "taps": 1, "mask_token_id": MASK},
        "data": {"path": str(write_samples(toy.folder / "data.jsonl", 400)), "max_length": 64, "batch_size": 4},
        "train": {"epochs": 400, "anchors": 8, "average_every": 5, "log_every": 5, "lr": 3e-3},
        "checkpoint": {"every": 500},
    }
    trainer_table = {"target_devices": ["cpu"], "drafter_devices": ["cpu"], **tables}
    drop = dict.fromkeys(("source", "command", "progress"))
    toy.write(**drop, trainer=trainer_table, interpreter=sys.executable, env={"OMP_NUM_THREADS": "1"}, watch_s=120)
    assert toy.ops("deploy").code == 0
    toy.until(lambda s: (s["progress"] or {}).get("step", 0) >= 150, 180)

    # On 2 cores a second target is no gain: only what becomes of the training is looked at here.
    done = toy.ops("rebalance", "--targets", "2", "--drafters", "1", "--devices", "cpu,cpu,cpu", "--no-back", "--json")
    assert (done.code, done.json["attempt"]) == (0, 2), done.err
    assert done.json["outcome"] == ("kept_worse" if "it is slower (--no-back)" in done.err else "kept")
    assert done.json["exact"]
    assert done.json["gate"]["ok"]
    assert toy.record(1, "exit")["rc"] == 3
    saved = done.json["stopped"]["checkpoint"]["step"]
    before, after = records(toy, 1), records(toy, 2)
    assert before[-1]["step"] == saved
    assert saved < after[0]["step"] <= saved + 5
    assert sorted(after[0]["workers"]) == ["drafter0", "target0", "target1"]
    assert after[0]["samples"] > before[-1]["samples"] or after[0]["epoch"] > before[-1]["epoch"]
    # The loss goes on from where it was, not from where it began.
    end, begin = (sum(r["loss"] for r in rows) / len(rows) for rows in (before[-4:], before[:2]))
    first = sum(r["loss"] for r in after[:4]) / len(after[:4])
    assert abs(first - end) < 0.2 * (begin - end)
    assert after[0]["lr"] == pytest.approx(before[-1]["lr"], rel=0.05)

    stopped = toy.ops("stop", "--json")
    assert stopped.json["exit"]["rc"] == 3
    capfd.readouterr()
    assert trainer(["audit", str(toy.root / "run/attempts"), "--json"]) == 0
    audit = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert audit["ok"], audit
