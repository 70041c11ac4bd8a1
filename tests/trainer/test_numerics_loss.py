"""The loss: what counts, what does not, and that no setting of memory changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics_support import a_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.anchors import pick_anchors
from trainer.attention import build_masks
from trainer.batch import Batch, block_input_ids, block_labels
from trainer.drafter import Drafter
from trainer.errors import ConfigError
from trainer.loss import LossOut, accepted_prefix, block_loss, slot_weights, softmax_in_place, softmax_to_fuse

CONFIG = a_config()
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
    masks = build_masks(
        CONFIG, batch.anchors, batch.anchor_valid, batch.lengths, batch.input_ids.shape[1], "structured"
    )
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
    masks = build_masks(CONFIG, batch.anchors, batch.anchor_valid, batch.lengths, 32, "structured")
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


class Products(TorchDispatchMode):
    """Writes down the shapes of all products of matrices and the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(x.numel() for x in made)])
        if func.overloadpacket is torch.ops.aten.mm:
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("mode,reentrant", MODES)
def test_only_one_chunk_of_rows_that_count_and_no_weight_gradient(mode: str, reentrant: bool) -> None:
    vocabulary, chunk, batch = 2000, 20, a_batch()  # a chunk is larger than the head
    head = torch.randn(vocabulary, 16, generator=torch.Generator().manual_seed(4)).requires_grad_()
    hidden = torch.randn(2, 24, 16, requires_grad=True)
    with Products() as forward:
        out = block_loss(hidden, head, batch, CONFIG, mode=mode, reentrant=reentrant, chunk=chunk)
    with Products() as backward:
        out.loss.backward()
    assert head.grad is None and hidden.grad is not None
    assert max(forward.largest, backward.largest) == chunk * vocabulary
    assert (vocabulary, 16) not in forward.shapes + backward.shapes
    logits = [n for n, width in forward.shapes if width == vocabulary]
    assert sum(logits) == int(out.positions) < batch.anchors.numel() * 3
    recomputed = [n for n, width in backward.shapes if width == vocabulary]
    assert sum(recomputed) == (0 if mode == "fused" else sum(logits))


@pytest.mark.parametrize("mode,reentrant", MODES)
def test_rows_that_do_not_count_may_hold_anything(mode: str, reentrant: bool) -> None:
    batch = a_batch(count=30)
    _, counted = block_labels(batch, 4)
    unread = torch.cat([torch.ones_like(counted[..., :1]), ~counted], dim=2).flatten(1)  # slot 0 has no loss
    hidden = torch.randn(2, 120, 16, generator=torch.Generator().manual_seed(1))
    clean, dirty = (x.requires_grad_() for x in (hidden.clone(), hidden.masked_fill(unread[..., None], float("nan"))))
    outs = [block_loss(x, HEAD, batch, CONFIG, mode=mode, reentrant=reentrant) for x in (clean, dirty)]
    for out in outs:
        out.loss.backward()
    assert torch.equal(outs[0].loss, outs[1].loss)
    assert clean.grad is not None and dirty.grad is not None
    assert torch.equal(clean.grad, dirty.grad) and (dirty.grad[unread] == 0).all()


def test_both_ways_to_the_softmax_are_the_same_and_right() -> None:
    """The one for the CPU, in place, and the one that is compiled for a GPU."""
    logits = 8 * torch.randn(50, 300, generator=torch.Generator().manual_seed(3))
    gold = torch.randint(0, 300, (50, 1), generator=torch.Generator().manual_seed(4))
    wide = logits.double().requires_grad_()
    entropy = F.cross_entropy(wide, gold[:, 0], reduction="none")
    entropy.sum().backward()
    assert wide.grad is not None
    for softmax in (softmax_to_fuse, softmax_in_place):
        losses, predicted, slopes = softmax(logits.clone(), gold, torch.float32)
        assert torch.allclose(losses.double(), entropy.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(predicted, logits.argmax(dim=-1))
        assert torch.allclose(slopes.double(), wide.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("objective", ["dflash", "dpace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_modes_give_the_gradient_of_full_logits(objective: str, dtype: torch.dtype) -> None:
    """With float32 statistics, rows and head of bfloat16 cost no more than the rounding of the result."""
    batch, generator = a_batch(), torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 24, 16, generator=generator).to(dtype)
    head = HEAD.to(dtype)
    reference = hidden.double().requires_grad_()
    labels, counted = block_labels(batch, 4)
    rows = reference.unflatten(1, (-1, 4))[:, :, 1:]
    entropy = F.cross_entropy((rows @ head.double().T).flatten(0, 2), labels.flatten(), reduction="none")
    entropy = entropy.view_as(labels)
    weights = slot_weights(entropy.detach(), counted, objective=objective, gamma=4.0, alpha=0.5)
    loss = (weights * entropy)[counted].sum() / (weights.sum() if objective == "dflash" else 2)
    loss.backward()
    assert reference.grad is not None
    close = 1e-5 if dtype == torch.float32 else 1e-2
    for mode, reentrant in MODES:
        ours = hidden.clone().requires_grad_()
        out = block_loss(
            ours, head, batch, CONFIG, objective=objective, gamma=4.0, mode=mode, reentrant=reentrant, chunk=5
        )
        out.loss.backward()
        assert ours.grad is not None and ours.grad.dtype == dtype and out.loss.dtype == torch.float32
        assert float(out.loss.detach()) == pytest.approx(float(loss.detach()), rel=close)
        assert (ours.grad.double() - reference.grad).abs().max() <= close * reference.grad.abs().max()


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
