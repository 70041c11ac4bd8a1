"""Makes the drafters equal: fp32 masters and both moments averaged every K steps, weighted by supervised tokens since
the last averaging; or (`sync = "step"`) gradients added up at every step, weighted so that together they are those of
one batch as large as all of theirs.

Every drafter takes part every time, also one that trained nothing (its weight is 0): whether to skip is never decided
by one process alone, so no collective waits for somebody who is not there. One drafter changes nothing, not even a
bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    _sum_in_place(tensors, share)
    return everybody


@dataclass(frozen=True)
class StepSums:
    """Of all drafters: their losses' denominators, counted slots, and how many losses are not finite."""

    weight: float
    positions: float
    bad: float


@torch.no_grad()
def add_gradients(
    parameters: Sequence[nn.Parameter], weight: float, positions: float, bad: bool, device: torch.device
) -> StepSums:
    """Replaces each gradient by the sum of all drafters' ones, each times its share of the weight.

    With the loss a weighted sum over its denominator, and that denominator as weight, this is the gradient of one
    batch that holds everybody's. Gradients stay as they are if nobody has anything to train, or a loss is not finite.

    Args:
        parameters: in the same order on every drafter; no gradient counts as zeros. weight: of this drafter's batch.
        positions: counted slots of it. bad: its loss is not finite. device: of the parameters.
    """
    sums = torch.tensor([weight, positions, float(bad)], dtype=torch.float64, device=device)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if not alone:
        dist.all_reduce(sums)
    total = StepSums(*sums.tolist())
    if alone or total.bad or not total.positions:
        return total
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _sum_in_place((p.grad for p in parameters if p.grad is not None), weight / total.weight)
    return total


@torch.no_grad()
def make_equal(tensors: Iterable[Tensor], source: int) -> None:
    """Everybody gets, in place, what drafter `source` has: weights that should be equal become so to the last bit."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for piece in pieces(tensors):
        flat = torch.cat([t.reshape(-1) for t in piece])
        dist.broadcast(flat, src=source)
        _spread(flat, piece)


def _sum_in_place(tensors: Iterable[Tensor], share: float) -> None:
    for piece in pieces(tensors):
        flat = torch.cat([t.reshape(-1) for t in piece]).mul_(share)
        dist.all_reduce(flat)
        _spread(flat, piece)


def _spread(flat: Tensor, piece: Sequence[Tensor]) -> None:
    start = 0
    for tensor in piece:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


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
