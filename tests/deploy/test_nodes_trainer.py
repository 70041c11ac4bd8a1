"""The bundled trainer on two nodes of this machine: deployed, stopped at one step, resumed to the end, as one job."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))
from pipeline_support import MASK, write_samples, write_target

from trainer.nodes_record import audit_nodes

if TYPE_CHECKING:
    from conftest import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def steps(status: dict[str, Any]) -> bool:
    return all(n["state"] == "stepping" and n["progress"]["step"] for n in status["nodes"])


def newest(root: Path) -> tuple[str, str]:
    """Name and hash of the weights of a node's newest checkpoint."""
    folder = max((root / "checkpoints").glob("step-*"))
    return folder.name, hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()


def test_two_nodes_train_stop_and_go_on_as_one(pair: Pair) -> None:
    target = pair.folder / "target"
    target.mkdir()
    write_target(target)
    tables = {
        "target": {"path": str(target)},
        "drafter": {"layers": 1, "block_size": 4, "taps": 1, "mask_token_id": MASK},
        "data": {"path": str(write_samples(pair.folder / "data.jsonl", 400)), "max_length": 64, "batch_size": 4},
        "train": {"epochs": 40, "anchors": 8, "average_every": 3, "log_every": 1},
        "checkpoint": {"every": 30},
    }
    trainer = {"target_devices": ["cpu"], "drafter_devices": ["cpu"], **tables}
    drop = dict.fromkeys(("source", "command", "progress"))
    pair.write(**drop, trainer=trainer, interpreter=sys.executable, env={"OMP_NUM_THREADS": "1"}, watch_s=120)

    deployed = pair.ops("deploy", "--json")
    assert deployed.code == 0, deployed.err
    pair.until(steps, 60)
    stopped = pair.ops("stop", "--json")
    assert stopped.code == 0, stopped.err
    assert [n["result"]["exit"]["rc"] for n in stopped.json["nodes"]] == [3, 3]
    assert not any(n["result"]["escalated"] for n in stopped.json["nodes"])
    held = [newest(root) for root in pair.roots]
    assert held[0] == held[1]  # one step, one drafter

    # 400 samples in batches of 4 for two drafters are 50 steps an epoch: to the end of the one that it was stopped in
    epochs = 1 + int(held[0][0].removeprefix("step-")) // 50
    resumed = pair.ops("deploy", "--resume", "--set", f"train.epochs={epochs}", "--json")
    assert resumed.code == 0, resumed.err
    status = pair.until(lambda s: s["state"] == "finished", 90)
    assert [n["state"] for n in status["nodes"]] == ["finished", "finished"]
    ends = [newest(root) for root in pair.roots]
    assert ends[0] == ends[1]
    assert ends[0][0] > held[0][0]
    result = audit_nodes([root / "run/attempts" for root in pair.roots])
    assert result.ok, result
    assert [(e.trained, e.complete) for e in result.epochs] == [(400, True)] * epochs
    last = [json.loads((root / "run/attempts/2/metrics.jsonl").read_text().splitlines()[-1]) for root in pair.roots]
    assert last[0]["samples"] > last[1]["samples"]  # node 0 tells of all nodes, and the job has its numbers
    assert status["progress"]["step"] == last[0]["step"]
