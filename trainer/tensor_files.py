"""The tensor files of a checkpoint: written from memory without torch, read back into a drafter's masters."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import MOMENTS, WEIGHTS
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.optimizer import Masters

_PIECE = 1 << 22


def write_tensor_file(file: Path, tensors: Mapping[str, tuple[Sequence[int], memoryview]]) -> dict[str, Any]:
    """Writes fp32 tensors as safetensors, durably, without torch: their bytes go from memory to disk as they are.

    Args:
        tensors: key -> (shape, little-endian bytes), in the order in which they are written.

    Returns:
        {bytes, sha256}, for the manifest.

    Raises:
        OSError: no room, or the folder cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, (shape, raw) in tensors.items():
        header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + raw.nbytes]}
        at += raw.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    digest = hashlib.sha256()
    with file.open("wb", buffering=0) as opened:
        heads = [memoryview(len(text).to_bytes(8, "little")), memoryview(text)]
        for view in (*heads, *(raw.cast("B") for _, raw in tensors.values())):
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                digest.update(piece)
                while piece:
                    piece = piece[opened.write(piece) :]
        os.fsync(opened.fileno())
    return {"bytes": 8 + len(text) + at, "sha256": digest.hexdigest()}


def moments_file(number: int) -> str:
    """Name of a drafter's moments; of the only set, or of drafter 0, it has no number."""
    return MOMENTS if number == 0 else f"moments-{number}.safetensors"


def read_tensors(
    path: Path, expected: Mapping[str, tuple[int, ...]], moments: str = MOMENTS
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (kind, name, tensor) for every weight and moment; kind is "weight", "exp_avg" or "exp_avg_sq".

    Args:
        path: a checkpoint's folder. expected: name -> shape of each weight. moments: the file that they come from.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or dtype.
    """
    yield from _read_file(path / WEIGHTS, {name: ("weight", name) for name in expected}, expected)
    yield from read_moments(path / moments, expected)


def read_moments(file: Path, expected: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str, Tensor]]:
    """The same for one file of moments alone."""
    keys = {f"{kind}.{name}": (kind, name) for kind in ("exp_avg", "exp_avg_sq") for name in expected}
    yield from _read_file(file, keys, expected)


def _read_file(
    file: Path, keys: Mapping[str, tuple[str, str]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, Tensor]]:
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            found = set(opened.keys())
            if found != keys.keys():
                wrong = min(found ^ keys.keys())
                raise CheckpointError(f"{wrong} is missing or unknown", str(file))
            for key, (kind, name) in keys.items():
                tensor = opened.get_tensor(key)
                if tuple(tensor.shape) != expected[name] or tensor.dtype != torch.float32:
                    raise CheckpointError(f"{key} is {list(tensor.shape)} of {tensor.dtype}", str(file))
                yield kind, name, tensor
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}", str(file)) from error


def load_checkpoint(path: Path, masters: Masters, rank: int, moment_sets: int) -> None:
    """Weights and moments into a drafter's masters.

    Each drafter takes its own moments where the checkpoint has as many sets as the run; otherwise all take the mean of
    those that are there (one set stays as it is).

    Raises:
        CheckpointError: see `read_tensors`.
    """
    shapes = masters.shapes()
    count = 1 + len(list(path.glob("moments-*.safetensors")))
    own = rank if count == moment_sets > 1 else 0
    for kind, name, tensor in read_tensors(path, shapes, moments_file(own)):
        masters.load(kind, name, tensor)
    if count == moment_sets:
        return
    for number in range(1, count):
        for kind, name, tensor in read_moments(path / moments_file(number), shapes):
            masters.tensor(kind, name).add_(tensor.to(masters.tensor(kind, name).device))
    for kind, name in ((k, n) for k in ("exp_avg", "exp_avg_sq") for n in shapes if count > 1):
        masters.tensor(kind, name).div_(count)
