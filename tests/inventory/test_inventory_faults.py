"""A broken inventory: every fault at once, each with file, key, line and fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from inventory_cases import CASES, HOST, JOB, RUNS

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
    ],
)
def test_what_is_no_toml(raw: bytes, line: int, what: str, tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_bytes(raw)
    (error,) = faults_of(path)
    assert what in error.what
    assert error.line == line
    assert error.fix


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
