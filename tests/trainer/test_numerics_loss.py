"""The loss: what counts, what does not, and that no setting of memory changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.anchors import pick_anchors
from trainer.attention import build_masks
from trainer.batch import Batch, block_input_ids
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import ConfigError
from trainer.loss import LossOut, accepted_prefix, block_loss, slot_weights

CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=40,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=256,
    block_size=4,
    mask_token_id=39,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=6,
    causal=True,
)
TABLE = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
HEAD = torch.randn(40, 16, generator=torch.Generator().manual_seed(4))
MODES = [("checkpoint", True), ("checkpoint", False), ("fused", False)]


def a_batch(padded: int = 32, count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(11)
    lengths = [30, 17]
    ids = torch.full((2, padded), 38)
    features = torch.full((2, padded, 32), 7.0)  # padding holds something, not zeros
    mask = torch.zeros(2, padded)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(0, 38, (length,), generator=generator)
        features[row, :length] = torch.randn(length, 32, generator=generator)
        mask[row, 5:length] = 1.0
    anchors, valid = pick_anchors(mask, torch.tensor(lengths), count, [(0, 0, 0), (0, 0, 1)])
    return Batch(ids, mask, torch.tensor(lengths), anchors, valid, features, [0, 1])


def loss_of(batch: Batch, drafter: Drafter | None = None, **options: Any) -> tuple[LossOut, Drafter]:
    drafter = drafter or Drafter(CONFIG, seed=5)
    embeds = F.embedding(block_input_ids(batch, 4, 39), TABLE)
    masks = build_masks(CONFIG, batch.anchors, batch.anchor_valid, batch.lengths, batch.input_ids.shape[1], "sdpa")
    hidden = drafter(embeds, batch.features, batch.anchors, masks)
    return block_loss(hidden, HEAD, batch, CONFIG, **{"gamma": 4.0, **options}), drafter


def grads(out: LossOut, drafter: Drafter) -> dict[str, Tensor]:
    drafter.zero_grad()
    out.loss.backward()
    return {k: p.grad.clone() for k, p in drafter.named_parameters() if p.grad is not None}


def assert_same(left: tuple[LossOut, Drafter], right: tuple[LossOut, Drafter]) -> None:
    for a, b in zip(left[0], right[0], strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-5)
    ours, theirs = grads(*left), grads(*right)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("objective", ["dflash", "dpace"])
@pytest.mark.parametrize("mode,reentrant", MODES)
@pytest.mark.parametrize("chunk", [1, 7, 36, 1000])
def test_chunk_and_mode_do_not_change_the_loss(objective: str, mode: str, reentrant: bool, chunk: int) -> None:
    batch = a_batch()
    plain = loss_of(batch, objective=objective, mode="checkpoint", reentrant=False, chunk=10_000)
    assert_same(plain, loss_of(batch, objective=objective, mode=mode, reentrant=reentrant, chunk=chunk))


@pytest.mark.parametrize("objective", ["dflash", "dpace"])
def test_longer_padding_does_not_change_the_loss(objective: str) -> None:
    assert_same(loss_of(a_batch(32), objective=objective), loss_of(a_batch(96), objective=objective))


@pytest.mark.parametrize("mode,reentrant", MODES)
@pytest.mark.parametrize("objective", ["dflash", "dpace"])
def test_more_padding_blocks_do_not_change_the_loss(objective: str, mode: str, reentrant: bool) -> None:
    """The second sequence has 11 candidates: 11 and 20 anchors hold the same real blocks there."""
    few, many = a_batch(count=30), a_batch(count=45)
    assert not few.anchor_valid.all()
    options = {"objective": objective, "mode": mode, "reentrant": reentrant}
    assert_same(loss_of(few, **options), loss_of(many, **options))


@pytest.mark.parametrize("mode,reentrant", MODES)
@pytest.mark.parametrize("objective", ["dflash", "dpace"])
def test_a_batch_without_any_valid_anchor_has_loss_zero_and_no_nan(objective: str, mode: str, reentrant: bool) -> None:
    batch = a_batch()
    batch = replace(batch, anchor_valid=torch.zeros_like(batch.anchor_valid))
    out, drafter = loss_of(batch, objective=objective, mode=mode, reentrant=reentrant)
    assert float(out.loss.detach()) == 0.0
    assert int(out.positions) == int(out.correct) == int(out.prefix_count) == int(out.prefix_sum) == 0
    assert all((g == 0).all() for g in grads(out, drafter).values())


@pytest.mark.parametrize("objective", ["dflash", "dpace"])
def test_the_loss_is_the_one_written_out(objective: str) -> None:
    """Row by row, with full logits."""
    batch = a_batch()
    out, drafter = loss_of(batch, objective=objective, alpha=0.3)
    embeds = F.embedding(block_input_ids(batch, 4, 39), TABLE)
    masks = build_masks(CONFIG, batch.anchors, batch.anchor_valid, batch.lengths, 32, "sdpa")
    log_p = (drafter(embeds, batch.features, batch.anchors, masks) @ HEAD.T).log_softmax(-1)
    numerator, weight_sum, positions, correct = 0.0, 0.0, 0, 0
    for b in range(2):
        for a, anchor in enumerate(batch.anchors[b].tolist()):
            if not batch.anchor_valid[b, a]:
                continue
            slots = [k for k in (1, 2, 3) if anchor + k < int(batch.lengths[b]) and batch.loss_mask[b, anchor + k] > 0]
            gold = {k: float(log_p[b, 4 * a + k, batch.input_ids[b, anchor + k]].detach()) for k in slots}
            prefix, product = {}, 1.0
            for k in slots:
                product *= 0.7 * float(torch.tensor(gold[k]).exp()) + 0.3
                prefix[k] = product
            for k in slots:
                weight = float(torch.exp(torch.tensor(-(k - 1) / 4.0)))
                if objective == "dpace":
                    weight = sum(prefix[j] for j in slots if j >= k)
                numerator -= weight * gold[k]
                weight_sum += weight
                positions += 1
                correct += int(log_p[b, 4 * a + k].argmax()) == int(batch.input_ids[b, anchor + k])
    assert float(out.numerator.detach()) == pytest.approx(numerator, rel=1e-4)
    assert float(out.denominator) == pytest.approx(weight_sum if objective == "dflash" else 2.0, rel=1e-5)
    assert (int(out.positions), int(out.correct)) == (positions, correct)


def test_the_head_gets_no_gradient() -> None:
    batch, head = a_batch(), HEAD.clone().requires_grad_()
    hidden = torch.randn(2, 24, 16, requires_grad=True)
    for mode, reentrant in MODES:
        block_loss(hidden, head, batch, CONFIG, mode=mode, reentrant=reentrant).loss.backward()
    assert head.grad is None and hidden.grad is not None


def test_no_logits_of_more_than_one_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = F.linear

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape == HEAD.shape:
            rows.append(x.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr("torch.nn.functional.linear", counting)
    for mode, reentrant in MODES:
        out, _ = loss_of(a_batch(), mode=mode, reentrant=reentrant, chunk=8)
        out.loss.backward()
    assert rows and max(rows) <= 8


def test_low_precision_stays_close() -> None:
    """bfloat16 rows and head, float32 statistics."""
    batch = a_batch()
    hidden = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(1))
    wide = block_loss(hidden.requires_grad_(), HEAD, batch, CONFIG)
    narrow_rows = hidden.detach().bfloat16().requires_grad_()
    narrow = block_loss(narrow_rows, HEAD.bfloat16(), batch, CONFIG)
    assert narrow.loss.dtype == torch.float32
    assert float(narrow.loss.detach()) == pytest.approx(float(wide.loss.detach()), rel=0.02)
    narrow.loss.backward()
    wide.loss.backward()
    assert narrow_rows.grad is not None and hidden.grad is not None
    assert F.cosine_similarity(narrow_rows.grad.float().flatten(), hidden.grad.flatten(), dim=0) > 0.999


def test_a_slot_that_does_not_count_is_passed_over() -> None:
    labels = torch.zeros(1, 3, 4, dtype=torch.int64)
    counted = torch.ones(1, 3, 4, dtype=torch.bool)
    predicted = torch.tensor([[[0, 0, 9, 0], [9, 0, 0, 0], [0, 9, 0, 0]]])
    counted[0, 2, 1] = False
    assert accepted_prefix(predicted, labels, counted).tolist() == [[2, 0, 3]]
    entropy = torch.tensor([[[0.5, 30.0, 0.5, 0.5]]])
    gap = slot_weights(entropy, counted[:, 2:], objective="dpace", gamma=1.0, alpha=0.0)
    dense = slot_weights(entropy[..., [0, 2, 3]], counted[:, :1, :3], objective="dpace", gamma=1.0, alpha=0.0)
    assert torch.allclose(gap[..., [0, 2, 3]], dense) and gap[0, 0, 1] == 0


@pytest.mark.parametrize(
    "wrong,named",
    [
        ({"objective": "kl"}, "kl"),
        ({"mode": "full"}, "full"),
        ({"gamma": 0.0}, "gamma"),
        ({"alpha": 1.5}, "alpha"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_impossible_settings_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        loss_of(a_batch(), **wrong)
