"""Which layers of the target the drafter reads.

Layer id i is the output of decoder layer i, counted from 0: `hidden_states[i + 1]` in Hugging Face's numbering, where
`hidden_states[0]` is the embedding. Being off by one here trains without complaint and serves with a low acceptance.
"""

from __future__ import annotations

from trainer.errors import ConfigError


def tap_layer_ids(num_target_layers: int, taps: int) -> list[int]:
    """Evenly spread ids from layer 1 to layer n - 3, rounded half to even; one tap reads the middle layer.

    Args:
        num_target_layers: n, decoder layers of the target.
        taps: k, how many of them are read.

    Returns:
        k ascending layer ids, `round(1 + i * (n - 4) / (k - 1))`: 64 layers and 5 taps give [1, 16, 31, 46, 61].

    Raises:
        ConfigError: k < 1, or the target has too few layers for k different taps.
    """
    if taps < 1:
        raise ConfigError(f"{taps} taps: at least 1 is needed", "taps")
    if taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    ids = [round(1 + i * span / (taps - 1)) for i in range(taps)]
    if span < 0 or len(set(ids)) != taps:
        most = max(1, num_target_layers - 3)
        raise ConfigError(
            f"a target of {num_target_layers} layers has no {taps} different tapped layers",
            "taps",
            f"ask for at most {most}, or name the layers in drafter.layer_ids",
        )
    return ids
