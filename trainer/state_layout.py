"""Where a drafter's state lies in memory and in files: names, shapes, offsets. Imports no torch.

A state is the fp32 weights and AdamW's two moments. The launcher keeps two such states in shared memory (the last
average and the one that is being written), and a checkpoint's tensor files are those bytes behind a header:

    buffer 0                                              buffer 1
    | header | weights | moments of set 0 | set 1 ... |   | header | weights | ...

Weights are sorted by name; a set of moments is `exp_avg.<name>` sorted, then `exp_avg_sq.<name>` sorted. There is one
set when moments are averaged, one for each drafter when they are local.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from trainer.drafter_config import DrafterConfig

#: Bytes before the weights of a buffer, for its header; also what every region is aligned to.
HEADER = 4096
BUFFERS = 2
_KINDS = ("exp_avg", "exp_avg_sq")


def drafter_shapes(drafter: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of `trainer.drafter.Drafter`, by formula (a test holds the two together)."""
    h, i, d = drafter.hidden_size, drafter.intermediate_size, drafter.head_dim
    q, kv = drafter.num_attention_heads * d, drafter.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(drafter.target_layer_ids) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for number in range(drafter.num_hidden_layers):
        layer = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,),
            "mlp.gate_proj": (i, h),
            "mlp.up_proj": (i, h),
            "mlp.down_proj": (h, i),
        }
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


@dataclass(frozen=True)
class Place:
    """One tensor of a state: its key in a checkpoint's file, kind ("weight", "exp_avg", "exp_avg_sq"), name, bytes."""

    key: str
    kind: str
    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return 4 * prod(self.shape)


@dataclass(frozen=True)
class StateLayout:
    """
    Args:
        shapes: name -> shape of each weight. moment_sets: 1, or the number of drafters when moments are local.
    """

    shapes: Mapping[str, tuple[int, ...]]
    moment_sets: int = 1

    @cached_property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def _region(self) -> int:
        return _aligned(4 * self.parameters)

    @property
    def buffer_bytes(self) -> int:
        return HEADER + self._region + self.moment_sets * _aligned(8 * self.parameters)

    @property
    def total_bytes(self) -> int:
        """Of both buffers."""
        return BUFFERS * self.buffer_bytes

    def regions(self, buffer: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the weights and of each set of moments, padding not included."""
        at = buffer * self.buffer_bytes + HEADER
        moments = at + self._region
        each = 8 * self.parameters
        sets = [(moments + k * _aligned(each), each) for k in range(self.moment_sets)]
        return [(at, 4 * self.parameters), *sets]

    def weights(self, buffer: int) -> Iterator[Place]:
        """Places of the weights, in the order in which they lie."""
        yield from self._places(self.regions(buffer)[0][0], ("weight",))

    def moments(self, buffer: int, number: int) -> Iterator[Place]:
        """Places of one set of moments."""
        yield from self._places(self.regions(buffer)[1 + number][0], _KINDS)

    def _places(self, at: int, kinds: Sequence[str]) -> Iterator[Place]:
        for kind in kinds:
            for name in sorted(self.shapes):
                key = name if kind == "weight" else f"{kind}.{name}"
                place = Place(key, kind, name, self.shapes[name], at)
                yield place
                at += place.bytes

    def to_dict(self) -> dict[str, Any]:
        return {"shapes": {name: list(s) for name, s in self.shapes.items()}, "moment_sets": self.moment_sets}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> StateLayout:
        return cls({name: tuple(s) for name, s in raw["shapes"].items()}, int(raw["moment_sets"]))


def _aligned(size: int) -> int:
    return -(-size // HEADER) * HEADER


@dataclass(frozen=True)
class Kept:
    """A buffer's header: what its state stands for.

    Attributes:
        buffer: 0 or 1. step: optimiser steps. batches: of the run, all below are in it.
        sums: of each region, its 32-bit words added up as signed numbers modulo 2**64: a torn copy is found by it.
    """

    buffer: int
    step: int
    batches: int
    sums: tuple[int, ...]

    def encode(self) -> bytes:
        text = json.dumps({"schema": 1, "step": self.step, "batches": self.batches, "sums": list(self.sums)}).encode()
        if len(text) > HEADER:
            raise ValueError(f"a header of {len(text)} bytes does not fit {HEADER}")
        return text.ljust(HEADER, b"\0")

    @classmethod
    def decode(cls, buffer: int, raw: bytes) -> Kept | None:
        """None where the buffer holds no state that counts.

        Raises:
            ValueError: what lies there is no header.
        """
        text = raw.rstrip(b"\0")
        if not text:
            return None
        try:
            found = json.loads(text)
            return cls(buffer, int(found["step"]), int(found["batches"]), tuple(int(s) for s in found["sums"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no header: {error}") from error


def wrapped(total: int) -> int:
    """A sum modulo 2**64, as a signed number: what int64 addition gives."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
