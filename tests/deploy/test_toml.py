"""What the writer writes, Python's own reader reads back equal."""

from __future__ import annotations

import math

import pytest
import tomllib
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.deploy.toml import dump_toml
from dflash_ops.errors import UsageError

text = st.text(st.characters(codec="utf-8"))
scalars = st.one_of(text, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
values = st.one_of(scalars, st.lists(scalars, max_size=4), st.lists(st.dictionaries(text, scalars, max_size=2)))
tables = st.recursive(
    st.dictionaries(text, values, max_size=4), lambda t: st.dictionaries(text, st.one_of(values, t), max_size=4)
)


@given(tables)
def test_reads_back_equal(table: dict[str, object]) -> None:
    assert tomllib.loads(dump_toml(table)) == table


def test_nan_infinity_and_types_survive() -> None:
    back = tomllib.loads(dump_toml({"t": {"a": math.nan, "b": -math.inf, "c": 1.0, "d": 1, "e": 1e22, "f": True}}))["t"]
    assert math.isnan(back["a"])
    assert back["b"] == -math.inf
    assert [type(back[k]) for k in "cdef"] == [float, int, float, bool]


def test_what_toml_cannot_say_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        dump_toml({"train": {"lr": None}})
    assert caught.value.where == "train.lr"
