"""Hard wraps joined again: by a width that the text itself shows, by the grammar of tracebacks, by the texts of kinds.

Never by force: a line is joined to the next only where it is exactly as wide as the text's own limit and the next line
is no beginning, or where the two together complete a frame of a traceback or a known text that neither holds alone.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable

from dflash_ops.triage import progress
from dflash_ops.triage.clean import is_bar
from dflash_ops.triage.types import Line

#: Beginnings: a line that looks like this continues nothing.
_BEGINS = re.compile(
    r"\s*(?:Traceback \(most|\[rank\d|\[default\d|\[[EWIF]\d{0,4} |[EWIF]\d{4} \d\d:|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d|"
    r"(?:ERROR|WARNING|INFO|DEBUG|CRITICAL)\b|\(\w+ pid=|Exception in thread|During handling of"
    r"|The above exception was|"
    r"={8}|-{8}|\*{8}|frame #\d|dflash (?:step|stage|event)=|NVRM: |\[\s*\d+\.\d{6}\] |>>> |\$ |root@)"
    r'|\s*(?:[|+] )*File "(?=[^"]*(?:"|$))'
)
_FRAME = re.compile(r'File "[^"]{1,1000}", line \d{1,7}, in \S')
_FRAME_OPEN = re.compile(
    r'^\s*(?:\[\w+\]:?\s*)?(?:[|] )*\s*File "(?:[^"]*$|[^"]+"(?:,(?: (?:l(?:i(?:n(?:e(?: (?:\d+(?:,(?:'
    r" (?:in?)?)?)?)?)?)?)?)?)?)?)?$)"
)
_BOX = re.compile(r"^\s*[│|╭╰┃].*[│|╮╯┃]?\s*$")
_WORDISH = re.compile(r"[\w./\-]")
_RANKED = re.compile(r"\[(?:rank|default)\d+\]:\s?")
_FLOWS_OUT = re.compile(r"[A-Za-z0-9_,/(\[ '\":=-]$")
_FLOWS_IN = re.compile(r"[a-z0-9.,)\]_/]|-\w| (?! )\S")
_ENDS = re.compile(r"[.:;!?]\s*$")
_SNIPPET = 60  # lines
_DIGITS = re.compile(r"\d+")


class Width:
    """At which width a text was wrapped (`columns`, 0 where nothing shows it), and how its own lines begin.

    Evidence: no line is longer; lines of exactly this length are followed by lines that begin nothing. One such border
    is enough where it breaks a frame of a traceback, else two, half of them inside a word. What begins a line is
    learned from the text: how lines begin that follow a line which cannot have been wrapped. `known(text)`: a kind's
    text may stand in it.
    """

    def __init__(self, texts: list[str], known: Callable[[str], bool] = lambda text: False) -> None:
        self.columns = 0
        self._starts: set[str] = set()
        sizes = Counter(len(text) for text in texts if len(text) >= 30)
        top = max(sizes, default=0)
        if not top or top > 1000:
            return
        self._starts = {_start(b) for a, b in zip(["", *texts], texts, strict=False) if len(a) != top and b.strip()}
        full = continued = inside = frames = flowing = 0
        telling = False
        for text, after in itertools.pairwise(texts):
            if len(text) != top or text.endswith("  ") or _BOX.match(text):
                continue
            full += 1
            if not after.strip() or _BEGINS.match(after):
                continue
            if _FRAME_OPEN.match(text) and _completes(text, after):
                frames += 1
                continued += 1
            elif not self.begins(after):
                continued += 1
                flowing += _FLOWS_OUT.search(text) is not None and (
                    _FLOWS_IN.match(after) is not None or after[:1].isalpha()
                )
                telling = telling or known(text + after)
                inside += _WORDISH.match(text[-1]) is not None and _WORDISH.match(after[0]) is not None
        padded = any(len(text) == top and text.endswith("  ") for text in texts)  # a pane copied with its blanks
        enough = continued >= (1 if padded else 2) and continued * 3 >= full * 2
        # in a few lines the widest one, cut amid a sentence about a known failure, is all that there can be
        snippet = len(texts) <= _SNIPPET and continued == full == flowing and telling
        if (frames and continued * 2 >= full) or (enough and (padded or inside * 3 >= continued)) or snippet:
            self.columns = top

    def begins(self, text: str) -> bool:
        """Whether the line begins something: by its look, or because lines of this text begin so."""
        return _BEGINS.match(text) is not None or _start(text) in self._starts


def _start(text: str) -> str:
    return _DIGITS.sub("0", text[:10])


def begins(text: str) -> bool:
    """Whether the text is the beginning of something (a frame, a stamped line, a traceback ...)."""
    return _BEGINS.match(text) is not None


def join(
    lines: list[Line], spans_literal: Callable[[str, str], bool], known: Callable[[str], bool] = lambda text: False
) -> list[Line]:
    """Lines with wraps undone. `spans_literal(left, right)`: a known text stands across the border only."""
    bars = {id(line) for line in lines if ("%|" in line.text and is_bar(line.text)) or _other_progress(line.text)}
    width = Width([line.text for line in lines if id(line) not in bars], known)
    longest = max((len(line.text) for line in lines if id(line) not in bars), default=0)
    out: list[Line] = []
    last = (
        -1
    )  # place in `out` of the last line that is no bar: a bar drawn between the parts of a line does not part them
    physical = 0  # length of its last physical line
    for place, line in enumerate(lines):
        text = line.text
        if id(line) in bars:
            out.append(line)
            continue
        if last >= 0 and not line.after_gap and text:
            before = out[last].text
            glue = _glue(before, physical, text, width, longest, spans_literal)
            if glue is None and physical == longest and physical >= 30 and not _BEGINS.match(text):
                whole = _rest(lines, place, longest)
                glue = "" if spans_literal(before, whole) else None
            if glue is not None:
                out[last] = Line(out[last].no, before + glue + (text.lstrip() if glue else text), out[last].after_gap)
                physical = len(text)
                continue
        last = len(out)
        out.append(line)
        physical = len(text)
    return out


def _completes(cut: str, text: str) -> bool:
    """Whether a line goes on where a frame was cut. `line 402` may be whole: then only `, in name` or digits go on."""
    if _FRAME.search(cut + text):
        return True
    return re.search(r"line \d+$", cut) is None or re.match(r"\d+$", text) is not None


def _rest(lines: list[Line], place: int, longest: int) -> str:
    """The text from a line on, over all lines that are as wide as the widest."""
    rest = lines[place].text
    for line in lines[place + 1 : place + 6]:
        if len(lines[place].text) != longest or line.after_gap or _BEGINS.match(line.text):
            break
        rest += line.text
        place += 1
    return rest


def _other_progress(text: str) -> bool:
    """A rank's own progress line amid another's text."""
    match = _RANKED.match(text)
    return match is not None and progress.read(text[match.end() :]) is not None


def _glue(
    before: str, physical: int, text: str, width: Width, longest: int, spans_literal: Callable[[str, str], bool]
) -> str | None:
    """ "" or " " to join with, None to leave apart."""
    if len(before) > 8000 or not before:
        return None
    recent = before[-1200:]
    open_frame = 'File "' in recent and _FRAME_OPEN.match(recent) is not None
    columns = width.columns
    if columns and physical == columns and not before.endswith("  "):
        if open_frame:
            blank = " " if recent.endswith(" in") else ""  # lost at the right edge
            return blank if not _BEGINS.match(text) and _completes(recent, blank + text) else None
        if width.begins(text) or _complete(before, text):
            return "" if not _BEGINS.match(text) and spans_literal(before, text) else None
        lost = (
            before[-1].isalnum()
            and text[0].isalnum()
            and spans_literal(before, " " + text)
            and not spans_literal(before, text)
        )
        return " " if lost else ""
    if columns and physical == columns - 1 and not open_frame:
        # the terminal drops blanks at the right edge: what goes on in small letters, or a known text across it, says so
        flows = _FLOWS_IN.match(text) is not None and not _ENDS.search(before) and not width.begins(text)
        return " " if not _BEGINS.match(text) and (flows or spans_literal(before, " " + text)) else None
    if open_frame and not _BEGINS.match(text):
        for glue in ("", " "):
            if _FRAME.search(recent + glue + (text.lstrip(" ") if glue else text)):
                return glue
        return None
    if physical >= 40 and physical >= longest - 24 and not _BEGINS.match(text):
        if spans_literal(before, text):
            return ""
        if not before.endswith(" ") and spans_literal(before, " " + text.lstrip()):
            return " "
    return None


def _complete(before: str, text: str) -> bool:
    """A whole frame line that happens to be as wide as the text: its source line follows, not its rest."""
    return (
        _FRAME.search(before) is not None
        and text.startswith("    ")
        and 'File "' in before[: 8 + len(before) - len(before.lstrip())]
    )
