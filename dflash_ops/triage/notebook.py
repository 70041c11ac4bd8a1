"""IPython's tracebacks (notebooks, Colab), written anew as Python writes them.

`RuntimeError      Traceback (most recent call last)`, then frames as `File /a/b.py:12, in f(x)`, `/a/b.py in f(x)` or
`Cell In[3], line 2`, each with numbered source lines of which an arrow marks one, then the exception's own line.
"""

from __future__ import annotations

import re

from dflash_ops.triage.types import Line

NOTEBOOK = re.compile(r"^(?P<type>[A-Za-z_][\w.]{2,80})\s{3,}Traceback \(most recent call last\):?\s*$")
_FILE = re.compile(r"^File (?P<path>(?:[A-Za-z]:)?[^:]{1,400}):(?P<n>\d{1,7})(?:, in (?P<f>[^(]{1,200})\(.*)?\s*$")
_OLD = re.compile(r"^(?P<path>(?:[A-Za-z]:\\|/|~/|<ipython-input-)\S{1,400}) in (?P<f>[\w<>.]{1,200})(?:\(.*)?\s*$")
_CELL = re.compile(r"^(?:Cell In|Input In )\s?\[(?P<cell>\d{1,5})\],? (?:line (?P<n>\d{1,7})|in .{0,200})\s*$")
_CODE = re.compile(r"^\s{0,12}(?P<arrow>-+>\s?)?\s{0,8}(?P<n>\d{1,7})(?:\s(?P<code>.*))?$")
_LOOK = 14  # lines after a frame in which its arrow may stand
_LONGEST = 4_000  # lines of one traceback


def notebook(lines: list[Line]) -> None:
    """Rewrite the bodies of IPython's tracebacks in place."""
    at = 0
    while at < len(lines):
        head = NOTEBOOK.match(lines[at].body)
        if head is None:
            at += 1
            continue
        lines[at].body = "Traceback (most recent call last):"
        at = _one(lines, at + 1, head["type"].rsplit(".", 1)[-1])


def _one(lines: list[Line], at: int, exception: str) -> int:
    """One traceback from its first frame on; the place behind it."""
    for place in range(at, min(len(lines), at + _LONGEST)):
        line = lines[place]
        body = line.body
        name = body.partition(":")[0].rsplit(".", 1)[-1]
        if name == exception and not body.startswith(" "):
            return place + 1
        if (frame := _FILE.match(body)) is not None:
            line.body = _frame(frame["path"], frame["n"], frame["f"] or "<module>")
        elif (frame := _CELL.match(body)) is not None:
            number = frame["n"] or _arrow(lines, place)
            line.body = _frame(f"<ipython-input-{frame['cell']}>", number, "<module>")
        elif (frame := _OLD.match(body)) is not None:
            line.body = _frame(frame["path"], _arrow(lines, place), frame["f"])
        elif (code := _CODE.match(body)) is not None:
            line.body = f"{'    ' if code['arrow'] else '      '}{(code['code'] or '').strip()}"
        elif body.strip():
            line.body = f"      {body.strip()}"  # the source of a long line, or its ellipsis
    return min(len(lines), at + _LONGEST)


def _frame(path: str, number: str, function: str) -> str:
    return f'  File "{path}", line {number}, in {function}'


def _arrow(lines: list[Line], place: int) -> str:
    """The number at a frame's arrow, "0" where none stands."""
    for line in lines[place + 1 : place + 1 + _LOOK]:
        code = _CODE.match(line.body)
        if code is not None and code["arrow"]:
            return str(code["n"])
    return "0"
