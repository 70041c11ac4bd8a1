"""The DFlash drafter: a small transformer whose block rows read the target's hidden states as context.

The target's tapped layers are concatenated and fused once (`fc`, then `hidden_norm`); every layer projects that same
tensor to keys and values with the projections it also uses for the block rows. Queries come from block rows only.
Parameter names are those of the published drafters, without a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.attention import Masks, attend, build_masks
from trainer.drafter_config import DrafterConfig
from trainer.errors import ConfigError
from trainer.fused import fused_on_cuda

INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """Without a bias, and without torch's own initialisation, which would read the global random state."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Left to the drafter, which draws all weights from its seed."""


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


class Attention(nn.Module):
    """Attention of block rows over [context | blocks]; the layer's norm is applied to block rows only."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = Linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (normed per head, turned) and values of [B, T, H]: two of [B, kv_heads, T, D]."""
        return turn(self.k_norm(self._heads(self.k_proj(x))), rope), self._heads(self.v_proj(x))

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], masks: Masks, kind: str
    ) -> Tensor:
        queries = turn(self.q_norm(self._heads(self.q_proj(x))), rope)
        keys, values = self.keys_values(x, rope)
        keys, values = torch.cat([context[0], keys], dim=2), torch.cat([context[1], values], dim=2)
        out = attend(queries, keys, values, masks, kind)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Pre-norm attention and pre-norm MLP, each with a residual."""

    def __init__(self, config: DrafterConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], masks: Masks) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, masks, self.kind)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class ContextCache:
    """Keys and values of the context, one pair a layer, [B, kv_heads, length, D]. Block rows are never kept."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    length: int = 0


class Drafter(nn.Module):
    """The network. The embedding and the head are the target's, frozen, and not part of it.

    Args:
        config: its geometry.
        seed: of the initial weights (normal, std 0.02; norms 1). No global random state is read or changed.
    """

    def __init__(self, config: DrafterConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Plain attributes, not buffers: `.to(bfloat16)` must not round the frequencies.
        self._frequencies, self._rope_scale = rope_frequencies(config)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                with torch.no_grad():
                    drawn = torch.empty(module.weight.shape).normal_(0.0, INITIAL_STD, generator=generator)
                    module.weight.copy_(drawn)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of absolute positions [B or 1, T]: two of [B or 1, 1, T, D]."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions.float()[..., None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return (angles.cos() * self._rope_scale).to(dtype), (angles.sin() * self._rope_scale).to(dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's tapped layers [B, S, k*H] to the one context tensor of all layers, [B, S, H]."""
        return self.hidden_norm(self.fc(features))

    def forward(self, block_embeds: Tensor, features: Tensor, anchors: Tensor, masks: Masks) -> Tensor:
        """All blocks of a batch in one pass.

        Args:
            block_embeds: [B, A*W, H], the target's embedding of `block_input_ids`.
            features: [B, S, k*H], in the dtype of the weights (or under autocast).
            anchors: [B, A], absolute position of each block's slot 0.
            masks: from `build_masks` for these anchors.

        Returns:
            [B, A*W, H], after the final norm: ready for the target's head.
        """
        fused = self.fuse(features)
        slots = torch.arange(self.config.block_size, device=anchors.device)
        block_rope = self._rope((anchors[:, :, None] + slots).flatten(1), block_embeds.dtype)
        context_rope = self._rope(torch.arange(fused.shape[1], device=anchors.device)[None], fused.dtype)
        x = block_embeds
        for layer in cast("list[Layer]", self.layers):
            x = layer(x, block_rope, layer.self_attn.keys_values(fused, context_rope), masks)
        return self.norm(x)

    def extend(self, cache: ContextCache, features: Tensor) -> None:
        """Appends the context's next positions to the cache.

        Args:
            cache: changed in place; an empty one starts at position 0.
            features: [B, n, k*H] of positions cache.length .. cache.length + n - 1.
        """
        fused = self.fuse(features)
        positions = torch.arange(cache.length, cache.length + fused.shape[1], device=fused.device)[None]
        rope = self._rope(positions, fused.dtype)
        new = [layer.self_attn.keys_values(fused, rope) for layer in cast("list[Layer]", self.layers)]
        if cache.length == 0:
            cache.pairs = new
        else:
            cache.pairs = [
                (torch.cat([k, more_k], dim=2), torch.cat([v, more_v], dim=2))
                for (k, v), (more_k, more_v) in zip(cache.pairs, new, strict=True)
            ]
        cache.length += fused.shape[1]

    def propose(self, block_embeds: Tensor, features: Tensor, cache: ContextCache) -> Tensor:
        """One block right behind the context, as `forward` would compute it with its anchor there.

        Args:
            block_embeds: [B, W, H]; slot 0 is the last token known, at position cache.length after the extension.
            features: [B, n, k*H] of the positions since the last call; n >= 1 on the first.
            cache: extended in place by these n positions.

        Returns:
            [B, W, H], after the final norm.
        """
        if features.shape[1]:
            self.extend(cache, features)
        batch, width = block_embeds.shape[:2]
        device = block_embeds.device
        anchors = torch.full((batch, 1), cache.length, dtype=torch.int64, device=device)
        valid = torch.ones_like(anchors, dtype=torch.bool)
        masks = build_masks(self.config, anchors, valid, anchors[:, 0], cache.length, "sdpa")
        rope = self._rope(anchors + torch.arange(width, device=device), block_embeds.dtype)
        x = block_embeds
        for layer, context in zip(self.layers, cache.pairs, strict=True):
            x = layer(x, rope, context, masks)
        return self.norm(x)


@fused_on_cuda
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RMSNorm`'s forward; weight: [size] float32 or x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


@fused_on_cuda
def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


@fused_on_cuda
def turn(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding over the whole head dimension, halves paired (not neighbours): [B, heads, T, D]."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rope_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Angle a position for each pair of dimensions, [D / 2] float32, and the factor on cos and sin.

    Raises:
        ConfigError: a `rope_type` whose frequencies change with the sequence's length, or an unknown one.
    """
    kind = config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float() / config.head_dim
        return 1.0 / (config.rope_theta**steps), 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"rope_type {kind!r} is not supported", "rope_parameters", "default, linear, llama3 or yarn")
    # Published drafters copied from a target with length scaling: the servers use this very function.
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = Qwen3Config(**{k: v for k, v in config.to_hf().items() if k not in ("architectures", "auto_map")})
    with torch.device("cpu"):  # numbers, even for a drafter built on the meta device
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return frequencies.float(), float(scale)
