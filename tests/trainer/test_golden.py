"""The reference numbers of a tiny target and its drafters (tests/data/golden): the network, the loss, the generation.

DFLASH_GOLDEN=DIR runs these tests on another folder of the same layout.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from trainer import flex
from trainer.attention import BACKENDS, build_masks
from trainer.batch import Batch, block_input_ids, block_labels
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.evaluate import evaluate
from trainer.export import export_drafter, load_drafter
from trainer.loss import accepted_prefix, block_loss
from trainer.speculate import greedy, speculate
from trainer.target import Target, load_embed_and_head, load_target

pytestmark = pytest.mark.golden

GOLDEN = Path(os.environ.get("DFLASH_GOLDEN") or Path(__file__).parents[1] / "data" / "golden" / "tiny")
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
TENSORS = load_file(str(GOLDEN / "cases.safetensors"))
OBJECTIVES = list(CASES["cases"])  # "<drafter>.<objective>"
DRAFTERS = list(dict.fromkeys(case.split(".")[0] for case in OBJECTIVES))
MODES = [("checkpoint", True), ("checkpoint", False), ("fused", False)]
RELATIVE = 1e-4


def same_number(ours: torch.Tensor, golden: float) -> bool:
    return float(ours.detach()) == pytest.approx(golden, rel=RELATIVE, abs=1e-12)


def assert_same_tensor(ours: torch.Tensor, golden: torch.Tensor) -> None:
    assert ours.shape == golden.shape
    assert (ours - golden).abs().max() <= RELATIVE * golden.abs().max()


@cache
def the_target() -> Target:
    return load_target(GOLDEN / "target", dtype=torch.float32, device="cpu")


@cache
def the_drafter(name: str) -> Drafter:
    config, state = load_drafter(GOLDEN / f"drafter_{name}")
    drafter = Drafter(config)
    drafter.load_state_dict(state)
    return drafter.float()


def the_batch(name: str) -> Batch:
    ids = TENSORS[f"{name}.input_ids"]
    return Batch(
        input_ids=ids,
        loss_mask=TENSORS[f"{name}.loss_mask"],
        lengths=torch.full((ids.shape[0],), ids.shape[1]),
        anchors=TENSORS[f"{name}.anchors"],
        anchor_valid=TENSORS[f"{name}.anchor_valid"].bool(),
        features=TENSORS[f"{name}.target_features"],
        sample_ids=list(range(ids.shape[0])),
    )


def hidden_of(name: str, batch: Batch, attention: str = "structured") -> torch.Tensor:
    drafter, config = the_drafter(name), the_drafter(name).config
    embed, _ = load_embed_and_head(GOLDEN / "target", torch.float32, "cpu")
    block_embeds = F.embedding(block_input_ids(batch, config.block_size, config.mask_token_id), embed)
    padded = batch.input_ids.shape[1]
    masks = build_masks(config, batch.anchors, batch.anchor_valid, batch.lengths, padded, attention)
    hidden = drafter(block_embeds, batch.features, batch.anchors, masks)
    assert isinstance(hidden, torch.Tensor)
    return hidden


@pytest.fixture
def traced_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex attention as CUDA runs it, mask and backward included, but traced without its kernels.

    torch has no kernel for the backward on a CPU and refuses; what it traces can be run all the same.
    """
    monkeypatch.setattr(flex, "_the_flex", traced())
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)


@cache
def traced() -> flex.Flex:
    return flex.Flex(backend="eager")


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_target_gives_the_reference_features(name: str) -> None:
    batch = the_batch(name)
    features = the_target().features(batch.input_ids, the_drafter(name).config.target_layer_ids)
    assert_same_tensor(features, batch.features)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_drafter_gives_the_reference_hidden_states(name: str, attention: str, traced_flex: None) -> None:
    with torch.no_grad():
        assert_same_tensor(hidden_of(name, the_batch(name), attention), TENSORS[f"{name}.output_hidden"])


