"""The small drafter of the numerics' tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.drafter_config import DrafterConfig


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
