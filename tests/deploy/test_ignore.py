"""What stays behind: as git would leave it, and .dflashignore after that."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_ops.deploy.release import build
from dflash_ops.errors import ReleaseError


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(folder: Path) -> set[str]:
    return {f.path for f in build(folder, ignores=True).release.files}


TREE = {
    "train.py": "1",
    "notes.txt": "1",
    "deep__notes.txt": "1",
    "deep__er__x.log": "1",
    "keep.log": "1",
    "out__a.bin": "1",
    "deep__out__b.bin": "1",
    "größe__ä b.log": "1",
}
IGNORE = "*.log\n!keep.log\n/out/\ndeep/**/x.*\n# words\n\nnotes.txt   \n"


def put(folder: Path, tree: dict[str, str]) -> None:
    for name, text in tree.items():
        write(folder, **{name: text})


def test_as_git_itself_does(tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not there")
    put(tmp_path, TREE)
    (tmp_path / ".gitignore").write_text(IGNORE)
    (tmp_path / "deep/.gitignore").write_text("!notes.txt\n")
    subprocess.run([git, "init", "-q", str(tmp_path)], check=True)
    said = subprocess.run(
        [git, "-C", str(tmp_path), "ls-files", "-z", "--others", "--exclude-standard"], check=True, capture_output=True
    )
    assert names(tmp_path) == {n for n in said.stdout.decode().split("\0") if n}
    assert "deep/notes.txt" in names(tmp_path)
    # a folder of the repository: the patterns around it count as well
    assert names(tmp_path / "deep") == {".gitignore", "notes.txt", "out/b.bin"}


def test_dflashignore_has_the_last_word(tmp_path: Path) -> None:
    put(tmp_path, TREE)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / ".dflashignore").write_text("!keep.log\ndeep/\nout\n")
    assert names(tmp_path) == {".gitignore", ".dflashignore", "train.py", "notes.txt", "keep.log"}


def test_a_repository_that_ignores_the_source_itself_has_no_say_in_it(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("jobs/\n*.py\n")
    write(tmp_path, jobs__a__train="1")
    (tmp_path / "jobs/a/x.py").write_text("1")
    assert names(tmp_path / "jobs/a") == {"train", "x.py"}


def test_the_bundled_trainer_is_the_same_release_wherever_it_lies(tmp_path: Path) -> None:
    put(tmp_path, TREE)
    plain = build(tmp_path).release.id
    (tmp_path.parent / ".gitignore").write_text("*\n")
    assert build(tmp_path).release.id == plain


def test_a_pattern_that_is_none_names_its_file(tmp_path: Path) -> None:
    write(tmp_path, a="1")
    (tmp_path / ".dflashignore").write_text("fine\n!\n")
    with pytest.raises(ReleaseError) as caught:
        build(tmp_path, ignores=True)
    assert caught.value.where.endswith(".dflashignore")
