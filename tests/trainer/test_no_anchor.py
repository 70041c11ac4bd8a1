"""A batch without a single anchor: nobody steps for it, nothing waits for it, and it is counted."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.averages import Averages
from trainer.config import parse_config
from trainer.drafter_worker import DrafterWorker
from trainer.prepare import drafter_geometry
from trainer.ring import Ring, RingLayout, create_ring
from trainer.state_layout import StateLayout, drafter_shapes
from trainer.target_files import read_target


class NoChannel:
    def send(self, message: dict[str, Any]) -> None:
        raise AssertionError(f"nothing is to be said: {message}")


def test_a_batch_without_an_anchor_changes_nothing_and_is_counted(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda count: None)  # once a process only, says torch
    raw = {
        "target": {"path": str(tiny_target)},
        "drafter": {"layers": 1, "block_size": 4, "taps": 1, "mask_token_id": 259},
        "data": {"path": "unused", "max_length": 32, "buckets": [32], "batch_size": 2},
    }
    config = parse_config(raw, "test")
    drafter = drafter_geometry(config, read_target(str(tiny_target)))
    layout = RingLayout(slots=1, batch=2, length=32, width=drafter.hidden_size, dtype="float32")
    state = StateLayout(drafter_shapes(drafter))
    averages = Averages(state, str(tmp_path))
    ring = create_ring(layout, str(tmp_path))
    deterministic = torch.are_deterministic_algorithms_enabled()
    setup: dict[str, Any] = {
        "config": config.to_dict(),
        "device": "cpu",
        "layout": layout.to_dict(),
        "ring_fd": ring,
        "averages_fd": averages.descriptor,
        "drafter": drafter.to_hf(),
        "lengths_used": [32],
        "rank": 0,
        "state": state.to_dict(),
        "average": None,
        "resume": None,
        "step": 0,
        "group": None,
        "store": None,
    }
    try:
        worker = DrafterWorker(setup, NoChannel())  # type: ignore[arg-type]
        slot = Ring(ring, layout, pin=False).slot(0, 32)
        slot.input_ids.fill_(3)
        slot.lengths.fill_(20)
        slot.loss_mask.zero_()  # nothing is supervised
        slot.features.normal_(generator=torch.Generator().manual_seed(0))
        before = {name: p.detach().clone() for name, p in worker.masters.parameters.items()}
        message = {"slot": 0, "batch": 0, "length": 32, "epoch": 0, "samples": [0, 1], "lr": 1e-3, "crc": None}
        stats = worker.train(message)["stats"]
        assert (stats["empty"], stats["positions"], stats["grad_norm"], stats["block_tokens"]) == (1, 0, 0.0, 0)
        assert all(torch.equal(p, before[name]) for name, p in worker.masters.parameters.items())
        answer = worker.average({"step": 1, "buffer": averages.begin()})
        assert set(answer["sums"]) == {"0", "1"}
        slot.loss_mask.fill_(1)
        stats = worker.train(message)["stats"]
        assert stats["empty"] == 0
        assert math.isfinite(stats["grad_norm"])
        assert any(not torch.equal(p, before[name]) for name, p in worker.masters.parameters.items())
    finally:
        torch.use_deterministic_algorithms(deterministic)
        os.close(ring)
        averages.close()
