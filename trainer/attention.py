"""The drafter's training attention: which block row may see what, and the ways to compute it.

Queries are all blocks side by side, [A*W] rows. Keys are [context S | blocks A*W]. A block sees context strictly below
its anchor and the whole of its own block, and no other block. In a sliding layer with window w the row of slot t at
position p = anchor + t sees context from p - (w - 1) on, and inside its block only slots up to t if the layer is
causal. A padding block keeps its own block and sees no context: no row is ever fully masked, so no softmax is empty.

Backends, equal in values and gradients:

- "structured" (the CPU's default): anchors ascend, so a few neighbouring blocks need one short range of the context.
  Each such group is one small attention over [its range | its own blocks], instead of over all keys.
- "sdpa": one attention over all keys with a dense boolean mask. The reference; also what a single block needs.
- "flex" (CUDA): one compiled flex_attention with block masks, trainer/flex.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.drafter_config import SLIDING, DrafterConfig
from trainer.errors import ConfigError
from trainer.flex import the_flex

BACKENDS = ("structured", "sdpa", "flex")

#: Rows of a group of blocks. More rows: fewer calls, but a longer range and more blocks that do not see each other.
#: 64 to 256 are equally fast within 15 % (2 x 1,024 tokens, 128 anchors x 16).
GROUP_ROWS = 128
#: Pairs of row and key that are computed in the time that one more call takes.
CALL_COST = 16384


@dataclass(frozen=True)
class Masks:
    """The masks of one step, one for each kind of layer that the drafter has.

    Attributes:
        backend: one of BACKENDS.
        by_kind: layer type -> "sdpa": dense mask [B, 1, A*W, S + A*W] bool (True: may see); "structured": a list of
            `Group`; "flex": a BlockMask.
    """

    backend: str
    by_kind: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """What the rows of a group see, in all sequences or in one of them.

    Attributes:
        start, stop: range of the context, 0 <= start <= stop <= S.
        bias: [B or 1, 1, rows, (stop - start) + rows] float32 over [range | the group's own blocks]: 0 or -inf.
    """

    start: int
    stop: int
    bias: Tensor


@dataclass(frozen=True)
class Group:
    """Neighbouring blocks. `rows`: their block rows. `spans`: one for all sequences together, or B of them."""

    rows: int
    spans: tuple[Span, ...]


def build_masks(
    config: DrafterConfig, anchors: Tensor, anchor_valid: Tensor, lengths: Tensor, S: int, backend: str
) -> Masks:
    """Builds each mask that the drafter's layers need; once a step, shared by its layers and heads.

    Args:
        config: the drafter; its kinds of layers decide how many masks there are.
        anchors: [B, A] int64. anchor_valid: [B, A] bool. lengths: [B] int64.
        S: padded context length.
        backend: "structured" (any order of anchors is right, an ascending one is fast), "sdpa" or "flex".

    Raises:
        ConfigError: an unknown backend, or "flex" off CUDA.
        TrainerError: torch.compile is switched off, or a new shape after `freeze_shapes`.
    """
    limit = torch.where(anchor_valid, torch.minimum(anchors, lengths[:, None]), torch.zeros_like(anchors))
    by_kind: dict[str, Any] = {}
    for kind in config.layer_kinds:
        window = config.sliding_window if kind == SLIDING else None
        causal = config.causal and kind == SLIDING
        if backend == "sdpa":
            keys = torch.arange(S, device=anchors.device)
            by_kind[kind] = dense_mask(anchors, limit, keys, config.block_size, window, causal)
        elif backend == "structured":
            by_kind[kind] = _groups(anchors, limit, config.block_size, window, causal)
        elif backend == "flex":
            by_kind[kind] = the_flex().block_mask(anchors, limit, S, config.block_size, window, causal)
        else:
            raise ConfigError(f"unknown attention backend {backend!r}", "attention", f"one of {', '.join(BACKENDS)}")
    return Masks(backend, by_kind)


def attend(q: Tensor, k: Tensor, v: Tensor, masks: Masks, kind: str) -> Tensor:
    """Grouped-query attention of block rows over [context | blocks], scaled by 1 / sqrt(head_dim).

    Args:
        q: [B, heads, A*W, D]. k, v: [B, kv_heads, S + A*W, D].
        masks: of this step. kind: the layer's type.

    Returns:
        [B, heads, A*W, D].
    """
    mask = masks.by_kind[kind]
    if masks.backend == "flex":
        return the_flex().attend(q, k, v, mask)
    if masks.backend == "structured":
        return _attend_groups(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def dense_mask(anchors: Tensor, limit: Tensor, keys: Tensor, block: int, window: int | None, causal: bool) -> Tensor:
    """The rule as a table: the context part beside the block-diagonal part.

    Args:
        anchors: [B, A]. limit: [B, A], first context position that the block may not see (0 for a padding block).
        keys: [n], context positions. block: W. window: of a sliding layer. causal: inside the block.

    Returns:
        [B, 1, A*W, n + A*W] bool, True: may see.
    """
    batch, count = anchors.shape
    slots = torch.arange(block, device=anchors.device)
    sees = (keys < limit[:, :, None, None]).expand(batch, count, block, len(keys))
    if window is not None:
        rows = anchors[:, :, None] + slots
        sees = sees & (keys > rows[..., None] - window)
    own = slots[:, None] >= slots if causal else torch.ones(block, block, dtype=torch.bool, device=anchors.device)
    diagonal = torch.block_diag(*[own] * count).to(torch.bool)
    return torch.cat([sees.flatten(1, 2), diagonal.expand(batch, -1, -1)], dim=2)[:, None]


def _groups(anchors: Tensor, limit: Tensor, block: int, window: int | None, causal: bool) -> list[Group]:
    """Cuts the blocks into groups; a group's sequences share a call where that costs less than a call for each."""
    batch, count = anchors.shape
    size = max(1, GROUP_ROWS // block)
    starts, limits = anchors.tolist(), limit.tolist()
    groups = []
    for first in range(0, count, size):
        last = min(first + size, count)
        rows = (last - first) * block
        ranges = [_range(a[first:last], b[first:last], window) for a, b in zip(starts, limits, strict=True)]
        seen = [r for r in ranges if r[0] < r[1]] or [(0, 0)]
        shared = (min(r[0] for r in seen), max(r[1] for r in seen))
        wasted = rows * sum((shared[1] - shared[0]) - (stop - start) for start, stop in ranges)
        together = wasted <= CALL_COST * (batch - 1)
        spans = []
        for b, (start, stop) in enumerate([shared] if together else ranges):
            which = slice(None) if together else slice(b, b + 1)
            keys = torch.arange(start, stop, device=anchors.device)
            mask = dense_mask(anchors[which, first:last], limit[which, first:last], keys, block, window, causal)
            bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
            spans.append(Span(start, stop, bias))
        groups.append(Group(rows, tuple(spans)))
    return groups


def _range(anchors: list[int], limits: list[int], window: int | None) -> tuple[int, int]:
    """The context positions that any of these blocks sees; (0, 0) if none sees any."""
    seeing = [(a, b) for a, b in zip(anchors, limits, strict=True) if b > 0]
    if not seeing:
        return 0, 0
    start = 0 if window is None else max(0, min(a for a, _ in seeing) - window + 1)
    return start, max(start, max(b for _, b in seeing))


def _attend_groups(q: Tensor, k: Tensor, v: Tensor, groups: list[Group]) -> Tensor:
    batch, gqa = q.shape[0], q.shape[1] != k.shape[1]
    rows = [group.rows for group in groups]
    context = k.shape[2] - q.shape[2]
    own_q = q.split(rows, dim=2)
    context_k, *own_k = k.split([context, *rows], dim=2)
    context_v, *own_v = v.split([context, *rows], dim=2)
    # Split once, here: each view's gradient is a tensor of the size of what it is a view of.
    whole, single = ((context_k,), (context_v,)), (context_k.split(1), context_v.split(1))
    out = []
    for i, group in enumerate(groups):
        alone = len(group.spans) > 1
        size, contexts = (1, single) if alone else (batch, whole)
        parts = [
            F.scaled_dot_product_attention(
                queries,
                torch.cat([before_k[:, :, span.start : span.stop], keys], dim=2),
                torch.cat([before_v[:, :, span.start : span.stop], values], dim=2),
                attn_mask=span.bias.to(q.dtype),
                enable_gqa=gqa,
            )
            for span, queries, before_k, before_v, keys, values in zip(
                group.spans,
                own_q[i].split(size),
                *contexts,
                own_k[i].split(size),
                own_v[i].split(size),
                strict=True,
            )
        ]
        out.append(torch.cat(parts) if alone else parts[0])
    return torch.cat(out, dim=2)
