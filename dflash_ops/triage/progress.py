"""Progress lines of several dialects: ours, HF Trainer dicts, tqdm, torchtitan, nanoGPT, Megatron, and a job's own pattern."""

from __future__ import annotations

import re

from dflash_ops.contracts.progress import ProgressPattern, parse_line
from dflash_ops.triage.types import Step

_N = r"(?P<step>\d[\d,_]*)"
_VALUE = r"(?:loss|lr|ppl|acc|grad_?norm|tok/s|tokens?/s|it/s|s/it|time|mfu|speed|elapsed|throughput|samples)"
_HF_DICT = re.compile(r"^\s*\{'(?:loss|train_loss|eval_loss|grad_norm|train_runtime|eval_runtime)': .*\}\s*$")
_HF_EPOCH = re.compile(r"'epoch': '?(?P<step>\d+(?:\.\d+)?)'?")
_TQDM = re.compile(
    r"(?P<step>[\d,.]+)(?P<k>[kM]?)/[\d,.]+[kMG]?\s*\[(?:(?:\d+ days?, )?\d*\d:\d\d(?::\d\d)?)<[^\]]*?(?:it/s|s/it|/s)?[^\]]*\]?"
)
_TITAN = re.compile(rf"\bstep:\s*{_N}\b.{{0,40}}\bloss:\s*[-\d.na]+")
_NANOGPT = re.compile(rf"^(?:iter|step) {_N}: (?:train )?loss ", re.I)
_MEGATRON = re.compile(rf"\biteration\s+{_N}\s*/\s*\d+ \|", re.I)
_GENERIC = re.compile(
    rf"(?:^|[\s\[|(,:])(?:global[_ ]?step|training step|train step|step|iteration|iter|it|batch|update|num_updates|epoch)s?\b\s*[:=#\[(]?\s*{_N}"
    rf"(?:\s*(?:/|of)\s*\d[\d,_]*)?.{{0,300}}?\b{_VALUE}\b", re.I)
_EPOCH_STEP = re.compile(r"\bepoch\s*[:=\[]?\s*\[?\d+\]?(?:\s*/\s*\d+)?.{0,30}?\[\s*(?P<step>\d+)\s*/\s*\d+\].{0,200}?\b(?:loss|lr|time)\b", re.I)
_DONE = re.compile(
    r"'train_runtime': |\bevent=finished\b|^\s*(?:\S+ ){0,8}?(?:[Tt]raining (?:is )?(?:finished|completed?|done|complete)\b|Finished [Tt]raining\b"
    r"|`Trainer\.fit` stopped: `max_(?:steps|epochs)=)"
)
_HINT = re.compile(r"step|iter|epoch|it/s|s/it|\]|'loss|update|batch|inish|omplete|done", re.I)
_ERRORISH = re.compile(r"Error\b|Exception\b|Traceback|\bERROR\b|\bfailed\b|Watchdog|NCCL WARN|Timeout\(ms\)")


def read(text: str, own: ProgressPattern | None = None) -> Step | None:
    """What a clean line says about progress, None where it says nothing."""
    if own is not None:
        line = own.parse(text)
        if line is not None:
            return Step(_number(line.fields.get("step", "")), "own")
    if len(text) > 2000 or not _HINT.search(text):
        return None
    if "dflash " in text and (ours := parse_line(text)) is not None:
        if ours.kind == "step":
            return Step(_number(ours.fields["step"].partition("/")[0]), "dflash")
        return Step(None, "dflash", done=True) if ours.fields.get("event") == "finished" else None
    if _ERRORISH.search(text):
        return None
    if _DONE.search(text):
        return Step(None, "done", done=True)
    if _HF_DICT.match(text):
        match = _HF_EPOCH.search(text)
        return Step(float(match["step"]) if match else None, "hf")
    for dialect, pattern in (("torchtitan", _TITAN), ("nanogpt", _NANOGPT), ("megatron", _MEGATRON)):
        if (match := pattern.search(text)) is not None:
            return Step(_number(match["step"]), dialect)
    if (match := _TQDM.search(text)) is not None:
        if "Loading" in text[:60] or "shards" in text or "Fetching" in text[:60] or "Download" in text[:60]:
            return None
        number = _number(match["step"])
        factor = {"k": 1e3, "M": 1e6}.get(match["k"], 1.0)
        return Step(number * factor if number is not None else None, "tqdm")
    for dialect, pattern in (("epoch", _EPOCH_STEP), ("step", _GENERIC)):
        if (match := pattern.search(text)) is not None:
            return Step(_number(match["step"]), dialect)
    return None


def _number(text: str) -> float | None:
    digits = text.replace(",", "").replace("_", "")
    try:
        return float(digits)
    except ValueError:
        return None
