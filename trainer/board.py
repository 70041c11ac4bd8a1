"""TensorBoard, for those who want it: the numbers of each progress line as event files under the attempt.

An extra: without the package `tensorboard` a config that asks for it is refused before anything starts. Losing the
event files (no room, no permission) never ends a training run: metrics.jsonl has the same numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

FOLDER = "tensorboard"
#: Key of a metrics.jsonl entry -> name of the curve.
CURVES = {
    "loss": "train/loss",
    "acc": "train/accuracy",
    "tau": "train/tau",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "epoch": "train/epoch",
    "block_tok_s": "speed/block_tok_s",
    "ctx_tok_s": "speed/ctx_tok_s",
    "ring_ready": "speed/ring_ready",
}


def require_tensorboard() -> None:
    """
    Raises:
        ConfigError: the package is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "the package tensorboard is not installed",
            "train.tensorboard",
            "install the extra: pip install 'dflash-ops[tensorboard]' (or tensorboard>=2), or set it to false",
        )


class Board:
    """Event files of one attempt.

    Args:
        attempt: its folder; they lie in `tensorboard/` there. tell: called once, with a sentence, if they are lost.
        writer: made from the folder; torch's SummaryWriter unless a test passes another.
    """

    def __init__(self, attempt: Path, tell: Callable[[str], None], writer: Callable[[str], Any] | None = None) -> None:
        if writer is None:
            require_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter
        self._tell = tell
        self._writer: Any = None
        try:
            self._writer = writer(str(attempt / FOLDER))
        except OSError as error:
            self._lost(error)

    def write(self, entry: Mapping[str, Any]) -> None:
        """One entry of metrics.jsonl; its `step` is the curves' x, its `t` their wall time."""
        if self._writer is None:
            return
        points = {curve: entry[key] for key, curve in CURVES.items() if entry.get(key) is not None}
        for name, shares in entry["workers"].items():
            points |= {f"workers/{name}/{share}": value for share, value in shares.items()}
        try:
            for curve, value in points.items():
                self._writer.add_scalar(curve, value, entry["step"], entry["t"])
            self._writer.flush()
        except OSError as error:
            self._lost(error)

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._lost(error)

    def _lost(self, error: OSError) -> None:
        self._writer = None
        self._tell(f"note: TensorBoard files are written no more ({error}); metrics.jsonl goes on")
