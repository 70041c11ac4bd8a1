"""The drafter's training attention: which block row may see what, and the two ways to compute it.

Queries are all blocks side by side, [A*W] rows. Keys are [context S | blocks A*W]. A block sees context strictly below
its anchor and the whole of its own block, and no other block. In a sliding layer with window w the row of slot t at
position p = anchor + t sees context from p - (w - 1) on, and inside its block only slots up to t if the layer is
causal. A padding block keeps its own block and sees no context: no row is ever fully masked, so no softmax is empty.

Two backends: "sdpa" with a dense boolean mask (CPU), and "flex", one compiled flex_attention with block masks (CUDA).
Past its recompile limit flex attention would silently run dense and need tens of GB, so here that is an error.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.drafter_config import SLIDING, DrafterConfig
from trainer.errors import ConfigError, TrainerError

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BACKENDS = ("sdpa", "flex")


@dataclass(frozen=True)
class Masks:
    """The masks of one step, one for each kind of layer that the drafter has.

    Attributes:
        backend: "sdpa" or "flex".
        by_kind: layer type -> dense mask [B, 1, A*W, S + A*W] bool (True: may see), or a BlockMask.
    """

    backend: str
    by_kind: dict[str, Any]


def build_masks(
    config: DrafterConfig, anchors: Tensor, anchor_valid: Tensor, lengths: Tensor, S: int, backend: str
) -> Masks:
    """Builds each mask that the drafter's layers need; once a step, shared by its layers and heads.

    Args:
        config: the drafter; its kinds of layers decide how many masks there are.
        anchors: [B, A] int64. anchor_valid: [B, A] bool. lengths: [B] int64.
        S: padded context length.
        backend: "sdpa" or "flex".

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
            by_kind[kind] = _dense_mask(anchors, limit, S, config.block_size, window, causal)
        elif backend == "flex":
            by_kind[kind] = _flex().block_mask(anchors, limit, S, config.block_size, window, causal)
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
        return _flex().attend(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _dense_mask(anchors: Tensor, limit: Tensor, context: int, block: int, window: int | None, causal: bool) -> Tensor:
    """[B, 1, A*W, context + A*W] bool, put together from its context part and its block-diagonal part."""
    batch, count = anchors.shape
    slots = torch.arange(block, device=anchors.device)
    keys = torch.arange(context, device=anchors.device)
    sees = (keys < limit[:, :, None, None]).expand(batch, count, block, context)
    if window is not None:
        rows = anchors[:, :, None] + slots
        sees = sees & (keys > rows[..., None] - window)
    own = slots[:, None] >= slots if causal else torch.ones(block, block, dtype=torch.bool, device=anchors.device)
    diagonal = torch.block_diag(*[own] * count).to(torch.bool)
    return torch.cat([sees.reshape(batch, -1, context), diagonal.expand(batch, -1, -1)], dim=2)[:, None]


def make_mask_mod(
    anchors: Tensor, limit: Tensor, context: int, block: int, window: int | None, causal: bool
) -> MaskMod:
    """The same rule for one (batch, head, query row, key) at a time, as flex attention wants it.

    Args:
        anchors: [B, A]. limit: [B, A], first context position that the block may not see (0 for a padding block).
        context: S. block: W. window: of a sliding layer. causal: inside the block.
    """

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        which = row // block
        in_context = (key < context) & (key < limit[b, which])
        # Guarded by key >= context: integer division of a negative number rounds differently on CPU and GPU.
        in_block = (key >= context) & (((key - context) // block) == which)
        if window is not None:
            in_context = in_context & (key > anchors[b, which] + row % block - window)
        if causal:
            in_block = in_block & ((key - context) <= row)
        return in_context | in_block

    return sees


class _Flex:
    """One compiled flex_attention and one compiled mask builder for the whole process.

    fullgraph=True makes torch raise, instead of running uncompiled, when it reaches its recompile limit.
    """

    def __init__(self) -> None:
        import torch._dynamo
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if getattr(torch._dynamo.config, "disable", False) or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            raise TrainerError(
                "torch.compile is switched off, so flex attention would run dense",
                "TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE",
                'unset it, or set attention = "sdpa"',
            )
        # Should anything still reach the uncompiled path: newer torch warns there, and the warning becomes an error.
        warnings.filterwarnings("error", message="flex_attention called without torch.compile")
        # One compilation a bucket and kind of layer is wanted, and torch's default limit is 8. `_admit` bounds them.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
        self._attend: Any = torch.compile(flex_attention, fullgraph=True, dynamic=False)
        self._build: Any = torch.compile(create_block_mask, fullgraph=True, dynamic=False)
        self.shapes: set[tuple[Any, ...]] = set()
        self.frozen = False

    def _admit(self, shape: tuple[Any, ...]) -> None:
        if shape in self.shapes:
            return
        if self.frozen:
            raise TrainerError(
                f"flex attention would compile again, for a new shape {shape}",
                f"shapes after warm-up: {sorted(map(str, self.shapes))}",
                "keep anchors, block size and lengths to the configured buckets",
            )
        self.shapes.add(shape)

    def block_mask(
        self, anchors: Tensor, limit: Tensor, context: int, block: int, window: int | None, causal: bool
    ) -> Any:
        if not anchors.is_cuda:
            raise ConfigError(
                f"flex attention needs CUDA, the anchors are on {anchors.device}", "attention", 'use "sdpa" on CPU'
            )
        batch, rows = anchors.shape[0], anchors.shape[1] * block
        self._admit(("mask", batch, rows, context + rows, window, causal))
        rule = make_mask_mod(anchors, limit, context, block, window, causal)
        # H=None: one mask for all heads; a mask for each head is heads times the memory.
        return self._run(self._build, rule, batch, None, rows, context + rows, device=anchors.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        self._admit(("attend", tuple(q.shape), tuple(k.shape), q.dtype, torch.is_grad_enabled()))
        return self._run(self._attend, q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    def _run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if "RecompileLimit" not in type(error).__name__ and "without torch.compile" not in str(error):
                raise
            shapes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
            raise TrainerError(
                f"flex attention was about to run dense, at {shapes}",
                "torch.compile's recompile limit",
                "keep anchors, block size and lengths to the configured buckets",
            ) from error


_the_flex: _Flex | None = None


def _flex() -> _Flex:
    global _the_flex
    if _the_flex is None:
        _the_flex = _Flex()
    return _the_flex


def freeze_shapes(frozen: bool = True) -> None:
    """Ends the warm-up: from now on a shape that flex attention has not seen is an error. No effect without flex."""
    if _the_flex is not None:
        _the_flex.frozen = frozen
