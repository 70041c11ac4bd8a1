"""`dflash-ops init`: a file that loads, and never one lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_ops.cli.main import run
from dflash_ops.inventory import load
from dflash_ops.inventory.template import template

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_inventory_loads_and_says_what_is_next(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init"]) == 0
    said = capsys.readouterr().out
    assert str(folder / "inventory.toml") in said
    assert "dflash-ops doctor" in said
    text = (folder / "inventory.toml").read_text("utf-8")
    assert "192.0.2.6" in text
    assert "id = 200" in text
    job = load(folder / "inventory.toml").job()
    assert (job.name, job.host, job.root) == ("demo", "local", str(folder / ".dflash/demo"))
    assert os.access(job.interpreter, os.X_OK)  # the Python that runs this, where there is no .venv


def test_a_venv_beside_the_file_is_the_interpreter(folder: Path) -> None:
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").touch()
    assert run(["init"]) == 0
    assert load("inventory.toml").job().interpreter == str(folder / ".venv/bin/python")


def test_an_old_one_is_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "inventory.toml").write_text("mine")
    assert run(["init"]) == 2
    assert "left as it is" in capsys.readouterr().err
    assert (folder / "inventory.toml").read_text() == "mine"
    assert run(["init", "--force"]) == 0
    assert (folder / "inventory.toml.old").read_text() == "mine"
    assert run(["init", "--force"]) == 0
    assert (folder / "inventory.toml.old").read_text() == "mine"
    assert (folder / "inventory.toml.old.1").exists()


def test_what_is_no_ordinary_file_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "pipe")
    assert run(["init", "pipe", "--force"]) == 2
    assert "no ordinary file" in capsys.readouterr().err
    assert (folder / "pipe").is_fifo()
    assert run(["init", "a" * 300]) == 1
    assert "File name too long" in (said := capsys.readouterr().err)
    assert "fault of dflash-ops" not in said


def test_a_folder_that_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    assert run(["init"]) == 1
    said = capsys.readouterr().err
    assert "cannot be written: No such file" in said
    assert "fault of dflash-ops" not in said


def test_a_link_is_not_written_through(folder: Path) -> None:
    (folder / "inventory.toml").symlink_to(folder / "elsewhere.toml")
    assert run(["init"]) == 2
    assert not (folder / "elsewhere.toml").exists()


def test_names_of_any_script(folder: Path) -> None:
    root = "mit Leer 'q' \"z\" \\ü"
    assert run(["init", "sub/x.toml", "--host", 'my "gpu" ü', "--root", root]) == 0
    job = load("sub/x.toml").job()
    assert job.host == 'my "gpu" ü'
    assert job.root == str(folder / "sub" / root)


@pytest.mark.parametrize(
    "args", [["--root", "/"], ["--root", ""], ["--root", "a\nb"], ["--host", "-x"], ["--host", "a/b"], ["--host", ""]]
)
def test_what_would_not_load_is_not_written(args: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", *args]) == 2
    said = capsys.readouterr().err
    assert args[0] in said
    assert "next:" in said
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").touch()
    assert run(["init", "file/inventory.toml"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_means_the_file_in_it(folder: Path) -> None:
    (folder / "sub").mkdir()
    assert run(["init", "sub"]) == 0
    assert (folder / "sub/inventory.toml").exists()


def test_the_repository_has_what_init_writes() -> None:
    assert (REPO / "inventory.toml").read_text("utf-8") == template()
