"""Writes and reads drafters in the layout that servers load: config.json and model.safetensors, no prefix on names."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint import sync
from trainer.drafter import Drafter
from trainer.drafter_config import ARCHITECTURE, DrafterConfig
from trainer.errors import CheckpointError, ConfigError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DRAFTER_NEXT = "give the folder of an exported or published drafter"


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a drafter; allocates nothing."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Drafter(config).state_dict().items()}


def export_drafter(
    drafter_state: Mapping[str, Tensor],
    config: DrafterConfig,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    by_layer: bool = False,
    writing: Callable[[Path, int], None] | None = None,
) -> Path:
    """Writes a drafter beside `out_dir`, makes it durable, and renames it into place.

    Args:
        drafter_state: the drafter's `state_dict()`, or its float32 masters under the same names.
        config: its geometry.
        out_dir: replaced if it is an earlier export.
        dtype: of the weights written; as they are if None.
        by_layer: leave causality to each kind of layer's default where they differ (`DrafterConfig.to_hf`).
        writing: called once with the file that is about to be written, and the bytes it will have.

    Returns:
        `out_dir`.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape.
        ConfigError: `out_dir` is something else than an earlier export, or cannot be written.
    """
    from safetensors.torch import save_file

    out = Path(out_dir)
    _check_state({k: tuple(v.shape) for k, v in drafter_state.items()}, config, str(out))
    if out.exists() and not _replaceable(out):
        raise ConfigError("the output folder exists and is no earlier export", str(out), "name another folder")
    weights = {k: v.detach().to("cpu", dtype or v.dtype).contiguous().clone() for k, v in drafter_state.items()}
    written = next(iter(weights.values())).dtype
    described = config.to_hf(by_layer=by_layer)
    described["dtype"] = described["torch_dtype"] = str(written).removeprefix("torch.")

    beside = out.with_name(f".{out.name}.{os.getpid()}.new")
    aside = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        if writing is not None:
            writing(beside / WEIGHTS_FILE, sum(w.numel() * w.element_size() for w in weights.values()))
        save_file(weights, str(beside / WEIGHTS_FILE), metadata={"format": "pt"})
        (beside / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        for path in (beside / WEIGHTS_FILE, beside / CONFIG_FILE, beside):
            sync(path)
        if out.exists():
            out.rename(aside)
        beside.rename(out)
        sync(out.parent)
    except OSError as error:
        raise ConfigError(f"the export cannot be written: {error}", str(out), "check space and permissions") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if aside.exists():
            if out.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(out)
    return out


def _replaceable(out: Path) -> bool:
    """Whether nothing is lost with this folder but an earlier export: a target has the same two file names."""
    if not out.is_dir():
        return False
    names = {file.name for file in out.iterdir()}
    if not names:
        return True
    if names != {CONFIG_FILE, WEIGHTS_FILE}:
        return False
    try:
        described = json.loads((out / CONFIG_FILE).read_text(encoding="utf-8"))
        return ARCHITECTURE in described["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # whatever it is, it was not written here


def load_drafter(folder: str | Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Reads a drafter, ours or a published one, and checks it against its own config.

    Returns:
        Its config and its weights on the CPU, in the dtype they have: `Drafter(config).load_state_dict(state)`.

    Raises:
        ConfigError: no drafter folder, another architecture, or a config that cannot be.
        CheckpointError: weights that are damaged, missing, unknown or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        described = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no config.json: this is not a drafter's folder", str(folder), _DRAFTER_NEXT) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json cannot be read: {error}", str(folder / CONFIG_FILE), _DRAFTER_NEXT) from error
    if not isinstance(described, dict):
        raise ConfigError("config.json is not an object", str(folder / CONFIG_FILE), _DRAFTER_NEXT)
    try:
        config = DrafterConfig.from_hf(described)
    except ConfigError as error:
        spot = error.where if error.where.startswith(CONFIG_FILE) else f"{CONFIG_FILE}: {error.where}"
        raise ConfigError(error.what, str(folder / spot), error.next or "give a drafter as it was published") from error
    weights = folder / WEIGHTS_FILE
    try:
        index = folder / INDEX_FILE
        if index.exists() and not weights.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            state = {k: v for name in names for k, v in load_file(str(folder / name)).items()}
        else:
            state = load_file(str(weights))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the drafter's weights cannot be read: {error}", str(weights), "copy or export the drafter again"
        ) from error
    _check_state({k: tuple(v.shape) for k, v in state.items()}, config, str(weights))
    return config, state


def _check_state(found: Mapping[str, tuple[int, ...]], config: DrafterConfig, where: str) -> None:
    expected = drafter_shapes(config)
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"{len(missing)} tensors missing, first {missing[0]}")
        if unknown:
            parts.append(f"{len(unknown)} unknown, first {unknown[0]}")
        raise CheckpointError(f"the weights are not this drafter's: {'; '.join(parts)}", where)
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(f"{name} is {list(found[name])}, the config says {list(shape)}", where)
