"""A release is its content: the same files are the same id anywhere; what must not travel is refused by name."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from dflash_ops.deploy.release import build, tar_end, tar_stream
from dflash_ops.errors import ReleaseError


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_same_content_is_the_same_id_whatever_umask_time_and_leftovers(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"train.py": "print(1)\n", "pkg/x.py": "x = 1\n"})
    b = write(tmp_path / "b", {"pkg/x.py": "x = 1\n", "train.py": "print(1)\n"})
    write(b, {"__pycache__/x.pyc": "junk", "pkg/__pycache__/y.pyc": "junk", ".git/HEAD": "ref"})
    (b / "train.py").chmod(0o600)
    os.utime(b / "train.py", (1, 1))
    assert build(a).release.id == build(b).release.id
    assert [f.path for f in build(b).release.files] == ["pkg/x.py", "train.py"]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: (d / "train.py").write_text("print(2)\n"),
        lambda d: (d / "train.py").rename(d / "main.py"),
        lambda d: (d / "train.py").chmod(0o755),
        lambda d: (d / "link").symlink_to("train.py"),
    ],
)
def test_any_change_that_matters_is_another_id(tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    folder = write(tmp_path / "a", {"train.py": "print(1)\n"})
    before = build(folder).release.id
    change(folder)
    assert build(folder).release.id != before


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "pkg/../../outside"])
def test_a_link_that_leads_out_is_refused_and_named(tmp_path: Path, target: str) -> None:
    folder = write(tmp_path / "a", {"pkg/x.py": "1"})
    write(tmp_path, {"outside": "secret"})
    (folder / "evil").symlink_to(target)
    with pytest.raises(ReleaseError, match="outside") as caught:
        build(folder)
    assert "evil" in caught.value.where


def test_a_link_through_a_linked_folder_cannot_lead_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"real/x.py": "1"})
    (folder / "deep").mkdir()
    (folder / "deep/up").symlink_to("../real")
    (folder / "real/out").symlink_to("../../outside")
    with pytest.raises(ReleaseError, match="outside"):
        build(folder)


def test_a_link_inside_travels_as_a_link(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"x.py": "1"})
    (folder / "y.py").symlink_to("x.py")
    entry = build(folder).release.files[1]
    assert (entry.path, entry.link) == ("y.py", "x.py")


def test_refusals_say_what_and_where(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="no folder"):
        build(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReleaseError, match="no file"):
        build(tmp_path / "empty")
    folder = write(tmp_path / "fifo", {"x": "1"})
    os.mkfifo(folder / "pipe")
    with pytest.raises(ReleaseError, match="neither a file nor a link"):
        build(folder)
    folder = write(tmp_path / "bytes", {"x": "1"})
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.py")).write_text("1")
    with pytest.raises(ReleaseError, match="UTF-8"):
        build(folder)


def test_weights_in_the_source_are_refused_before_they_are_sent(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"x.py": "1"})
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # sparse; were it read before it is refused, this test would take an hour
    with pytest.raises(ReleaseError, match="1024 MiB") as caught:
        build(folder)
    assert "model.safetensors" in caught.value.where


def test_the_stream_is_tar_and_notices_a_file_that_changes(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"x.py": "x" * 700_000, "é ü.py": "1"})
    built = build(folder)
    pieces = [*tar_stream(built, "release"), tar_end()]
    assert max(map(len, pieces)) <= 1 << 20
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        assert tar.getnames() == ["release/x.py", "release/é ü.py"]
    (folder / "x.py").write_text("shorter")
    with pytest.raises(ReleaseError, match="changed while"):
        list(tar_stream(built, "release"))
    (folder / "x.py").write_text("x" * 700_001)
    with pytest.raises(ReleaseError, match="changed while"):
        list(tar_stream(built, "release"))
