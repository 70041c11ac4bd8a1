"""`python -m trainer import`: reads a drafter's folder and prints the [drafter] table of a run that goes on from it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check a drafter (ours, or a published one in the z-lab layout) and print the [drafter] table with which a run "
        "goes on from its weights. Nothing is written."
    )
    parser.add_argument("drafter", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("--target", default=None, help="folder or hub id of its target; compared with it")
    parser.add_argument("--json", action="store_true", help="the last line of the output is a JSON object")


def main(args: argparse.Namespace) -> int:
    from trainer.bar import Bar
    from trainer.cli.guard import told
    from trainer.errors import ConfigError

    bar = Bar("import", 0, "", text="reading the drafter")
    with told("the import", "nothing was written"), bar.alive():
        from trainer.drafter_config import FULL, SLIDING
        from trainer.export import load_drafter

        config, state = load_drafter(args.drafter)
    full = sum(kind == FULL for kind in config.layer_types)
    if config.layer_types != (SLIDING,) * (config.num_hidden_layers - full) + (FULL,) * full:
        raise ConfigError(
            f"layer_types {list(config.layer_types)}: full layers that are not the last ones",
            str(args.drafter / "config.json"),
            "such a drafter can be evaluated here, but not trained on",
        )
    table: dict[str, Any] = {
        "init_from": str(args.drafter),
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
    }
    if config.sliding_window is not None:
        table |= {"sliding_window": config.sliding_window, "full_layers": full}
    notes = _compared(args.target, config) if args.target is not None else []
    print("[drafter]")
    for name, value in table.items():
        print(f"{name} = {json.dumps(value)}")
    parameters = sum(t.numel() for t in state.values())
    kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in state.values()}))
    print(f"# {len(state)} tensors, {parameters} parameters, {kinds}; masters are float32")
    if config.sliding_window is not None:
        print(f"# sliding layers look {'only backwards' if config.causal else 'both ways'} in their block")
    for note in notes:
        print(f"# {note}")
    if args.json:
        print(json.dumps({"schema": 1, "kind": "import", "drafter": table, "tensors": len(state), "notes": notes}))
    return 0


def _compared(target: str, config: Any) -> list[str]:
    """Notes on the pair.

    Raises:
        ConfigError: it is for a target of another shape.
    """
    from trainer.drafter_start import start_notes
    from trainer.errors import ConfigError
    from trainer.hub import target_folder
    from trainer.target_files import read_target, text_part

    facts = read_target(str(target_folder(target)))
    differ = [
        f"{name} is {ours}, the target's {theirs}"
        for name, ours, theirs in (
            ("hidden_size", config.hidden_size, facts.hidden_size),
            ("vocab_size", config.vocab_size, facts.vocab_size),
            ("num_target_layers", config.num_target_layers, text_part(facts.raw).get("num_hidden_layers")),
        )
        if ours != theirs
    ]
    if differ:
        raise ConfigError(f"the drafter is for another target: {'; '.join(differ)}", str(target), "name its own target")
    return start_notes(config, facts.raw)
