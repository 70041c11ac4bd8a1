"""The watch's screens: as recorded, and whatever comes in they fit, say the state and never the cause too late."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import screens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from screens import FOLDER, NOW, SCENES, STEPPING, Scene, one
from vt import Screen

from dflash_ops.contracts import Event, GpuInfo, Snapshot, StageInfo, State, WorkerShares
from dflash_ops.view.paint import Painter
from dflash_ops.view.watch import ASCII, UNICODE, Choice, Pen, Place, frame
from dflash_ops.view.watch_draw import bar, number, sparkline, stacked, tame


@pytest.mark.parametrize("name", SCENES)
def test_a_screen_is_as_recorded(name: str) -> None:
    """`python tests/view/screens.py` records them anew."""
    assert SCENES[name].text() == (FOLDER / f"{name}.txt").read_text("utf-8")


def test_nothing_else_is_recorded_and_every_state_is() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(SCENES)
    assert {state.value for state in State} <= set(SCENES)


@pytest.mark.parametrize("name", SCENES)
def test_every_line_is_as_wide_as_the_screen_and_stands_there_without_colour_as_with(name: str) -> None:
    scene = SCENES[name]
    lines = scene.lines()
    assert [line.cell_len for line in lines] == [scene.width] * scene.height
    vt = Screen(scene.width, scene.height)
    said = Painter(scene.width, scene.height).paint(lines)
    vt.feed(said)
    assert vt.text + "\n" == scene.text()
    if scene.pen.ascii:
        assert said.isascii()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCENES)),
    st.integers(1, 220),
    st.integers(1, 70),
    st.sampled_from([UNICODE, ASCII]),
)  # fmt: skip
def test_any_size_is_filled_exactly_and_says_the_state(name: str, width: int, height: int, pen: object) -> None:
    scene = replace(SCENES[name], width=width, height=height, pen=pen)
    lines = scene.lines()
    assert [line.cell_len for line in lines] == [width] * height
    job = scene.jobs()[0]
    if scene.choice.place is Place.JOB and job.snapshot is not None and width >= 40 and height >= 6:
        text = "\n".join(line.plain for line in lines)
        assert job.snapshot.state.value in text
        assert job.snapshot.error is None or "cause" in text
        assert job.link.lost_s is None or "LINK LOST" in text


def test_what_does_not_fit_goes_by_importance() -> None:
    """Lines go one after the other, and each screen has all the labels of the next smaller one."""
    labels = ("step", "loss", "tau", "block", "context", "ring", "done", "saved", "disk", "epoch", "also")
    order: list[str] = []
    before = set(labels)
    for height in range(30, 2, -1):
        lines = Scene(lambda: [one(STEPPING)], height=height).lines()
        now = {label for label in labels if any(line.plain.startswith(label) for line in lines)}
        assert now <= before
        order += sorted(before - now)
        before = now
    assert order[-3:] == ["tau", "block", "loss"]  # the step is left, with the state above it
    assert before == {"step"}


def test_many_workers_and_cards_are_folded_and_said_so() -> None:
    many = replace(
        STEPPING,
        workers={f"target{i}": WorkerShares(0.1, 0.9) for i in range(17)},
        gpus=tuple(replace(screens.card(i % 8), index=i) for i in range(16)),
    )
    text = Scene(lambda: [one(many)]).text()
    assert " more\n" in text
    assert "target0" in text
    wide = Scene(lambda: [one(many)], width=200, height=60).text()
    assert "target16" in wide
    assert "\n15 " in wide or " 15   " in wide
    assert " more\n" not in wide


def test_nothing_jumps_when_numbers_change() -> None:
    """The same labels stand in the same columns, whatever the values."""
    p = STEPPING.progress
    assert p is not None
    other = replace(
        STEPPING,
        progress=replace(p, step=7, loss=14.2, tau=11.0, block_tok_s=980.0, ctx_tok_s=120_000.0, ring_ready=0),
        gpus=tuple(replace(g, util=0.0, mem_used=1, temp_c=9.0, power_w=1200.0) for g in STEPPING.gpus),
    )
    for words in ("Ktok/s", "median", "mean", "% of", "ready", " C ", " W "):
        a, b = (Scene(lambda s=s: [one(s)]).text().splitlines() for s in (STEPPING, other))  # type: ignore[misc]
        assert [line.find(words) for line in a] == [line.find(words) for line in b], words


def test_numbers_curves_and_bars_of_odd_values() -> None:
    nan, inf = math.nan, math.inf
    for value in (nan, inf, -inf, 0.0, 1e300, -1e300, 123456789.0, 1e-9):
        assert len(number(value, 4, 8, UNICODE)) == 8, value
    assert sparkline([1.0, nan, 3.0], 10, UNICODE).plain == "▁ █       "
    assert sparkline([], 5, UNICODE).plain == "     "
    assert sparkline([2.0, 2.0], 4, UNICODE).plain == "▁▁  "
    assert sparkline([1e308, -1e308, 1e308], 3, UNICODE).cell_len == 3
    assert bar(0.999, 10, UNICODE).plain != bar(1.0, 10, UNICODE).plain  # full only where all is done
    assert bar(nan, 4, ASCII).plain == "...."
    assert stacked([0.5, None, 0.7, 9.9], 10, ASCII).plain == "#####~~~~~"
    assert stacked([None] * 4, 3, UNICODE).plain == "   "
    assert stacked([None, None, 6e306, 1e308], 4, ASCII).plain == "~~~~"


def test_foreign_names_have_the_width_that_terminals_give_them() -> None:
    assert tame("a\x1b[31m\tb\n\u202e") == "a [31m b"
    assert tame("👩\u200d🚀 e\u0301 \ufe0f") == "👩🚀 e"
    assert tame("日本", ASCII) == "??"
    for name in ("👩\u200d👩\u200d👧 family", "a\u0300" * 50, "日" * 60, "\x00\x07\x9b1m", ""):
        for place in (Place.JOB, Place.JOBS):
            lines = frame([one(replace(STEPPING, job=name))], Choice(place), 60, 12, UNICODE)
            assert [cell_len(line.plain) for line in lines] == [60] * 12
            assert all(c.isprintable() for line in lines for c in line.plain)


def test_a_card_without_numbers_is_na_and_never_zero() -> None:
    bare = replace(STEPPING, gpus=(GpuInfo(0),), gpus_note="", workers={})
    row = next(line for line in Scene(lambda: [one(bare)]).text().splitlines() if line.startswith("0 "))
    assert row.split()[2:] == ["NA", "NA/NA", "NA", "NA/NA", "NA"]
    note = replace(STEPPING, gpus=(), gpus_note="nvidia-smi is not installed", workers={})
    assert "nvidia-smi is not installed" in Scene(lambda: [one(note)]).text()


def test_a_save_among_the_steps_moves_nothing() -> None:
    saving = replace(STEPPING, stage=StageInfo("saving", 0, 1, "step-320"), detail="saving at step 320 of 500")
    assert Scene(lambda: [one(saving)]).text() == Scene(lambda: [one(STEPPING)]).text()
    hung = Scene(lambda: [one(replace(saving, state=State.HUNG))]).text()
    assert "saving" in hung and "0 of 1" in hung


def test_how_old_it_is_is_said_once_it_is_old() -> None:
    node = one(STEPPING).nodes[0]
    fresh = replace(one(STEPPING), nodes=(replace(node, now=NOW + 1.0),))
    old = replace(one(STEPPING), nodes=(replace(node, now=NOW + 20.0),))
    foot = [Scene(lambda j=j: [j]).text().splitlines()[-1] for j in (fresh, old)]  # type: ignore[misc]
    assert foot[0].endswith("live")
    assert foot[1].endswith("seen 20 s ago")


EVENT = st.builds(Event, data=st.dictionaries(st.text(max_size=4), st.text() | st.floats() | st.none(), max_size=3))
ANY = st.builds(Snapshot, **{f.name: ... for f in fields(Snapshot)} | {"last_event": st.none() | EVENT})


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ANY, st.sampled_from([(80, 24), (200, 60), (40, 10), (17, 5)]), st.sampled_from([UNICODE, ASCII]), st.booleans())
def test_whatever_a_snapshot_says_the_screen_stands(s: Snapshot, size: tuple[int, int], pen: Pen, single: bool) -> None:
    """Not-a-number, infinities, negative times, empty names, odd characters."""
    jobs = [one(s)] if single else [one(s), one(STEPPING)]
    lines = frame(jobs, Choice(Place.JOB if single else Place.JOBS), *size, pen)
    assert [cell_len(line.plain) for line in lines] == [size[0]] * size[1]
    for line in lines:
        assert all(c.isprintable() for c in line.plain)
        assert not pen.ascii or line.plain.isascii(), line.plain
