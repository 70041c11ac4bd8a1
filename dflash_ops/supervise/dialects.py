"""Progress as other trainers print it: Hugging Face's dicts, tqdm, torchtitan, nanoGPT, and our own lines. Pure.

The rule here: a number is taken from a line of a known form or not at all. What a bar counts is training only where it
does not say that it loads, maps or evaluates something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dflash_ops.contracts import Progress, ProgressPattern, parse_line

#: `{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.12}`; its values may be strings in newer ones.
_HF = re.compile(r"\{'(?:loss|train_runtime|eval_loss)': .*\}")
_HF_PAIR = re.compile(r"'(loss|learning_rate|epoch|train_loss|train_runtime)': '?([-+0-9.eE]+|nan|inf)'?")

#: `Training:  12%|#2   | 120/1000 [01:00<07:20,  2.00it/s, loss=2.31]`
_TQDM = re.compile(
    r"(?P<what>[^|\r\n%]*?):?\s*(?P<share>\d{1,3})%\|[^|]*\|\s*(?P<step>[\d.]+[kMG]?)/(?P<total>[\d.]+[kMG]?)\s*"
    r"\[[\d:?]+<(?P<eta>[\d:?]+)(?:,\s*(?P<rate>[\d.?]+)\s*(?P<unit>s/\w+|\w+/s))?(?P<more>[^\]]*)\]"
)
_LOADING = re.compile(
    r"load|map|download|generat|tokeniz|filter|fetch|prepar|shard|cache|pack|group|convert|eval|valid|test|sav|writ",
    re.IGNORECASE,
)
_MORE = re.compile(r"\b(loss|lr|acc|tau)=([-+0-9.eE]+)")

#: `step: 10  loss:  7.1234  grad_norm: ...  memory: ...  tps: 12,345  tflops: ...`
_TITAN = re.compile(
    r"\bstep:\s*(?P<step>[\d,]+)\s+loss:\s*(?P<loss>[-+\d.eE]+|nan|inf)(?:.*?\btps:\s*(?P<tps>[\d,.]+))?"
)

#: `iter 100: loss 3.4567, time 123.45ms, mfu 12.30%` and `step 250: train loss 2.1, val loss 2.2`
_NANO = re.compile(r"^iter (?P<step>\d+): loss (?P<loss>[-+\d.eE]+|nan|inf), time (?P<ms>[\d.]+)ms")
_NANO_EVAL = re.compile(r"^step (?P<step>\d+): train loss (?P<loss>[-+\d.eE]+|nan|inf), val loss")

_TRACE = "Traceback (most recent call last)"
_ERROR = re.compile(r"^(?:\[?rank\d+\]?:?\s*)?(?P<kind>(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|OutOfMemory\w*))(?::\s*(?P<text>.*))?$")  # fmt: skip  # noqa: E501
_RANK = re.compile(r"^\[?rank(\d+)\]?:\s?")


@dataclass(frozen=True)
class Said:
    """What a text tells: the newest numbers, where (line) they stand, and what stands after them.

    Attributes:
        dialect: of the newest step line: `dflash`, `tqdm`, `hf`, `torchtitan`, `nanogpt`, `pattern`, or empty.
        loading: what a bar that is no training says, where no step has come yet.
        error: last line of the traceback after the newest step, empty where there is none.
        interrupted: somebody pressed Ctrl-C, or sent TERM.
        done: the trainer says that it has ended well.
    """

    progress: Progress | None = None
    dialect: str = ""
    loading: str = ""
    error: str = ""
    interrupted: bool = False
    done: bool = False


def read(lines: Iterable[str], t: float, pattern: ProgressPattern | None = None) -> Said:
    """Read the lines of a pane, the oldest first; `t` is the time that its newest numbers get."""
    reader = _Reader(t, pattern)
    for line in lines:
        for part in line.split("\r"):
            reader.take(part.rstrip())
    return reader.said()


class _Reader:
    def __init__(self, t: float, pattern: ProgressPattern | None) -> None:
        self._t = t
        self._pattern = pattern
        self._progress: Progress | None = None
        self._dialect = ""
        self._loading = ""
        self._error = ""
        self._trace = False
        self._interrupted = False
        self._done = False

    def said(self) -> Said:
        return Said(self._progress, self._dialect, self._loading, self._error, self._interrupted, self._done)

    def take(self, line: str) -> None:
        if not line:
            return
        if self._numbers(line):
            self._error, self._trace, self._interrupted, self._done = "", False, False, self._done and "'" in line
            return
        plain = _RANK.sub("", line)
        if _TRACE in plain:
            self._trace = True
        elif self._trace and (found := _ERROR.match(plain)) is not None:
            if found["kind"] == "KeyboardInterrupt":
                self._interrupted = True
            elif not self._error:  # the first one: later ones of other ranks, and of the launcher, follow from it
                self._error = plain[:500]
        if plain in ("^C", "Terminated", "KeyboardInterrupt") or plain.endswith("received SIGTERM"):
            self._interrupted = True

    def _numbers(self, line: str) -> bool:
        for read in (self._ours, self._own_pattern, self._hf, self._tqdm, self._titan, self._nano):
            if read(line):
                return True
        return False

    def _put(self, dialect: str, **numbers: float | int | None) -> bool:
        before = self._progress or Progress(self._t)
        known = {k: v for k, v in numbers.items() if v is not None}
        self._progress = replace(before, t=self._t, **known)  # type: ignore[arg-type]
        if "step" in known or not self._dialect:
            self._dialect = dialect
        return True

    def _ours(self, line: str) -> bool:
        found = parse_line(line)
        if found is None:
            return False
        if found.kind == "step":
            self._progress, self._dialect = found.progress(self._t), "dflash"
        elif found.kind == "stage":
            self._loading = " ".join(filter(None, (found.fields["stage"], found.fields.get("what", ""))))
        elif found.fields.get("event") == "finished":
            self._done = True
        return True

    def _own_pattern(self, line: str) -> bool:
        if self._pattern is None or (found := self._pattern.parse(line)) is None:
            return False
        self._progress, self._dialect = found.progress(self._t), "pattern"
        return True

    def _hf(self, line: str) -> bool:
        found = _HF.search(line)
        if found is None:
            return False
        pairs = {k: _number(v) for k, v in _HF_PAIR.findall(found.group())}
        if "train_runtime" in pairs:
            self._done = True
        if not pairs:
            return False
        return self._put(
            "hf",
            loss=pairs.get("loss", pairs.get("train_loss")),
            lr=pairs.get("learning_rate"),
            epoch=pairs.get("epoch"),
        )

    def _tqdm(self, line: str) -> bool:
        bars = list(_TQDM.finditer(line))
        if not bars:
            return False
        found = bars[-1]  # several on one line: the last one is the newest
        what = found["what"].strip()
        step, total = _count(found["step"]), _count(found["total"])
        if step is None or total is None:
            return False
        if _LOADING.search(what):
            self._loading = f"{what} {step}/{total}"
            return True
        known = self._progress
        if self._dialect == "tqdm" and known is not None and known.total is not None and total < known.total:
            return True  # a bar inside the training's: an evaluation without a name
        more = {k: _number(v) for k, v in _MORE.findall(found["more"] or "")}
        rate = _number(found["rate"] or "")
        if rate is not None and (found["unit"] or "").startswith("s/"):
            rate = 1.0 / rate if rate else None
        return self._put("tqdm", step=step, total=total, rate=rate, eta_s=_clock(found["eta"]), **more)

    def _titan(self, line: str) -> bool:
        found = _TITAN.search(line)
        if found is None:
            return False
        return self._put(
            "torchtitan",
            step=int(found["step"].replace(",", "")),
            loss=_number(found["loss"]),
            rate=_number((found["tps"] or "").replace(",", "")),
        )

    def _nano(self, line: str) -> bool:
        found = _NANO.search(line)
        if found is not None:
            ms = _number(found["ms"])
            rate = 1000.0 / ms if ms else None
            return self._put("nanogpt", step=int(found["step"]), loss=_number(found["loss"]), rate=rate)
        found = _NANO_EVAL.search(line)
        if found is not None:
            return self._put("nanogpt", step=int(found["step"]), loss=_number(found["loss"]))
        return False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _count(text: str) -> int | None:
    factor = {"k": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:], 1)
    value = _number(text[:-1] if factor > 1 else text)
    return None if value is None else round(value * factor)


def _clock(text: str) -> float | None:
    """`07:20`, `1:02:03` -> seconds; `?` is not known."""
    parts = text.split(":")
    if not all(p.isdigit() for p in parts):
        return None
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return float(seconds)
