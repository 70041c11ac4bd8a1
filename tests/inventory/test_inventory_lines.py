"""Where a key stands: the scanner finds exactly the paths that tomllib finds, each on its own line."""

from __future__ import annotations

from typing import Any

import pytest
import tomllib
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.inventory.lines import key_lines, line_of

TEXT = '''\
# a comment with [brackets] and = signs
schema = 1
"quoted key" = "a # that is no comment"
a.b."c.d" = 3   # dotted

[jobs."my \\"job\\"".trainer]
devices = [
    "cuda:0",   # first ]
    "cuda:1",
    [1, 2],
]
inline = { x = 1, y.z = { w = "}" }, list = [{ k = 1 }, { k = 2 }] }
long = """
[not.a.table]
key = "no"  \\"""
"""
raw = \'\'\'
x = 1 \'\'\'
after = true

[[things]]
name = 'one'
[things.sub]
deep = 1979-05-27T07:32:00Z
[[things]]
name = "two"
[[things.more]]
v = 1
[[things.more]]
v = 2
'''


def paths(value: Any, at: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    found = {at} if at else set()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        found |= paths(below, (*at, key))
    return found


def test_every_path_is_found_and_no_other() -> None:
    assert set(key_lines(TEXT)) == paths(tomllib.loads(TEXT))


@pytest.mark.parametrize(
    ("path", "start"),
    [
        (("schema",), "schema"),
        (("quoted key",), '"quoted key"'),
        (("a", "b", "c.d"), "a.b"),
        (("jobs", 'my "job"', "trainer"), "[jobs."),
        (("jobs", 'my "job"', "trainer", "devices", 1), '    "cuda:1"'),
        (("jobs", 'my "job"', "trainer", "inline", "y", "z", "w"), "inline"),
        (("jobs", 'my "job"', "trainer", "long"), "long"),
        (("jobs", 'my "job"', "trainer", "after"), "after"),
        (("things", 0, "sub", "deep"), "deep"),
        (("things", 1, "name"), 'name = "two"'),
        (("things", 1, "more", 1, "v"), "v = 2"),
    ],
)
def test_lines(path: tuple[str | int, ...], start: str) -> None:
    line = key_lines(TEXT)[path]
    assert TEXT.split("\n")[line - 1].startswith(start)


def test_line_ends_of_another_system_change_nothing() -> None:
    assert key_lines(TEXT.replace("\n", "\r\n")) == key_lines(TEXT)


def test_a_missing_key_is_placed_at_what_is_around_it() -> None:
    lines = key_lines(TEXT)
    assert line_of(lines, ("things", 1, "nothing", "below")) == lines[("things", 1)]
    assert line_of(lines, ("nowhere",)) is None


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=0, max_size=6)
LEAVES = (
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
)
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=12)


def quoted(text: str) -> str:
    """A basic string; characters beyond the first plane as themselves, for TOML has no surrogate pairs."""
    out = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in out) + '"'


def write(value: Any, draw: Any) -> str:
    """A value as TOML, in one of the ways that TOML has for it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        plain = all(c.isprintable() for c in value)
        style = draw(st.integers(0, 3))
        if style == 1 and plain and "'" not in value:
            return f"'{value}'"
        if style == 2 and plain and "'" not in value:
            return f"'''\n{value}\n'''"
        if style == 3 and plain:
            return '"""\n' + value.replace("\\", "\\\\").replace('"', '\\"') + '"""'
        return quoted(value)
    if isinstance(value, list):
        gap = draw(st.sampled_from(["", " ", "\n", "\n # ] ' \" #\n  "]))
        return "[" + gap + f",{gap}".join(write(v, draw) for v in value) + gap + "]"
    return "{ " + ", ".join(f"{quoted(k)} = {write(v, draw)}" for k, v in value.items()) + " }"


def document(value: dict[str, Any], draw: Any, at: str = "") -> str:
    """A document of tables, inline tables and arrays of tables, chosen at random."""
    out, tables = [], []
    for key, below in value.items():
        name = quoted(key)
        if isinstance(below, dict) and draw(st.booleans()):
            path = f"{at}.{name}" if at else name
            tables.append(f"[ {path} ] # [x]\n" + document(below, draw, path))
        elif isinstance(below, list) and below and all(isinstance(b, dict) for b in below) and draw(st.booleans()):
            path = f"{at}.{name}" if at else name
            tables.append("".join(f"[[{path}]]\n" + document(b, draw, path) for b in below))
        else:
            out.append(f"{name} = {write(below, draw)}\n")
    return "".join(out) + "\n" + "".join(tables)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.data())
def test_any_document(value: dict[str, Any], data: st.DataObject) -> None:
    text = document(value, data.draw)
    parsed = tomllib.loads(text)
    lines = key_lines(text)
    assert set(lines) == paths(parsed)
    count = text.count("\n") + 1
    assert all(1 <= line <= count for line in lines.values())
