"""From screen to screen: what stands there afterwards is the new one, and little more is written than what changed."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.color import ColorSystem
from rich.text import Text
from vt import Screen

from dflash_ops.view.paint import Painter

WIDTH, HEIGHT = 12, 3
PART = st.tuples(st.text("ab │█日本😀é", max_size=8), st.sampled_from(["", "bold", "red", "on blue"]))
SCREEN = st.lists(st.lists(PART, max_size=3), min_size=0, max_size=HEIGHT)


Parts = list[list[tuple[str, str]]]


def lines(screen: Parts) -> list[Text]:
    return [Text.assemble(*parts) for parts in screen]


def expected(screen: list[Text], colour: ColorSystem | None) -> Screen:
    """The same screen, written whole on an empty terminal."""
    vt = Screen(WIDTH, HEIGHT)
    vt.feed(Painter(WIDTH, HEIGHT, colour).paint(screen))
    return vt


@settings(max_examples=150, deadline=None)
@given(st.lists(SCREEN, min_size=2, max_size=5), st.sampled_from([None, ColorSystem.STANDARD]))
def test_what_stands_there_is_the_new_screen(
    screens: list[list[list[tuple[str, str]]]], colour: ColorSystem | None
) -> None:
    painter, vt = Painter(WIDTH, HEIGHT, colour), Screen(WIDTH, HEIGHT)
    for n, screen in enumerate(screens):
        said = painter.paint(lines(screen))
        vt.feed(said)
        assert vt.rows == expected(lines(screen), colour).rows
        assert n == 0 or "\x1b[2J" not in said
        assert painter.paint(lines(screen)) == ""  # nothing changed, nothing is written
    if colour is None:
        assert not re.search(r"\x1b\[[0-9;]*[34][0-9][;m]", said)


def test_one_number_that_changes_is_all_that_is_written() -> None:
    painter = Painter(80, 24, ColorSystem.STANDARD)
    screen = [Text(f"row {n}".ljust(80)) for n in range(24)]
    painter.paint(screen)
    before = painter.written
    screen[7] = Text("row 8".ljust(80))
    said = painter.paint(screen)
    assert painter.written - before == 1
    assert said == "\x1b[?2026h\x1b[8;5H8\x1b[?2026l"


def test_after_another_size_all_is_written_anew() -> None:
    painter = Painter(20, 4)
    painter.paint([Text("some words")])
    painter.resize(30, 3)
    vt = Screen(30, 3)
    vt.feed(painter.paint([Text("some words")]))
    assert vt.text.splitlines()[0] == "some words"
    assert vt.redraws[0].cleared


def test_of_a_line_only_what_differs_is_written() -> None:
    painter = Painter(80, 2)
    painter.paint([Text("step 1".ljust(40) + "loss 1".ljust(40))])
    before = painter.written
    said = painter.paint([Text("step 2".ljust(40) + "loss 2".ljust(40))])
    assert painter.written - before == 2
    assert said == "\x1b[?2026h\x1b[1;6H2\x1b[1;46H2\x1b[?2026l"
