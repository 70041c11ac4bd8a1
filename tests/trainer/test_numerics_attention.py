"""What a block row sees, by a rule written out, and that every way to compute attention keeps to it."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numerics_support
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer import attention
from trainer.attention import Masks, attend, build_masks
from trainer.drafter_config import FULL, SLIDING, DrafterConfig
from trainer.errors import ConfigError
from trainer.flex import make_mask_mod

KINDS = (SLIDING, FULL)


def a_config(block: int, window: int | None, causal: bool) -> DrafterConfig:
    kinds = (FULL, FULL) if window is None else (SLIDING, FULL)
    return numerics_support.a_config(block_size=block, sliding_window=window, causal=causal, layer_types=kinds)


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Sequences of any length with any anchors in them, ascending, padding blocks last."""
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    padded, block = draw(st.integers(2, 24)), draw(st.integers(2, 5))
    lengths = [draw(st.integers(1, padded)) for _ in range(batch)]
    anchors, valid = [], []
    for length in lengths:
        real = draw(st.integers(0, count))
        places = sorted(draw(st.integers(0, length - 1)) for _ in range(real))
        anchors.append(places + [places[-1] if places else 0] * (count - real))
        valid.append([True] * real + [False] * (count - real))
    return {
        "config": a_config(block, draw(st.none() | st.integers(1, 30)), draw(st.booleans())),
        "anchors": torch.tensor(anchors),
        "valid": torch.tensor(valid),
        "lengths": torch.tensor(lengths),
        "padded": padded,
    }


def sees(case: dict[str, Any], kind: str, b: int, row: int, key: int) -> bool:
    """The rule in words of the design: row and key are indices of a mask."""
    config, padded = case["config"], case["padded"]
    which, slot = divmod(row, config.block_size)
    anchor, window = int(case["anchors"][b, which]), config.sliding_window
    if key >= padded:
        other, other_slot = divmod(key - padded, config.block_size)
        return other == which and (kind == FULL or not config.causal or other_slot <= slot)
    if not case["valid"][b, which] or key >= anchor:
        return False
    return kind == FULL or key >= anchor + slot - (window - 1)


def table(case: dict[str, Any], kind: str) -> Tensor:
    """[B, A*W, S + A*W] bool, asked one by one."""
    rows = case["anchors"].shape[1] * case["config"].block_size
    return torch.tensor(
        [
            [[sees(case, kind, b, row, key) for key in range(case["padded"] + rows)] for row in range(rows)]
            for b in range(len(case["lengths"]))
        ]
    )


def masks_of(case: dict[str, Any], backend: str) -> Masks:
    return build_masks(case["config"], case["anchors"], case["valid"], case["lengths"], case["padded"], backend)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_dense_and_the_flex_mask_are_the_rule(case: dict[str, Any]) -> None:
    dense, config = masks_of(case, "sdpa"), case["config"]
    limit = torch.where(case["valid"], case["anchors"], 0)
    for kind in config.layer_kinds:
        expected = table(case, kind)
        assert torch.equal(dense.by_kind[kind][:, 0], expected)
        window = config.sliding_window if kind == SLIDING else None
        causal = config.causal and kind == SLIDING
        rule = make_mask_mod(case["anchors"], limit, case["padded"], config.block_size, window, causal)
        b, row, key = (torch.arange(n) for n in expected.shape)
        asked = rule(b[:, None, None], torch.zeros(1), row[None, :, None], key[None, None])
        assert torch.equal(asked.expand_as(expected), expected)


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~mask[:, None], float("-inf"))
    return scores.softmax(dim=-1) @ v


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([1, 6, 128]), st.sampled_from([0, 200, 10**9]), st.sampled_from([1, 2]))
def test_structured_attention_has_the_values_and_gradients_of_the_rule(
    case: dict[str, Any], group_rows: int, call_cost: int, kv_heads: int
) -> None:
    """Whatever the groups are, and whether their sequences share a call."""
    generator = torch.Generator().manual_seed(0)
    batch, rows = len(case["lengths"]), case["anchors"].shape[1] * case["config"].block_size
    keys = case["padded"] + rows
    q = torch.randn(batch, 2, rows, 8, generator=generator, requires_grad=True)
    k, v = (torch.randn(batch, kv_heads, keys, 8, generator=generator, requires_grad=True) for _ in range(2))
    upstream = torch.randn(batch, 2, rows, 8, generator=generator)
    with patch.object(attention, "GROUP_ROWS", group_rows), patch.object(attention, "CALL_COST", call_cost):
        masks = masks_of(case, "structured")
    for kind in case["config"].layer_kinds:
        expected = written_out(q, k, v, table(case, kind))
        wanted = torch.autograd.grad(expected, (q, k, v), upstream)
        ours = attend(q, k, v, masks, kind)
        assert torch.allclose(ours, expected, atol=1e-5)
        for mine, theirs in zip(torch.autograd.grad(ours, (q, k, v), upstream), wanted, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)


def test_structured_attention_computes_a_fraction_of_all_pairs() -> None:
    """128 anchors over 1,024 positions: half of the context and an eighth of the blocks at most; a window far less."""
    anchors = torch.arange(0, 1024, 8)[None]
    lengths = torch.tensor([1024])
    masks = build_masks(a_config(16, 64, True), anchors, torch.ones_like(anchors).bool(), lengths, 1024, "structured")
    pairs = {
        kind: sum(span.bias[0].numel() for group in groups for span in group.spans)
        for kind, groups in masks.by_kind.items()
    }
    dense = 128 * 16 * (1024 + 128 * 16)
    assert pairs[FULL] < dense / 4 and pairs[SLIDING] < dense / 10


def test_what_the_rows_of_a_block_see() -> None:
    case = {
        "config": a_config(4, 6, True),
        "anchors": torch.tensor([[2, 9]]),
        "valid": torch.tensor([[True, True]]),
        "lengths": torch.tensor([16]),
        "padded": 16,
    }
    masks = masks_of(case, "sdpa").by_kind
    seen = {kind: set(masks[kind][0, 0, 6].nonzero().flatten().tolist()) for kind in KINDS}
    # Row 2 of the block with anchor 9 stands at position 11. Keys of its block: 20..23.
    assert seen[FULL] == set(range(9)) | {20, 21, 22, 23}
    assert seen[SLIDING] == {6, 7, 8} | {20, 21, 22}


def test_an_unknown_backend_is_named() -> None:
    ones = torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"eager.*structured, sdpa, flex"):
        build_masks(a_config(4, None, True), ones, ones.bool(), ones[0] + 8, 16, "eager")
