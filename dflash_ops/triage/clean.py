"""One raw line -> clean text: control codes, carriage returns, backspaces, broken UTF-8, bars glued to what follows."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
_OSC = re.compile("(?:\x1b\\]|\x9d)[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\\\|\x9c)?")
_FORWARD = re.compile("\x1b\\[(\\d{0,3})C")
_REPLACES = re.compile(
    "\x1b\\[(?:\\d{0,3}A|\\d{0,3}F|1?G|2K)"
)  # cursor up, line start, erase: what follows is a new state
_CSI = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]")
_OTHER = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COPY_MODE = re.compile(r"\s*\[\d{1,7}/\d{1,7}\]\s*$")

#: A tqdm bar, whole or without its beginning.
_BAR = re.compile(
    r"\d{1,3}%\|[^|]{0,400}\|\s*[\d.,]+[kMGT]?/[\d.,]+[kMGT?]*\s*\[[^\]\[]{0,800}\]"
    r"|\d{1,3}% [\d.,]+[kMGT]?/[\d.,]+[kMGT]?\s*\[\d[^\]\[]{0,300}\]"
    r"|\d+(?:it|B|ex\w*)? \[\d\d:\d\d, [^\]\[]{1,60}\]"
)
_BAR_TAIL = re.compile(r"^[^\[\]]{0,120}?(?:it/s|s/it)[^\[\]]{0,200}\]")
_BAR_HINT = ("%|", "it/s", "s/it", "% ")
#: Pane lines glued together by padding: many blanks, then the beginning of a record.
_PADDED = re.compile(
    r"(?<=[^\s|│+])\s{6,}(?=(?:ERROR|WARNING|CRITICAL|INFO|DEBUG)[: ]|Traceback \(most|[\w.]+(?:Error"
    r"|Exception): |\[rank\d+\]:"
    r"|\[[EWIF]\d{3,4} |[EWIF]\d{4} \d\d:)"
)


def is_bar(text: str) -> bool:
    """Whether the line is a progress bar's state and nothing else."""
    match = _BAR.search(text)
    return match is not None and len(text) - match.end() < 80 and not text[match.end() :].strip(" ,")


def clean(raw: bytes) -> list[str]:
    """The lines that one physical line shows: without control codes; of a carriage-return bar the last state.

    A carriage return parts the line (text under a later bar state is kept, as the raw log holds it); bar states that
    follow each other fall together. Never empty.
    """
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    if not _CONTROL.search(text):
        return [text]
    out: list[str] = []
    for state in _states(text):
        if out and is_bar(state) and is_bar(out[-1]):
            out[-1] = state
        else:
            out.append(state)
    return out or [""]


def unglue(text: str) -> list[str]:
    """Text glued behind a bar, and pane lines glued together by padding, as lines of their own."""
    parts = [text]
    if any(hint in text for hint in _BAR_HINT):
        parts = _after_bars(text)
    out: list[str] = []
    for part in parts:
        out.extend(p for p in (_PADDED.split(part) if "      " in part else [part]) if p)
    return out or [text]


def _states(text: str) -> list[str]:
    text = text.replace("\x00", "")
    if "\x1b" in text or "\x9b" in text or "\x9d" in text:
        text = _OSC.sub("", text)
        text = _FORWARD.sub(lambda m: " " * min(int(m.group(1) or 1), 200), text)
        text = _REPLACES.sub("\r", text)
        text = _CSI.sub("", text)
    states = []
    for state in text.split("\r"):
        if "\b" in state:
            state = _backspaces(state)
        state = _OTHER.sub("", state)
        if state.strip():
            states.append(state)
    return states


def _backspaces(text: str) -> str:
    out: list[str] = []
    for char in text:
        if char == "\b":
            if out:
                out.pop()
        else:
            out.append(char)
    return "".join(out)


def _after_bars(text: str) -> list[str]:
    """`...bar][rank1]:[E1030 ...` -> the bar, then the rest. Repeated bars are kept as they are."""
    parts: list[str] = []
    at = 0
    for _ in range(50):
        match = _BAR.search(text, at) or (_BAR_TAIL.match(text) if at == 0 else None)
        if match is None:
            break
        end = match.end()
        parts.append(text[at:end])
        at = end
        if text[at : at + 1] == ",":  # values after the bar, to the end of the line
            parts[-1] += text[at:]
            return parts
    rest = text[at:]
    if rest.strip():
        parts.append(rest if not parts else rest.lstrip(" |,"))
    return parts or [text]


def without_copy_mode_mark(text: str) -> str:
    """tmux's copy-mode mark `[12/340]`, laid over the right end of a pane's first line, taken off."""
    return _COPY_MODE.sub("", text)