@pytest.mark.parametrize("mode,reentrant", MODES, ids=["checkpoint-reentrant", "checkpoint", "fused"])
@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("case", OBJECTIVES)
def test_loss_and_gradients_are_the_reference_ones(
    case: str, attention: str, mode: str, reentrant: bool, traced_flex: None
) -> None:
    name, objective = case.split(".")
    golden, batch, drafter = CASES["cases"][case], the_batch(name), the_drafter(name)
    drafter.zero_grad()
    _, head = load_embed_and_head(GOLDEN / "target", torch.float32, "cpu")
    out = block_loss(
        hidden_of(name, batch, attention),
        head,
        batch,
        drafter.config,
        objective=objective,
        gamma=golden["gamma"],
        alpha=golden["dpace_alpha"],
        mode=mode,
        reentrant=reentrant,
        chunk=50,  # several chunks, the last one smaller
    )
    out.loss.backward()
    assert same_number(out.numerator, golden["loss_numerator"])
    assert same_number(out.denominator, golden["loss_denominator"])
    assert same_number(out.loss, golden["loss"])
    assert int(out.correct) == golden["correct"]
    assert int(out.positions) == golden["positions"]
    assert int(out.prefix_sum) == int((TENSORS[f"{name}.accepted_prefix"] * batch.anchor_valid).sum())
    assert int(out.prefix_count) == int(batch.anchor_valid.sum())

    norms = {k: p.grad.norm() for k, p in drafter.named_parameters() if p.grad is not None}
    assert norms.keys() == golden["grad_norm"].keys()
    wrong = {k: (float(norms[k]), v) for k, v in golden["grad_norm"].items() if not same_number(norms[k], v)}
    assert not wrong


@pytest.mark.parametrize("name", DRAFTERS)
def test_accepted_prefixes_are_the_reference_ones(name: str) -> None:
    batch, config = the_batch(name), the_drafter(name).config
    labels, counted = block_labels(batch, config.block_size)
    with torch.no_grad():
        rows = hidden_of(name, batch).unflatten(1, (-1, config.block_size))[:, :, 1:]
    predicted = the_target().most_likely(rows)
    assert torch.equal(accepted_prefix(predicted, labels, counted), TENSORS[f"{name}.accepted_prefix"].long())


def generations() -> list[Any]:
    """(drafter, entry) pairs; entries that name no drafter belong to the first one of cases.json."""
    entries = CASES["generate"]
    if isinstance(entries, dict):
        return [pytest.param(d, e, id=f"{d}-{i}") for d, listed in entries.items() for i, e in enumerate(listed)]
    return [pytest.param(e.get("drafter"), e, id=str(i)) for i, e in enumerate(entries)]


@pytest.mark.parametrize("name,entry", generations())
def test_generation_is_the_reference_one(name: str | None, entry: dict[str, Any]) -> None:
    prompt = entry["prompt"]
    whole = [int(i) for i in entry["output"]]
    continuation = whole[len(prompt) :]
    assert greedy(the_target(), prompt, len(continuation)) == entry["greedy"][len(prompt) :]
    out = speculate(the_target(), the_drafter(name or DRAFTERS[0]), prompt, len(continuation))
    assert out.tokens == continuation
    assert out.acceptance_lengths == entry["acceptance_lengths"]
    assert out.target_forwards == 1 + len(out.acceptance_lengths)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_lossless(name: str) -> None:
    prompts = [e.values[1]["prompt"] for e in generations()][:2]
    report = evaluate(the_target(), the_drafter(name), prompts, 40)
    assert report.lossless and report.mismatches == []
    assert report.tau > 1.0


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_export_is_what_servers_know(name: str, tmp_path: Path) -> None:
    folder = GOLDEN / f"drafter_{name}"
    golden_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    golden_state = load_file(str(folder / "model.safetensors"))
    export_drafter(the_drafter(name).state_dict(), the_drafter(name).config, tmp_path / "out")

    state = load_file(str(tmp_path / "out" / "model.safetensors"))
    assert state.keys() == golden_state.keys()
    assert all(torch.equal(state[k], golden_state[k]) for k in state)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    generic = {"dtype", "max_window_layers", "transformers_version"}  # transformers' own defaults, read by nobody here
    differing = {k for k in config.keys() & golden_config.keys() if config[k] != golden_config[k]} - generic
    assert not differing
    assert (config.get("is_causal"), config["dflash_config"].get("causal")) == (
        golden_config.get("is_causal"),
        golden_config["dflash_config"].get("causal"),
    )
    theta = golden_config.get("rope_theta") or golden_config["rope_parameters"]["rope_theta"]
    assert config["rope_theta"] == theta and config["rope_parameters"]["rope_theta"] == theta
    assert DrafterConfig.from_hf(config) == the_drafter(name).config
