"""The block loss through a frozen head, without ever holding the logits of more than one chunk of rows.

At 248 k words one row of logits is 0.5 MiB in bf16, and a step has tens of thousands of rows. Both modes give each
row's cross-entropy; the objectives are sums over rows with detached weights, so they need not know the mode:

- "fused": the gradient of a row's cross-entropy with respect to its hidden state does not depend on any other row.
  It is computed in forward, where the chunk's logits already exist; backward only scales it. No recomputation.
- "checkpoint": the textbook way, gradient checkpointing of each chunk. Recomputes the logits in backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.batch import Batch, block_labels
from trainer.drafter_config import DrafterConfig
from trainer.errors import ConfigError

OBJECTIVES = ("dflash", "dpace")
MODES = ("fused", "checkpoint")


class LossOut(NamedTuple):
    """What a step learns; all are scalars on the device, so that nothing waits for the GPU.

    Attributes:
        numerator: weighted sum of cross-entropies, float32.
        denominator: "dflash": sum of weights; "dpace": number of sequences B.
        loss: numerator / denominator, 0 if no slot counts. The only one with a gradient, besides the numerator.
        correct: counted slots whose most likely token is the label.
        positions: counted slots.
        prefix_sum: right first slots, summed over valid blocks, without the bonus token.
        prefix_count: valid blocks; prefix_sum / prefix_count + 1 estimates the accepted tokens a step.
    """

    numerator: Tensor
    denominator: Tensor
    loss: Tensor
    correct: Tensor
    positions: Tensor
    prefix_sum: Tensor
    prefix_count: Tensor


def block_loss(
    hidden: Tensor,
    head_weight: Tensor,
    batch: Batch,
    config: DrafterConfig,
    *,
    objective: str = "dflash",
    gamma: float = 7.0,
    alpha: float = 0.5,
    mode: str = "fused",
    reentrant: bool = False,
    chunk: int = 2048,
) -> LossOut:
    """The loss of all blocks of a batch; slot 0 has none.

    Args:
        hidden: [B, A*W, H], the drafter's output.
        head_weight: [V, H], the target's; frozen, it gets no gradient.
        batch: anchors, masks and tokens.
        config: block size.
        objective: "dflash", slot weight exp(-(k-1) / gamma); or "dpace", weights from the drafter's own confidence.
        gamma: decay of "dflash", in slots. alpha: floor of "dpace", 0..1.
        mode: "fused" or "checkpoint". reentrant: which of torch's two checkpoints.
        chunk: rows whose logits exist at one time.

    Raises:
        ConfigError: an unknown objective or mode, or an impossible number.
    """
    _check(objective, mode, gamma, alpha, chunk)
    labels, counted = block_labels(batch, config.block_size)
    rows = hidden.unflatten(1, (-1, config.block_size))[:, :, 1:]
    entropy, predicted = row_losses(
        rows.reshape(-1, hidden.shape[-1]), head_weight, labels.flatten(), mode=mode, reentrant=reentrant, chunk=chunk
    )
    entropy, predicted = entropy.view_as(labels), predicted.view_as(labels)
    weights = slot_weights(entropy.detach(), counted, objective=objective, gamma=gamma, alpha=alpha)
    # A slot that does not count may hold an infinite cross-entropy: 0 * inf would be NaN.
    numerator = (weights * entropy.masked_fill(~counted, 0.0)).sum()
    if objective == "dflash":
        denominator = weights.sum()
        loss = numerator / denominator.clamp(min=torch.finfo(torch.float32).tiny)
    else:
        denominator = torch.full_like(numerator, float(hidden.shape[0])).detach()
        loss = numerator / denominator
    prefixes = accepted_prefix(predicted, labels, counted)
    return LossOut(
        numerator=numerator,
        denominator=denominator,
        loss=loss,
        correct=((predicted == labels) & counted).sum(),
        positions=counted.sum(),
        prefix_sum=prefixes.sum(),
        prefix_count=batch.anchor_valid.sum(),
    )


def accepted_prefix(predicted: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """How many first slots of each block are right, up to the first that is wrong.

    A slot that does not count (past the end, or not supervised) is passed over: it neither adds nor ends the prefix.

    Args:
        predicted, labels: [B, A, W-1] int64. counted: [B, A, W-1] bool.

    Returns:
        [B, A] int64, 0..W-1, without the bonus token. Not a product of the slots' accuracies: that under-reports.
    """
    unbroken = ((predicted == labels) | ~counted).long().cumprod(dim=-1)
    return (unbroken * counted).sum(dim=-1)


def slot_weights(entropy: Tensor, counted: Tensor, *, objective: str, gamma: float, alpha: float) -> Tensor:
    """Weight of each slot, [B, A, W-1] float32, 0 where it does not count.

    "dpace": q = exp(-cross-entropy) is the gold token's probability, s = (1 - alpha) q + alpha, and a slot weighs as
    much as all the prefixes that it is part of: the sum over j >= k of s_1 * ... * s_j. Slots that do not count are
    left out of product and sum.
    """
    if objective == "dflash":
        slots = torch.arange(entropy.shape[-1], device=entropy.device, dtype=torch.float32)
        return torch.exp(-slots / gamma) * counted
    kept = ((1.0 - alpha) * torch.exp(-entropy) + alpha).masked_fill(~counted, 1.0)
    prefixes = kept.cumprod(dim=-1) * counted
    return prefixes.flip(-1).cumsum(dim=-1).flip(-1) * counted


def row_losses(
    rows: Tensor, head_weight: Tensor, labels: Tensor, *, mode: str, reentrant: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and most likely token of each row.

    Args:
        rows: [N, H]. head_weight: [V, H]. labels: [N] int64.

    Returns:
        [N] float32 with a gradient to `rows`, and [N] int64.
    """
    head = head_weight.detach()
    if mode == "fused" and rows.requires_grad and torch.is_grad_enabled():
        entropy, predicted = _FusedRows.apply(rows, head, labels, chunk)
        return entropy, predicted
    parts = []
    for part, gold in zip(rows.split(chunk), labels.split(chunk), strict=True):
        if part.requires_grad and torch.is_grad_enabled():
            # Nothing random in a chunk, so the generator's state need not be saved.
            out = checkpoint(_chunk_losses, part, head, gold, use_reentrant=reentrant, preserve_rng_state=False)
        else:
            out = _chunk_losses(part, head, gold)
        parts.append(out)
    return torch.cat([entropy for entropy, _ in parts]), torch.cat([predicted for _, predicted in parts])


