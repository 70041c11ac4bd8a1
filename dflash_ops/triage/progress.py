"""Progress lines: ours, HF Trainer dicts, tqdm, torchtitan, nanoGPT, Megatron, and a job's own pattern."""

from __future__ import annotations

import re

from dflash_ops.contracts.progress import ProgressPattern, parse_line
from dflash_ops.triage.scan import fold
from dflash_ops.triage.types import Step

_N = r"(?P<step>\d[\d,_]*)"
_VALUE = r"(?:loss|lr|ppl|acc|grad_?norm|tok/s|tokens?/s|it/s|s/it|time|mfu|speed|elapsed|throughput|samples)"
_HF_DICT = re.compile(r"^\s*\{'(?:loss|train_loss|eval_loss|grad_norm|train_runtime|eval_runtime)': .*\}\s*$")
_HF_EPOCH = re.compile(r"'epoch': '?(?P<step>\d+(?:\.\d+)?)'?")
_TQDM = re.compile(
    r"(?P<step>[\d,.]+)(?P<k>[kM]?)/[\d,.]+[kMG]?\s*\[(?:(?:\d+ days?, )?\d*\d:\d\d(?::\d\d)?)"
    r"<[^\]]*?(?:it/s|s/it|/s)?[^\]]*\]?"
)
_TITAN = re.compile(rf"\bstep:\s*{_N}\b.{{0,40}}\bloss:\s*[-\d.na]+")
_NANOGPT = re.compile(rf"^(?:iter|step) {_N}: (?:train )?loss ", re.IGNORECASE)
_MEGATRON = re.compile(rf"\biteration\s+{_N}\s*/\s*\d+ \|", re.IGNORECASE)
_GENERIC = re.compile(
    rf"(?:^|[\s\[|(,:])(?:global[_ ]?step|training step|train step|step|iteration|iter|it|batch|update"
    rf"|num_updates|epoch)s?\b\s*[:=#\[(]?\s*{_N}"
    rf"(?:\s*(?:/|of)\s*\d[\d,_]*)?.{{0,300}}?\b{_VALUE}\b",
    re.IGNORECASE,
)
_EPOCH_STEP = re.compile(
    r"\bepoch\s*[:=\[]?\s*\[?\d+\]?(?:\s*/\s*\d+)?.{0,30}?\[\s*(?P<step>\d+)\s*/\s*\d+\].{0,200}?\b(?:loss|lr|time)\b",
    re.IGNORECASE,
)
_BY_NAME = {
    "torchtitan": _TITAN,
    "nanogpt": _NANOGPT,
    "megatron": _MEGATRON,
    "tqdm": _TQDM,
    "epoch": _EPOCH_STEP,
    "step": _GENERIC,
}
_NO_TRAINING = re.compile(
    r"^.{0,60}?(?:Loading|Fetching|Download|Tokeniz|Map\b|Filter|Generating .* split|Saving)|shards", re.IGNORECASE
)
_DONE = re.compile(
    r"'train_runtime': |\bevent=finished\b|^\s*(?:\S+ ){0,8}?(?:[Tt]raining (?:is )?(?:finished"
    r"|completed?|done|complete)\b|Finished [Tt]raining\b"
    r"|`Trainer\.fit` stopped: `max_(?:steps|epochs)=)"
)
_HINT = re.compile(r"step|iter|epoch|it/s|s/it|\]|'loss|update|batch|inish|omplete|done", re.IGNORECASE)
_ERRORISH = re.compile(r"Error\b|Exception\b|Traceback|\bERROR\b|\bfailed\b|Watchdog|NCCL WARN|Timeout\(ms\)")


class Reader:
    """Reads many lines; which dialect a line of one shape speaks is found once.

    Args:
        own: a job's own pattern, tried first.
    """

    def __init__(self, own: ProgressPattern | None = None) -> None:
        self._own = own
        self._dialects: dict[bytes, str | None] = {}

    def read(self, text: str) -> Step | None:
        """What a clean line says about progress, None where it says nothing."""
        if self._own is not None and (line := self._own.parse(text)) is not None:
            return Step(_number(line.fields.get("step", "")), "own")
        if len(text) > 2000 or not _HINT.search(text):
            return None
        shape = fold(text.encode("utf-8", "replace"))
        if shape in self._dialects:
            dialect = self._dialects[shape]
            if dialect is None:
                return None
            if dialect in _BY_NAME and (match := _BY_NAME[dialect].search(text)) is not None:
                return _step(dialect, match)
        step = read(text)
        if len(self._dialects) > 20_000:
            self._dialects.clear()
        self._dialects[shape] = None if step is None else step.dialect
        return step


def read(text: str) -> Step | None:
    """One line, without a job's own pattern."""
    if "dflash " in text and (ours := parse_line(text)) is not None:
        if "event" in ours.fields:  # an event may name a step too, and is no progress
            return Step(None, "dflash", done=True) if ours.fields["event"] == "finished" else None
        return Step(_number(ours.fields["step"].partition("/")[0]), "dflash") if ours.kind == "step" else None
    if _ERRORISH.search(text):
        return None
    if _DONE.search(text):
        return Step(None, "done", done=True)
    if _HF_DICT.match(text):
        match = _HF_EPOCH.search(text)
        return Step(float(match["step"]) if match else None, "hf")
    for dialect, pattern in _BY_NAME.items():
        if (match := pattern.search(text)) is not None:
            if dialect == "tqdm" and _NO_TRAINING.search(text):
                return None
            return _step(dialect, match)
    return None


def _step(dialect: str, match: re.Match[str]) -> Step:
    number = _number(match["step"])
    if dialect == "tqdm" and number is not None:
        number *= {"k": 1e3, "M": 1e6}.get(match["k"], 1.0)
    return Step(number, dialect)


def _number(text: str) -> float | None:
    digits = text.replace(",", "").replace("_", "")
    try:
        return float(digits)
    except ValueError:
        return None
