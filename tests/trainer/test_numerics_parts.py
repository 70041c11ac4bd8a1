"""Taps, anchors, block inputs and the network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from numerics_support import a_config
from torch import Tensor

from trainer.anchors import pick_anchors
from trainer.attention import build_masks
from trainer.batch import Batch, block_input_ids, block_labels
from trainer.drafter import ContextCache, Drafter, gated, rms_norm, turn
from trainer.drafter_config import DrafterConfig
from trainer.errors import ConfigError
from trainer.taps import tap_layer_ids

# Taps


@pytest.mark.parametrize(
    "layers,taps,ids",
    [(64, 5, [1, 16, 31, 46, 61]), (36, 5, [1, 9, 17, 25, 33]), (6, 2, [1, 3]), (64, 1, [32]), (4, 1, [2])],
)
def test_tapped_layers_follow_the_published_drafters(layers: int, taps: int, ids: list[int]) -> None:
    assert tap_layer_ids(layers, taps) == ids


@pytest.mark.parametrize("layers,taps", [(4, 2), (3, 2), (8, 6), (8, 0)])
def test_more_taps_than_layers_is_refused(layers: int, taps: int) -> None:
    with pytest.raises(ConfigError, match="taps"):
        tap_layer_ids(layers, taps)


# Anchors


def masks_of(lengths: list[int], first: int, padded: int) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(len(lengths), padded)
    for row, length in enumerate(lengths):
        mask[row, first:length] = 1.0
    return mask, torch.tensor(lengths)


def test_anchors_are_sorted_distinct_and_supervised_with_their_next_token() -> None:
    mask, lengths = masks_of([50, 30], first=10, padded=64)
    mask[0, 20:25] = 0.0
    anchors, valid = pick_anchors(mask, lengths, 12, [(0, 0, 1), (0, 0, 2)])
    assert anchors.shape == valid.shape == (2, 12) and valid.all()
    for row in range(2):
        picked = anchors[row].tolist()
        assert picked == sorted(set(picked))
        assert all(mask[row, a] > 0 and mask[row, a + 1] > 0 and a < lengths[row] - 1 for a in picked)


def test_every_candidate_and_nothing_else_can_be_an_anchor() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 1, 0.0]])
    anchors, valid = pick_anchors(mask, torch.tensor([10]), 10, [(1,)])
    assert anchors[valid].tolist() == [1, 6, 7]


def test_supervised_padding_gives_no_anchor() -> None:
    mask = torch.ones(1, 32)
    anchors, valid = pick_anchors(mask, torch.tensor([10]), 20, [(1,)])
    assert anchors[valid.bool()].tolist() == list(range(9))


def test_a_sample_keeps_its_anchors_in_another_batch_with_more_padding() -> None:
    mask, lengths = masks_of([50, 40], first=5, padded=64)
    together, _ = pick_anchors(mask, lengths, 8, [(3, 1, 70), (3, 1, 71)])
    wider, wide_lengths = masks_of([40], first=5, padded=128)
    torch.manual_seed(999)
    alone, _ = pick_anchors(wider, wide_lengths, 8, [(3, 1, 71)])
    assert alone.tolist() == together[1:].tolist()


def test_another_epoch_or_seed_or_sample_gives_other_anchors() -> None:
    mask, lengths = masks_of([200], first=0, padded=200)
    keys = [(0, 0, 5), (0, 1, 5), (1, 0, 5), (0, 0, 6), (0, 5, 0), (0, 0, -5)]
    drawn = {tuple(pick_anchors(mask, lengths, 16, [key])[0][0].tolist()) for key in keys}
    assert len(drawn) == len(keys)


def test_anchors_are_spread_evenly() -> None:
    mask, lengths = masks_of([101], first=0, padded=101)
    counts = torch.zeros(100)
    for sample in range(2000):
        counts[pick_anchors(mask, lengths, 10, [(7, 0, sample)])[0][0]] += 1
    # 200 expected, standard deviation 13.4
    assert counts.min() > 140 and counts.max() < 260


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    mask, lengths = masks_of([60], first=0, padded=64)
    before = torch.get_rng_state()
    first, _ = pick_anchors(mask, lengths, 8, [(0, 0, 0)])
    Drafter(a_config(), seed=3)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1234)
    assert torch.equal(first, pick_anchors(mask, lengths, 8, [(0, 0, 0)])[0])


def test_too_few_candidates_are_padded_and_flagged() -> None:
    mask, lengths = masks_of([14, 14], first=10, padded=16)
    mask[1] = 0.0
    anchors, valid = pick_anchors(mask, lengths, 20, [(0,), (1,)])
    assert anchors.shape == (2, 20)
    assert anchors[0, :3].tolist() == [10, 11, 12] and valid[0].tolist() == [True] * 3 + [False] * 17
    assert not valid[1].any()
    assert (anchors.diff(dim=1) >= 0).all()


# Block inputs and labels


def a_batch(anchors: list[list[int]], valid: list[list[bool]], lengths: list[int], padded: int) -> Batch:
    ids = torch.arange(len(lengths) * padded).view(len(lengths), padded) % 37
    mask = torch.zeros(len(lengths), padded)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1.0
    features = torch.randn(len(lengths), padded, 32, generator=torch.Generator().manual_seed(1))
    return Batch(
        input_ids=ids,
        loss_mask=mask,
        lengths=torch.tensor(lengths),
        anchors=torch.tensor(anchors),
        anchor_valid=torch.tensor(valid),
        features=features,
        sample_ids=list(range(len(lengths))),
    )


def test_a_block_is_the_anchor_then_masks_and_predicts_what_follows_it() -> None:
    batch = a_batch([[2, 10]], [[True, True]], [12], 16)
    assert block_input_ids(batch, 4, 39).tolist() == [[2, 39, 39, 39, 10, 39, 39, 39]]
    labels, counted = block_labels(batch, 4)
    assert labels[0, 0].tolist() == [3, 4, 5]
    assert counted[0].tolist() == [[True, True, True], [True, False, False]]


def test_labels_past_the_end_or_outside_the_mask_do_not_count() -> None:
    full = a_batch([[9]], [[True]], [12], 12)  # no padding: the block reaches past the tensor itself
    assert block_labels(full, 6)[1].tolist() == [[[True, True, False, False, False]]]
    careless = replace(a_batch([[9]], [[True]], [12], 16), loss_mask=torch.ones(1, 16))
    assert block_labels(careless, 6)[1].tolist() == [[[True, True, False, False, False]]]
    holes = replace(full, anchors=torch.tensor([[3]]), loss_mask=(torch.arange(12) != 5).float()[None])
    assert block_labels(holes, 6)[1].tolist() == [[[True, False, True, True, True]]]


# The network over the masks


def run(config: DrafterConfig, batch: Batch, embeds: Tensor | None = None) -> Tensor:
    drafter = Drafter(config, seed=5)
    table = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    if embeds is None:
        embeds = F.embedding(block_input_ids(batch, config.block_size, config.mask_token_id), table)
    masks = build_masks(
        config, batch.anchors, batch.anchor_valid, batch.lengths, batch.input_ids.shape[1], "structured"
    )
    out = drafter(embeds, batch.features, batch.anchors, masks)
    assert isinstance(out, Tensor)
    return out


def test_a_causal_sliding_layer_does_not_look_ahead_in_its_block() -> None:
    batch = a_batch([[4, 9]], [[True, True]], [16], 16)
    embeds = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(3))
    changed = embeds.clone()
    changed[0, 3] += 1.0  # last slot of the first block
    causal = a_config(layer_types=("sliding_attention",) * 2)
    assert torch.equal(run(causal, batch, embeds)[0, :3], run(causal, batch, changed)[0, :3])
    for other in (replace(causal, causal=False), a_config(layer_types=("full_attention",) * 2, sliding_window=None)):
        moved = (run(other, batch, embeds) - run(other, batch, changed)).abs().amax(dim=-1)[0]
        assert (moved[:4] > 1e-6).all() and (moved[4:] == 0).all()  # its own block, and no other


def test_blocks_do_not_see_the_context_from_their_anchor_on() -> None:
    batch = a_batch([[4, 9]], [[True, True]], [16], 16)
    features = batch.features.clone()
    features[0, 4:] += 1.0
    after = run(a_config(), replace(batch, features=features))
    before = run(a_config(), batch)
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.allclose(before[0, 4:], after[0, 4:])


@pytest.mark.parametrize("causal", [True, False])
def test_a_cached_proposal_is_what_training_computed_at_that_anchor(causal: bool) -> None:
    config = a_config(causal=causal)
    batch = a_batch([[5, 11]], [[True, True]], [16], 16)
    embeds = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(3))
    trained = run(config, batch, embeds)
    drafter, cache = Drafter(config, seed=5), ContextCache()
    first = drafter.propose(embeds[:, :4], batch.features[:, :5], cache)
    second = drafter.propose(embeds[:, 4:], batch.features[:, 5:11], cache)
    assert torch.allclose(torch.cat([first, second], dim=1), trained, atol=1e-5)
    assert cache.length == 11 and cache.pairs[0][0].shape == (1, 1, 11, 8)  # of the context only


@pytest.mark.parametrize("way", ["bfloat16 weights", "autocast"])
def test_low_precision_stays_close(way: str) -> None:
    config, batch = a_config(), a_batch([[5, 11]], [[True, True]], [16], 16)
    embeds = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(3))
    wide = run(config, batch, embeds)
    drafter = Drafter(config, seed=5)
    masks = build_masks(config, batch.anchors, batch.anchor_valid, batch.lengths, 16, "structured")
    if way == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            narrow = drafter(embeds.bfloat16(), batch.features.bfloat16(), batch.anchors, masks)
    else:
        drafter = drafter.bfloat16()
        narrow = drafter(embeds.bfloat16(), batch.features.bfloat16(), batch.anchors, masks)
        far = torch.tensor([[4095]])  # rounded angles would misplace it
        assert torch.equal(drafter._rope(far, torch.float32)[0], Drafter(config)._rope(far, torch.float32)[0])
    assert narrow.dtype == torch.bfloat16
    assert F.cosine_similarity(narrow.float().flatten(), wide.flatten(), dim=0) > 0.999


def test_a_padding_block_gives_numbers_and_only_sees_itself() -> None:
    batch = a_batch([[4, 4], [0, 0]], [[True, False], [False, False]], [16, 3], 16)
    out = run(a_config(), batch)
    assert torch.isfinite(out).all()
    other = run(a_config(), replace(batch, features=batch.features + 1.0))
    assert torch.equal(out[0, 4:], other[0, 4:]) and torch.equal(out[1], other[1])


def test_what_a_gpu_fuses_keeps_its_values_and_gradients_when_compiled() -> None:
    """Traced and differentiated by torch's compiler under autocast, as on a GPU; only the kernels are missing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 10, 8, generator=generator).bfloat16().requires_grad_()
    y = torch.randn(2, 3, 10, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.rand(8, generator=generator).requires_grad_()
    angles = torch.randn(2, 1, 10, 8, generator=generator)
    calls = {
        rms_norm: (x, weight, 1e-6),
        gated: (x, y),
        turn: (x, (angles.cos().bfloat16(), angles.sin().bfloat16())),
    }
    for function, arguments in calls.items():
        compiled = torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
        wanted = [a for a in arguments if isinstance(a, Tensor)]
        with torch.autocast("cpu", torch.bfloat16):
            plain, ours = function(*arguments), compiled(*arguments)
        assert ours.dtype == torch.bfloat16 and torch.equal(plain, ours)
        grads = [torch.autograd.grad(out.float().square().sum(), wanted) for out in (plain, ours)]
        assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(*grads, strict=True))
