"""The block loss through a frozen head, without ever holding the logits of more than one chunk of rows.

At 248 k words one row of logits is 0.5 MiB in bf16, and a step has tens of thousands of rows. Both modes give each
row's cross-entropy; the objectives are sums over rows with detached weights, so they need not know the mode:

- "fused": the gradient of a row's cross-entropy with respect to its hidden state does not depend on any other row.
  It is computed in forward, where the chunk's logits already exist; backward only scales it. No recomputation.
- "checkpoint": the textbook way, gradient checkpointing of each chunk. Recomputes the logits in backward.

Logits, softmax statistics and the sums of both products are float32, whatever the dtype of rows and head. Rows that do
not count (padding blocks, slots past the end or not supervised) never reach the head.
"""

from __future__ import annotations

from functools import cache
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
    slots = config.block_size - 1
    # Only rows that count go through the head: a padding block's cost nothing. On a GPU this waits for the forward,
    # once a step; the head's kernels are long enough to hide that.
    which = counted.flatten().nonzero()[:, 0]
    index = which // slots * config.block_size + which % slots + 1
    gold = labels.flatten()[which]
    losses, likely = row_losses(
        hidden.flatten(0, 1), index, head_weight, gold, mode=mode, reentrant=reentrant, chunk=chunk
    )
    entropy = losses.new_zeros(labels.numel()).scatter(0, which, losses).view_as(labels)
    predicted = torch.full_like(labels.flatten(), -1).scatter(0, which, likely).view_as(labels)
    weights = slot_weights(entropy.detach(), counted, objective=objective, gamma=gamma, alpha=alpha)
    numerator = (weights * entropy).sum()
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
    hidden: Tensor, index: Tensor, head_weight: Tensor, labels: Tensor, *, mode: str, reentrant: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and most likely token of some rows.

    Args:
        hidden: [N, H]. index: [M] int64, the rows, each at most once. head_weight: [V, H]. labels: [M] int64.

    Returns:
        [M] float32 with a gradient to `hidden`, and [M] int64.
    """
    head = head_weight.detach()
    gradient = hidden.requires_grad and torch.is_grad_enabled()
    # What is float32 here must stay so.
    with torch.autocast(hidden.device.type, enabled=False):
        if mode == "fused" and gradient:
            entropy, predicted = _FusedRows.apply(hidden, index, head, labels, chunk)
            return entropy, predicted
        parts = []
        for rows, gold in zip(hidden.index_select(0, index).split(chunk), labels.split(chunk), strict=True):
            if gradient:
                # Nothing random in a chunk, so the generator's state need not be saved.
                out = checkpoint(_chunk_losses, rows, head, gold, use_reentrant=reentrant, preserve_rng_state=False)
            else:
                out = _chunk_losses(rows, head, gold)
            parts.append(out)
        return torch.cat([entropy for entropy, _ in parts]), torch.cat([predicted for _, predicted in parts])


def _chunk_losses(rows: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = _Logits.apply(rows, head)
    return F.cross_entropy(logits, labels, reduction="none"), logits.detach().argmax(dim=-1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[n, k] times [k, m], in float32. With bf16 inputs a GPU also sums in float32 across its partial sums."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


class _Logits(torch.autograd.Function):
    """rows [n, H] through the head [V, H], [n, V] float32, with a gradient to the rows only."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor) -> Tensor:
        ctx.save_for_backward(head)
        ctx.dtype = rows.dtype
        return _product(rows.to(head.dtype), head.T)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (head,) = ctx.saved_tensors
        return _product(upstream.to(head.dtype), head).to(ctx.dtype), None


class _FusedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, index: Tensor, head: Tensor, labels: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        count = index.shape[0]
        entropy = torch.empty(count, dtype=torch.float32, device=hidden.device)
        predicted = torch.empty_like(labels)
        unit = hidden.new_empty(count, hidden.shape[1])  # d entropy_i / d rows_i
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            logits = _product(hidden[index[part]].to(head.dtype), head.T)
            softmax = _compiled_softmax() if logits.is_cuda and logits.shape[0] > 1 else softmax_in_place
            entropy[part], predicted[part], slopes = softmax(logits, labels[part, None], head.dtype)
            del logits
            unit[part] = _product(slopes, head)
            del slopes
        ctx.save_for_backward(index, unit)
        ctx.rows = hidden.shape[0]
        ctx.mark_non_differentiable(predicted)
        return entropy, predicted

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        index, unit = ctx.saved_tensors
        gradient = unit.new_zeros(ctx.rows, unit.shape[1])
        gradient[index] = (unit * upstream[:, None]).to(unit.dtype)
        return gradient, None, None, None, None


def softmax_in_place(logits: Tensor, gold: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, most likely token and slope of the cross-entropy, of each row.

    Args:
        logits: [n, V] float32; its memory is used up. gold: [n, 1] int64.

    Returns:
        [n] float32, [n] int64, and softmax minus one-hot, [n, V] in `dtype`.
    """
    largest, predicted = logits.max(dim=-1, keepdim=True)
    picked = logits.gather(1, gold)
    slopes = logits.sub_(largest).exp_()
    total = slopes.sum(dim=-1, keepdim=True)
    slopes.div_(total).scatter_add_(1, gold, torch.full_like(total, -1.0))
    return (total.log() - (picked - largest))[:, 0], predicted[:, 0], slopes.to(dtype)


def softmax_to_fuse(logits: Tensor, gold: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same without changing anything in place: compiled, it reads the logits twice or three times in all."""
    largest, predicted = logits.max(dim=-1, keepdim=True)
    powers = (logits - largest).exp()
    total = powers.sum(dim=-1, keepdim=True)
    words = torch.arange(logits.shape[1], device=logits.device)
    slopes = powers / total - (words == gold).float()
    entropy = total.log() - (logits.gather(1, gold) - largest)
    return entropy[:, 0], predicted[:, 0], slopes.to(dtype)


@cache
def _compiled_softmax() -> Any:
    """One compilation for all numbers of rows."""
    return torch.compile(softmax_to_fuse, fullgraph=True, dynamic=True)


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
