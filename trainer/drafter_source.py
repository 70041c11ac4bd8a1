"""A drafter from wherever it lies: an exported folder, a published one, or a training checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint import MANIFEST, WEIGHTS, Checkpoint, Hashed, choose, list_checkpoints, verify
from trainer.drafter_config import DrafterConfig
from trainer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Source:
    """A drafter's geometry and weights; `step` of the checkpoint that it is from, None for an exported one."""

    path: Path
    config: DrafterConfig
    state: Mapping[str, Tensor]
    step: int | None


def newest(folder: Path, progress: Hashed | None = None) -> Checkpoint:
    """The newest checkpoint of a folder, verified.

    Raises:
        ConfigError: there is none. CheckpointError: it is not whole (an older one that is, is named).
    """
    found = choose(folder, "auto", progress)
    if found is None:
        raise ConfigError("there is no checkpoint", str(folder), "train first, or name another folder")
    return found


def from_checkpoint(checkpoint: Checkpoint) -> Source:
    """The fp32 masters of a verified checkpoint.

    Raises:
        CheckpointError: tensors that do not fit the geometry it names.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = checkpoint.path / WEIGHTS
    try:
        state = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the weights cannot be read: {error}", str(file)) from error
    return Source(checkpoint.path, DrafterConfig.from_hf(checkpoint.state["drafter"]), state, checkpoint.step)


def open_source(path: Path) -> Source:
    """A drafter's folder, a checkpoint, or a folder of checkpoints (the newest one is taken).

    Raises:
        ConfigError: none of these. CheckpointError: damaged.
    """
    if (path / MANIFEST).is_file():
        return from_checkpoint(verify(path))
    if list_checkpoints(path):
        return from_checkpoint(newest(path))
    if not (path / "config.json").is_file():
        raise ConfigError(
            "this is no drafter: neither config.json nor a checkpoint's manifest.json is in it",
            str(path),
            "give an exported drafter, a checkpoint, or the checkpoints folder",
        )
    from trainer.export import load_drafter

    config, state = load_drafter(path)
    return Source(path, config, state, None)
