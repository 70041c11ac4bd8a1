"""The GPU's benchmark, as far as it goes without a GPU."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def module(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_drafter.py", *arguments])
    return int(module("gpu_drafter").main())


def test_its_code_runs_and_says_what_the_list_of_benchmarks_looks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--lengths", "48", "64", "--anchors", "2", "--steps", "1", "--warmup", "1"]
    assert run(monkeypatch, "--tiny", "--device", "cpu", *small) == 0
    bench = module("bench")
    case = next(c for c in bench.CASES if c.name == "gpu_drafter")
    rows, fault = bench.judge(case, 0, capsys.readouterr().out)
    assert fault is None and len(rows) == 2


@pytest.mark.parametrize("arguments,said", [([], "sees no CUDA GPU"), (["--device", "cpu"], "add --tiny")])
def test_without_a_gpu_it_refuses_and_says_why(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, *arguments) == 2
    assert said in capsys.readouterr().err


def test_it_counts_the_operations_that_the_design_derives() -> None:
    """Linear 9.6 and head 5.1 GFLOP a block token, a few with attention and context: 15 to 18."""
    gpu = module("gpu_drafter")
    narrow = replace(gpu.TINY, hidden_size=4, head_dim=2, num_attention_heads=2)
    batch = gpu.a_batch(narrow, 1, 4096, 512, torch.device("cpu"))
    blocks = 512 * 16
    assert 15 < gpu.operations(gpu.REAL, batch, blocks) / blocks / 1e9 < 18
    assert gpu.operations(gpu.REAL, batch, 0) / blocks / 1e9 == pytest.approx(9.6 + 0.6 + 1.1 * 4096 / blocks, rel=0.05)
