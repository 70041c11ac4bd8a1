"""Taps, anchors, block inputs and attention masks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer import attention
from trainer.anchors import pick_anchors
from trainer.attention import attend, build_masks, make_mask_mod
from trainer.batch import Batch, block_input_ids, block_labels
from trainer.drafter import ContextCache, Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import ConfigError, TrainerError
from trainer.taps import tap_layer_ids


def a_config(**changes: Any) -> DrafterConfig:
    config = DrafterConfig(
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
    return replace(config, **changes)


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


# Masks


def dense_from_rule(config: DrafterConfig, batch: Batch, kind: str) -> Tensor:
    """The flex rule asked for every index."""
    padded, rows = batch.input_ids.shape[1], batch.anchors.shape[1] * config.block_size
    limit = torch.where(batch.anchor_valid, torch.minimum(batch.anchors, batch.lengths[:, None]), 0)
    sliding = kind == "sliding_attention"
    rule = make_mask_mod(
        batch.anchors,
        limit,
        padded,
        config.block_size,
        config.sliding_window if sliding else None,
        config.causal and sliding,
    )
    b = torch.arange(len(batch.lengths))[:, None, None]
    row, key = torch.arange(rows)[None, :, None], torch.arange(padded + rows)[None, None]
    return rule(b, torch.zeros_like(b), row, key).expand(len(batch.lengths), rows, padded + rows)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 6, 100])
def test_flex_and_dense_masks_are_the_same_rule(window: int, causal: bool) -> None:
    config = a_config(sliding_window=window, causal=causal)
    batch = a_batch([[0, 3, 9], [5, 5, 11]], [[True, True, True], [True, False, True]], [16, 13], 16)
    masks = build_masks(config, batch.anchors, batch.anchor_valid, batch.lengths, 16, "sdpa")
    assert set(masks.by_kind) == {"full_attention", "sliding_attention"}
    for kind, dense in masks.by_kind.items():
        assert torch.equal(dense[:, 0], dense_from_rule(config, batch, kind))


def seen_keys(mask: Tensor, batch: int, row: int) -> set[int]:
    return set(mask[batch, 0, row].nonzero().flatten().tolist())


def test_what_a_row_sees() -> None:
    config = a_config()  # block 4, window 6
    batch = a_batch([[2, 9]], [[True, True]], [16], 16)
    masks = build_masks(config, batch.anchors, batch.anchor_valid, batch.lengths, 16, "sdpa").by_kind
    second = set(range(16 + 4, 16 + 8))  # keys of the second block
    assert seen_keys(masks["full_attention"], 0, 6) == set(range(9)) | second
    # Row 2 of the block with anchor 9 stands at position 11: context 6..8, and slots 0..2 of its block.
    assert seen_keys(masks["sliding_attention"], 0, 6) == {6, 7, 8} | {20, 21, 22}
    both_ways = build_masks(
        replace(config, causal=False), batch.anchors, batch.anchor_valid, batch.lengths, 16, "sdpa"
    ).by_kind
    assert seen_keys(both_ways["sliding_attention"], 0, 6) == {6, 7, 8} | second


def run(config: DrafterConfig, batch: Batch, embeds: Tensor | None = None) -> Tensor:
    drafter = Drafter(config, seed=5)
    table = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    if embeds is None:
        embeds = F.embedding(block_input_ids(batch, config.block_size, config.mask_token_id), table)
    masks = build_masks(config, batch.anchors, batch.anchor_valid, batch.lengths, batch.input_ids.shape[1], "sdpa")
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
    masks = build_masks(config, batch.anchors, batch.anchor_valid, batch.lengths, 16, "sdpa")
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


def test_the_flex_backend_refuses_a_cpu_and_an_unknown_backend_is_named() -> None:
    batch = a_batch([[4]], [[True]], [16], 16)
    with pytest.raises(ConfigError, match="CUDA"):
        build_masks(a_config(), batch.anchors, batch.anchor_valid, batch.lengths, 16, "flex")
    with pytest.raises(ConfigError, match="eager"):
        build_masks(a_config(), batch.anchors, batch.anchor_valid, batch.lengths, 16, "eager")


def test_a_new_shape_after_warm_up_is_an_error_that_names_it() -> None:
    flex = attention._Flex()
    flex._admit(("attend", (1, 2, 64, 8)))
    flex.frozen = True
    flex._admit(("attend", (1, 2, 64, 8)))
    with pytest.raises(TrainerError, match="128"):
        flex._admit(("attend", (1, 2, 128, 8)))


def test_the_recompile_limit_is_an_error_that_names_the_shape() -> None:
    class FailOnRecompileLimitHit(Exception):
        """torch's name for it."""

    def limited(*args: Any, **kwargs: Any) -> None:
        raise FailOnRecompileLimitHit

    flex = attention._Flex()
    with pytest.raises(TrainerError, match=r"dense.*\(1, 2, 96, 8\)"):
        flex._run(limited, torch.zeros(1, 2, 96, 8))


def test_flex_with_compilation_switched_off_is_an_error() -> None:
    code = (
        "from trainer.attention import _Flex\n"
        "from trainer.errors import TrainerError\n"
        "try:\n    _Flex()\n"
        "except TrainerError as error:\n    print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"TORCHDYNAMO_DISABLE": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "would run dense" in out.stdout


@pytest.mark.slow
def test_compiled_flex_equals_sdpa_and_does_not_compile_again_for_other_anchors() -> None:
    """On the CPU, where torch compiles the forward only: the same two compiled functions that CUDA uses."""
    from torch._dynamo.utils import counters

    flex, block, context = attention._Flex(), 8, 64
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for shift in range(3):
        anchors = torch.tensor([[3, 9, 40, 55]]) + shift
        rows = anchors.shape[1] * block
        q = torch.randn(1, 4, rows, 32, generator=generator)
        k, v = (torch.randn(1, 2, context + rows, 32, generator=generator) for _ in range(2))
        with torch.no_grad():
            rule = make_mask_mod(anchors, anchors, context, block, 16, True)
            mask = flex._run(flex._build, rule, 1, None, rows, context + rows, device="cpu")
            ours = flex.attend(q, k, v, mask)
            dense = attention._dense_mask(anchors, anchors, context, block, 16, True)
            plain = attend(q, k, v, attention.Masks("sdpa", {"x": dense}), "x")
        assert torch.allclose(ours, plain, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2]
