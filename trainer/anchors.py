"""Where blocks start: a pure function of the sample, no random stream.

A restart, another worker or another batch order must give a sample the same anchors, so every position draws its own
number from a hash of (key, position) and the smallest ones win. Padding a sequence further changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_LARGEST = (1 << 63) - 1


def _scramble(value: int) -> int:
    """A bijection of 64-bit words whose output bits all depend on all input bits (the splitmix64 finaliser)."""
    value &= _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(words: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's int64 shift copies the sign bit."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _draws(key: tuple[int, ...], positions: Tensor) -> Tensor:
    """One uniform number in [0, 2**63) for each position: [S] int64 -> [S] int64, equal on every device."""
    state = 0x9E3779B97F4A7C15
    for part in key:
        state = _scramble(state ^ _scramble(part + 0x632BE59BD9B4E019))
    words = (positions + 1) * _signed(0x9E3779B97F4A7C15) + _signed(state)  # int64 arithmetic wraps
    words = (words ^ _shift(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shift(words, 27)) * _signed(0x94D049BB133111EB)
    return _shift(words ^ _shift(words, 31), 1)


def pick_anchors(
    loss_mask: Tensor, lengths: Tensor, count: int, keys: Sequence[tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """Draws `count` anchors a sequence, without replacement, where the anchor and the next token are supervised.

    Args:
        loss_mask: [B, S], above 0 where supervised.
        lengths: [B], real tokens; an anchor lies below length - 1.
        count: A, the same for every batch, so that no shape ever changes.
        keys: for each sequence the integers that name it: (seed, epoch, sample id).

    Returns:
        anchors [B, A] int64 ascending, and valid [B, A] bool. With fewer candidates than A all of them are taken and
        the rest repeats the last one (0 if there is none), flagged invalid.

    Raises:
        ValueError: the number of keys is not B, or count < 1.
    """
    batch, padded = loss_mask.shape
    if len(keys) != batch:
        raise ValueError(f"{len(keys)} keys for {batch} sequences")
    if count < 1:
        raise ValueError(f"count is {count}: at least one anchor is needed")
    device = loss_mask.device
    positions = torch.arange(padded, dtype=torch.int64, device=device)
    supervised = loss_mask > 0
    eligible = torch.zeros_like(supervised)
    eligible[:, :-1] = supervised[:, :-1] & supervised[:, 1:]
    eligible &= positions + 1 < lengths.to(device)[:, None]

    draws = torch.stack([_draws(key, positions) for key in keys])
    draws = draws.masked_fill(~eligible, _LARGEST)
    taken = min(count, padded)
    chosen = draws.argsort(dim=1, stable=True)[:, :taken]
    valid = eligible.gather(1, chosen)
    # Positions that are not eligible sort behind all that are; then they repeat the last real anchor.
    anchors = chosen.masked_fill(~valid, padded).sort(dim=1).values
    valid = anchors < padded
    last = anchors.masked_fill(~valid, 0).amax(dim=1, keepdim=True)
    anchors = torch.where(valid, anchors, last)
    if taken < count:
        anchors = torch.cat([anchors, last.expand(batch, count - taken)], dim=1)
        valid = torch.cat([valid, valid.new_zeros(batch, count - taken)], dim=1)
    return anchors, valid
