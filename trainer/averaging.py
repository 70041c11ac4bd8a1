"""Averages the drafters: fp32 masters and both moments, weighted by supervised tokens since the last averaging.

Every drafter takes part in every averaging, also one that trained nothing since (its weight is 0): whether to skip is
never decided by one process alone, so no collective waits for somebody who is not there. One drafter changes nothing,
not even a bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

#: Elements that travel in one all-reduce: large enough for the network, small beside the weights.
PIECE = 1 << 24


@torch.no_grad()
def average(tensors: Iterable[Tensor], tokens: float, device: torch.device) -> float:
    """Replaces float32 tensors, in place, by their weighted mean over all drafters.

    Args:
        tensors: the same shapes in the same order on every drafter. tokens: this drafter's weight.
        device: of the tensors.

    Returns:
        Tokens of all drafters. If nobody has any, all weigh the same.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tokens
    total = torch.tensor([tokens], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    everybody = float(total.item())
    share = tokens / everybody if everybody > 0 else 1.0 / dist.get_world_size()
    for piece in pieces(tensors):
        flat = torch.cat([t.reshape(-1) for t in piece]).mul_(share)
        dist.all_reduce(flat)
        start = 0
        for tensor in piece:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
    return everybody


def pieces(tensors: Iterable[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Groups of whole tensors of about `PIECE` elements; a tensor is not cut."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.numel() > PIECE:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.numel()
    if group:
        yield group
