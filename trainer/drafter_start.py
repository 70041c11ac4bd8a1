"""Going on from a drafter's weights (`drafter.init_from`), ours or published: what must agree, and what is kept.

Imports no torch: `check` says all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.checkpoint import Checkpoint
from trainer.config import RunConfig
from trainer.drafter_config import DrafterConfig, rope_theta
from trainer.errors import ConfigError
from trainer.target_files import text_part

#: What [drafter] and the target decide, and the key to mend where the drafter that is gone on from has another.
_CHECKED = {
    "hidden_size": "target.path",
    "vocab_size": "target.path",
    "num_target_layers": "target.path",
    "num_hidden_layers": "drafter.layers",
    "block_size": "drafter.block_size",
    "mask_token_id": "drafter.mask_token_id",
    "target_layer_ids": "drafter.layer_ids",
    "sliding_window": "drafter.sliding_window",
    "layer_types": "drafter.full_layers",
}


def start_of(config: RunConfig, chosen: Checkpoint | None) -> DrafterConfig | None:
    """The drafter that a run with `drafter.init_from` goes on from, None without.

    Of a resumed run it is the checkpoint's: the folder may be gone by then.

    Raises:
        ConfigError: no drafter lies there.
    """
    folder = config.drafter.init_from
    if folder is None:
        return None
    if chosen is not None:
        try:
            return DrafterConfig.from_hf(chosen.state["drafter"])
        except ConfigError:
            return None  # no drafter at all: told by the comparison with [drafter]
    file = Path(folder) / "config.json"
    try:
        return DrafterConfig.from_hf(json.loads(file.read_text(encoding="utf-8")))
    except ConfigError as error:
        raise ConfigError(error.what, f"drafter.init_from = {folder}, {error.where}", error.next) from error
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"no drafter can be read there: {error}", f"drafter.init_from = {folder}", "give an exported drafter"
        ) from error


def same_start(folder: str, start: DrafterConfig, drafter: DrafterConfig) -> None:
    """That the run asks for the very drafter whose weights it goes on from.

    Raises:
        ConfigError: it does not; each difference with the key to mend.
    """

    def shown(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    differ = [
        f"{name} is {shown(getattr(start, name))} there, {shown(getattr(drafter, name))} here ({spot})"
        for name, spot in _CHECKED.items()
        if getattr(start, name) != getattr(drafter, name)
    ]
    if differ:
        raise ConfigError(
            f"the drafter there is another one: {'; '.join(differ)}",
            f"drafter.init_from = {folder}",
            f"correct these keys (`python -m trainer import {folder}` prints them), or remove init_from",
        )


def start_notes(start: DrafterConfig, target: Mapping[str, Any]) -> list[str]:
    """What is no fault of a drafter gone on from, but should be known. `target`: its config.json.

    Raises:
        ConfigError: the target's config names no RoPE base.
    """
    base = rope_theta(SimpleNamespace(**text_part(target)))
    notes = []
    if start.rope_theta != base:
        notes.append(f"the drafter's RoPE base is {start.rope_theta:g}, the target's {base:g}: it stays as it is")
    if start.rope_parameters.get("rope_type", "default") != "default":
        notes.append(f"the drafter's RoPE is scaled ({start.rope_parameters['rope_type']}): it stays as it is")
    return notes
