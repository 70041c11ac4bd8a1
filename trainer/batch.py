"""One training batch, and the block inputs made from it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B sequences padded on the right to S positions, with A anchors each.

    Attributes:
        input_ids: [B, S] int64.
        loss_mask: [B, S] float32; a position above 0 is supervised.
        lengths: [B] int64, real tokens of each sequence.
        anchors: [B, A] int64, ascending.
        anchor_valid: [B, A] bool; False marks a padding block, which has no loss and sees no context.
        features: [B, S, k*H], the target's tapped layers concatenated on the last axis.
        sample_ids: the B samples' ids.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    anchors: Tensor
    anchor_valid: Tensor
    features: Tensor
    sample_ids: list[int]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device; a pinned source and `non_blocking` overlap the copy with compute."""
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=non_blocking)
            for f in fields(self)
            if f.name != "sample_ids"
        }
        return replace(self, **moved)


def block_input_ids(batch: Batch, block_size: int, mask_token_id: int) -> Tensor:
    """Token ids of all blocks side by side: the anchor's token in slot 0, the mask token in the others.

    Returns:
        [B, A*W] int64.
    """
    anchor_ids = batch.input_ids.gather(1, batch.anchors)
    ids = torch.full((*anchor_ids.shape, block_size), mask_token_id, dtype=torch.int64, device=anchor_ids.device)
    ids[:, :, 0] = anchor_ids
    return ids.flatten(1)


def block_labels(batch: Batch, block_size: int) -> tuple[Tensor, Tensor]:
    """What slots 1..W-1 of each block are to predict: slot k of a block predicts token anchor + k.

    Returns:
        labels [B, A, W-1] int64 (a slot past the padded end repeats the last position, and is not counted), and
        counted [B, A, W-1] bool: the block is valid, the label lies inside the sequence and is supervised.
    """
    padded = batch.input_ids.shape[1]
    slots = torch.arange(1, block_size, device=batch.anchors.device)
    positions = batch.anchors[:, :, None] + slots
    inside = positions < batch.lengths[:, None, None]
    flat = positions.clamp(max=padded - 1).flatten(1)
    labels = batch.input_ids.gather(1, flat).view_as(positions)
    supervised = batch.loss_mask.gather(1, flat).view_as(positions) > 0
    return labels, inside & supervised & batch.anchor_valid[:, :, None]
