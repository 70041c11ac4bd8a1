"""Whether a split fits: bytes of each device, and of host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_ops.balance.rates import Split


@dataclass(frozen=True)
class Memory:
    """Bytes; None = not known. `python -m trainer check` says the first five.

    Attributes:
        target, drafter: of one worker, without activations. slot: of one ring slot. average: of the averages' memory.
        target_work, drafter_work: activations and the allocator's slack of one worker.
        device: of the smallest device. host: of the memory file system for ring and averages.
        features: there are features on disk, so that 0 targets are possible.
        devices: how many there are.
    """

    target: int | None = None
    drafter: int | None = None
    slot: int | None = None
    average: int | None = None
    target_work: int | None = None
    drafter_work: int | None = None
    device: int | None = None
    host: int | None = None
    features: bool = False
    devices: int | None = None


@dataclass(frozen=True)
class Verdict:
    """`state`: "fits", "unknown" or "no"; `text` says why, for people."""

    state: Literal["fits", "unknown", "no"]
    text: str


def judge_memory(split: Split, memory: Memory) -> Verdict:
    return Verdict("unknown", "memory is not known")


def feasible(split: Split, memory: Memory) -> str | None:
    """Why a split is refused; None where nothing known speaks against it (`judge_memory` says what is known)."""
    if split.drafters < 1:
        return "0 drafters: nobody would train"
    if split.targets < 0 or (split.targets == 0 and not memory.features):
        return "0 targets and no features on disk: nobody would fill the ring"
    if memory.devices is not None and split.devices > memory.devices:
        return f"{split.devices} devices are asked for, there are {memory.devices}"
    verdict = judge_memory(split, memory)
    return verdict.text if verdict.state == "no" else None
