"""A broken inventory: every fault at once, each with file, key, line and fix."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inventory_cases import CASES, FULL, HOST, JOB, RUNS

from dflash_ops.errors import InventoryError
from dflash_ops.inventory import InventoryErrors, load


def faults_of(path: Path) -> list[InventoryError]:
    with pytest.raises(InventoryError) as caught:
        load(path)
    error = caught.value
    return list(error.errors) if isinstance(error, InventoryErrors) else [error]


@pytest.mark.parametrize("name", CASES)
def test_fault(name: str, tmp_path: Path) -> None:
    text, expected = CASES[name]
    path = tmp_path / "inventory.toml"
    path.write_text(text, "utf-8")
    found = faults_of(path)
    assert [e.key for e in found] == [key for key, _, _ in expected], [str(e) for e in found]
    for error, (_, what, fix) in zip(found, expected, strict=True):
        assert what in error.what
        assert fix in error.fix
        assert error.fix
        assert error.file == str(path)
        assert error.exit_code == 2
    marked = [number for number, line in enumerate(text.split("\n"), 1) if line.endswith("#!")]
    assert sorted({e.line for e in found if e.line is not None}) == marked
    assert all(e.line is not None for e in found)


def test_what_a_job_needs_is_not_advised_to_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(
        "[hosts.p]\nkind = 'ssh'\naddress = ''\n[hosts.q]\nkind = ''\n[hosts.r]\nkind = 'lxc'\nvia = ''\nid = 1\n"
        "[jobs.a]\nhost = ''\nroot = ''\nsession = ''\nvenv = { lock = '' }\ncommand = ['true']\n",
        "utf-8",
    )
    empty = {str(e.key).rpartition(".")[2]: e.fix for e in faults_of(path) if "is empty" in e.what}
    assert set(empty) == {"address", "kind", "via", "host", "root", "session", "lock"}
    assert [key for key, fix in empty.items() if "remove" in fix] == ["session"]


def test_many_faults_are_told_in_the_order_of_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(HOST + JOB + RUNS + 'grace_s = "x"\nfoo = 1\n[jobs.b]\nhost = "nowhere"\n', "utf-8")
    with pytest.raises(InventoryErrors) as caught:
        load(path)
    lines = [e.line for e in caught.value.errors]
    assert lines == sorted(lines)  # type: ignore[type-var]
    assert len(lines) == 5  # grace_s, foo; b has a wrong host, no root, nothing to run
    assert all(e.what in str(caught.value) for e in caught.value.errors)
    assert caught.value.exit_code == 2
    assert caught.value.line == lines[0]


@pytest.mark.parametrize(
    ("raw", "line", "what"),
    [
        (b"schema = 1\n[hosts.a\nkind = 1\n", 2, "no TOML"),
        (b"a = 1\na = 2\n", 2, "no TOML"),
        (b'a = "x', 1, "no TOML"),
        (b'a = """\nx\n', 2, "no TOML"),
        (b"a = 1\n\xff = 2\n", 2, "no UTF-8"),
        (b"x = 1\na = " + 5000 * b"1" + b"\n", None, "no TOML"),
    ],
)
def test_what_is_no_toml(raw: bytes, line: int | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_bytes(raw)
    (error,) = faults_of(path)
    assert what in error.what
    assert error.line == line
    assert error.fix


def test_what_is_nested_too_deeply_or_too_large(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_bytes(b"a = " + 5000 * b"[" + 5000 * b"]")
    assert "nested too deeply" in faults_of(path)[0].what
    assert "larger than" in faults_of(Path("/dev/zero"))[0].what


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_is_a_fault_and_never_a_crash(data: st.DataObject) -> None:
    """Lines lost, doubled, swapped, and values replaced: all is told as faults with a place and a fix."""
    lines = FULL.split("\n")
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[at].partition("=")
        kind = data.draw(st.sampled_from(["value", "value", "key", "lose", "double", "garbage"]))
        if kind == "value" and equals:
            lines[at] = f"{key}= {data.draw(WORDS)}"
        elif kind == "key" and equals:
            lines[at] = f"{data.draw(st.sampled_from(['zzz', 'kind', 'root', 'a.b', 'host']))} = {data.draw(WORDS)}"
        elif kind == "lose":
            del lines[at]
        elif kind == "double":
            lines.insert(at, data.draw(st.sampled_from(lines)))
        elif kind == "garbage":
            lines[at] += data.draw(st.text(max_size=4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "inventory.toml")
        path.write_text("\n".join(lines), "utf-8", newline="")
        try:
            load(path)
        except InventoryError as error:
            for one in getattr(error, "errors", (error,)):
                assert one.what
                assert one.fix
                assert one.line is not None
                assert one.file == str(path)


WORDS = st.sampled_from(
    ["1", "-1", "1.5", "nan", "true", '""', '"x"', '"\\u0000"', "[]", "[1]", '["a"]', "[[]]", "{}", "{ a = 1 }",
     "1979-05-27", '"local"',
     '"ssh"', '"lxc"', '"/"', '"~nobody-here/x"', '"cpu"', '[0, "cpu"]', "[true]", '"."', "9" * 300]
)  # fmt: skip


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (error,) = faults_of(tmp_path / "none.toml")
    assert "dflash-ops init" in error.fix


def test_a_folder_is_no_inventory(tmp_path: Path) -> None:
    (error,) = faults_of(tmp_path)
    assert "cannot be read" in error.what


def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(HOST + JOB + RUNS + 'secret_env = ["T=hunter2"]\n', "utf-8")
    (error,) = faults_of(path)
    assert "hunter2" not in str(error)