def _chunk_losses(rows: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(rows, head).float()
    return F.cross_entropy(logits, labels, reduction="none"), logits.detach().argmax(dim=-1)


class _FusedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        entropies, predictions = [], []
        unit = torch.empty_like(rows)  # d entropy_i / d rows_i
        for start in range(0, rows.shape[0], chunk):
            stop = min(start + chunk, rows.shape[0])
            gold = labels[start:stop, None]
            logits = F.linear(rows[start:stop].to(head.dtype), head).float()
            largest, predicted = logits.max(dim=-1, keepdim=True)
            picked = logits.gather(1, gold)
            # From here the chunk's logits turn into probabilities, then into the gradient, in place.
            probabilities = logits.sub_(largest).exp_()
            total = probabilities.sum(dim=-1, keepdim=True)
            entropies.append((total.log() - (picked - largest))[:, 0])
            predictions.append(predicted[:, 0])
            probabilities.div_(total)
            probabilities.scatter_add_(1, gold, torch.full_like(total, -1.0))
            unit[start:stop] = probabilities.to(head.dtype) @ head
        predicted = torch.cat(predictions)
        ctx.save_for_backward(unit)
        ctx.mark_non_differentiable(predicted)
        return torch.cat(entropies), predicted

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (unit,) = ctx.saved_tensors
        return (unit.float() * upstream[:, None]).to(unit.dtype), None, None, None


def _check(objective: str, mode: str, gamma: float, alpha: float, chunk: int) -> None:
    if objective not in OBJECTIVES:
        raise ConfigError(f"unknown objective {objective!r}", "objective", f"one of {', '.join(OBJECTIVES)}")
    if mode not in MODES:
        raise ConfigError(f"unknown loss mode {mode!r}", "loss mode", f"one of {', '.join(MODES)}")
    if not gamma > 0:
        raise ConfigError(f"gamma is {gamma}: it must be above 0", "gamma")
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha is {alpha}: it must lie in 0..1", "alpha")
    if chunk < 1:
        raise ConfigError(f"chunk is {chunk}: at least one row", "chunk")
