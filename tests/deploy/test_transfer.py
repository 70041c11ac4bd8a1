"""Only what changed travels: the rest is copied there, by content, and checked; tricks are refused on both sides."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.contracts import FileEntry, Release, release_id, to_dict
from dflash_ops.deploy import boot, transfer, zipapp
from dflash_ops.deploy.release import Built, build, tar_end, tar_header, tar_stream
from dflash_ops.deploy.transfer import RECEIVE, Pack, build_pack, question, send
from dflash_ops.errors import DflashError, TransferError
from dflash_ops.hosts.base import Conversation
from dflash_ops.hosts.local import LocalHost
from dflash_ops.resident.content import Stock

HOST, PYTHON = LocalHost(), sys.executable


@pytest.fixture(scope="module")
def pack() -> Pack:
    return build_pack()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    for number in range(20):
        (folder / f"m{number}.py").write_text(f"x = {number}\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "again.sh").symlink_to("run.sh")
    (folder / "ü 'quoted' \n name").write_text("newline")
    return folder


def lacking(pack: Pack, root: str, built: Built) -> list[int]:
    """Which files of a release must travel, as the machine says: indices."""
    request = {"root": root, "ask": built.manifest}
    with question(HOST, PYTHON, pack, RECEIVE, request, built, root=root) as upload:
        upload.end()
        return list(upload.said["lacking"])


def test_the_second_release_takes_what_it_knows(tmp_path: Path, source: Path, pack: Pack) -> None:
    root = str(tmp_path / "root")
    first = build(source)
    assert len(lacking(pack, root, first)) == 22
    sent = send(HOST, PYTHON, pack, root, first, resident=True)
    assert (sent.files, sent.kept) == (23, 0)

    (source / "m3.py").write_text("x = 'new'\n")
    (source / "m4.py").rename(source / "moved.py")
    (source / "m5.py").chmod(0o755)
    (source / "copy of m6.py").write_bytes((source / "m6.py").read_bytes())
    second = build(source)
    only = lacking(pack, root, second)
    assert [second.release.files[i].path for i in only] == ["m3.py"]
    sent = send(HOST, PYTHON, pack, root, second, only=only)
    assert (sent.files, sent.bytes) == (1, 10)
    place = Path(root, "releases", second.release.id)
    assert build(place).release.id == second.release.id
    # a copy, not a link: what somebody edits in one release stays there
    assert (place / "m7.py").stat().st_nlink == 1


class Greeting(LocalHost):
    """This machine, with a login shell that greets everybody."""

    def converse(self, argv: Sequence[str], *, deadline: float) -> AbstractContextManager[Conversation]:
        greets = "printf 'Welcome\\n\\n  * news\\n\\n'; exec \"$@\""
        return super().converse(["sh", "-c", greets, "sh", *argv], deadline=deadline)


def test_a_greeting_with_empty_lines_is_passed_over(tmp_path: Path, source: Path, pack: Pack) -> None:
    root, built = str(tmp_path / "root"), build(source)
    with question(Greeting(), PYTHON, pack, RECEIVE, {"root": root, "ask": built.manifest}, built, root=root) as upload:
        sent = upload.send(only=upload.said["lacking"])
    assert sent.files == 22
    assert build(Path(root, "releases", built.release.id)).release.id == built.release.id


def test_the_resident_is_built_once_for_all_that_deploy_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_built_pack", cache(transfer._built_pack.__wrapped__))
    built: list[Path] = []
    both = threading.Event()

    def build_resident(place: Path) -> str:
        built.append(place)
        if len(built) == 2:
            both.set()
        both.wait(0.2)  # for another one that builds it as well
        place.write_bytes(b"zip")
        return "one"

    monkeypatch.setattr(zipapp, "build_resident", build_resident)
    threads = [threading.Thread(target=build_pack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(built) == 1
    assert build_pack() == Pack("one", b"zip")


@pytest.mark.parametrize("harm", ["edited", "removed", "link", "folder"])
def test_a_release_that_was_edited_there_gives_nothing(tmp_path: Path, source: Path, pack: Pack, harm: str) -> None:
    root = tmp_path / "root"
    first = build(source)
    send(HOST, PYTHON, pack, str(root), first)
    (source / "m3.py").write_text("x = 'new'\n")
    second = build(source)
    only = lacking(pack, str(root), second)
    victim = root / "releases" / first.release.id / "m9.py"
    victim.unlink()
    if harm == "edited":
        victim.write_text("x = 8\n")  # of the same size
    elif harm == "link":
        victim.symlink_to("m8.py")
    elif harm == "folder":
        victim.mkdir()
    sent = send(HOST, PYTHON, pack, str(root), second, only=only)
    assert sent.files == 2
    assert build(root / "releases" / second.release.id).release.id == second.release.id


def test_a_cut_upload_of_changes_leaves_nothing_and_the_next_one_is_whole(
    tmp_path: Path, source: Path, pack: Pack
) -> None:
    root = tmp_path / "root"
    first = build(source)
    send(HOST, PYTHON, pack, str(root), first)
    (source / "m3.py").write_text("x = 'new'\n" * 1000)
    second = build(source)
    only = lacking(pack, str(root), second)
    whole = b"".join([*tar_stream(second, "release", only), tar_end()])
    request = {"root": str(root), "token": "aa", "release": to_dict(second.release), "take": True}
    for share in (0.0, 0.5, 0.9):
        with pytest.raises(TransferError):
            boot.call(
                HOST, PYTHON, pack.content, "dflash_ops.resident.receive", {**request, "token": os.urandom(4).hex()},
                deadline=30, payload=[whole[: int((len(whole) - 1024) * share)] if share else b"\1" * 600],
            )  # fmt: skip
        assert sorted(p.name for p in (root / "releases").iterdir()) == [first.release.id]
    send(HOST, PYTHON, pack, str(root), second, only=only)
    assert build(root / "releases" / second.release.id).release.id == second.release.id


def entry(path: str, content: bytes = b"x", mode: int = 0o644, link: str | None = None) -> FileEntry:
    if link is not None:
        return FileEntry(path, 0o777, 0, "", link)
    return FileEntry(path, mode, len(content), hashlib.sha256(content).hexdigest())


TRICKS = {
    "above": (entry("../../evil"),),
    "absolute": (entry("/tmp/evil"),),
    "dots inside": (entry("a/../../evil"),),
    "empty part": (entry("a//b"),),
    "nul": (entry("a\0b"),),
    "the manifest itself": (entry(".release.json"),),
    "through a link": (entry("a", link="b"), entry("a/x"), entry("b/y")),
    "file as folder": (entry("a"), entry("a/x")),
    "link above": (entry("a", link="../x"),),
    "link to the root": (entry("a", link="/etc/passwd"),),
    "link that comes back": (entry("a/b", link="../../other/x"),),
    "setuid": (entry("a", mode=0o4755),),
    "twice": (entry("a"), entry("a", b"y")),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_whatever_the_sender_says_no_name_leaves_the_release(tmp_path: Path, pack: Pack, trick: str) -> None:
    files = TRICKS[trick]
    release = Release(release_id(files), files)
    members = b"".join(
        tar_header(f"release/{f.path}", f.size, link=f.link) + (b"" if f.link else b"x" + b"\0" * 511) for f in files
    )
    request = {"root": str(tmp_path / "root"), "token": "aa", "release": to_dict(release), "resident": None}
    with pytest.raises(DflashError):
        boot.call(
            HOST,
            PYTHON,
            pack.content,
            "dflash_ops.resident.receive",
            request,
            deadline=30,
            payload=[members, tar_end()],
        )
    assert not list(tmp_path.glob("root/releases/*"))
    assert not (tmp_path / "evil").exists()


def test_a_link_is_never_made_from_what_the_stream_says(tmp_path: Path, pack: Pack) -> None:
    """A member that says it is a link, a device, a hard link: where a file was announced it is refused."""
    import tarfile

    release = Release(release_id((entry("a"),)), (entry("a"),))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
        info = tarfile.TarInfo("release/a")
        info.type, info.linkname = kind, "/etc/passwd"
        request = {"root": str(tmp_path), "token": os.urandom(4).hex(), "release": to_dict(release)}
        with pytest.raises(TransferError):
            boot.call(
                HOST, PYTHON, pack.content, "dflash_ops.resident.receive", request, deadline=30,
                payload=[info.tobuf(), tar_end()],
            )  # fmt: skip
    assert not list(tmp_path.glob("releases/*"))


def test_a_manifest_of_another_hash_is_refused(tmp_path: Path, source: Path, pack: Pack) -> None:
    built = build(source)
    lying = Built(replace(built.release, id="0" * 12), built.paths)
    with pytest.raises(TransferError, match="hash of its manifest"):
        send(HOST, PYTHON, pack, str(tmp_path), lying)


def test_a_damaged_manifest_there_only_has_nothing_to_give(tmp_path: Path) -> None:
    for name, text in {
        "a": "{",
        "b": "[]",
        "c": '{"files": [{}]}',
        "d": '{"files": [{"path": "../x", "size": 1}]}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".release.json").write_text(text)
    assert entry("x") not in Stock(tmp_path)


def test_ten_thousand_files(tmp_path: Path, pack: Pack) -> None:
    source = tmp_path / "src"
    for folder in range(100):
        (source / str(folder)).mkdir(parents=True)
        for number in range(100):
            (source / str(folder) / f"{number}.txt").write_text(f"{folder} {number % 7}")
    root = str(tmp_path / "root")
    first = build(source)
    assert send(HOST, PYTHON, pack, root, first).files == 10_000
    (source / "5/5.txt").write_text("changed")
    second = build(source)
    only = lacking(pack, root, second)
    assert send(HOST, PYTHON, pack, root, second, only=only).kept == 9_999
    said: dict[str, Any] = json.loads(Path(root, "releases", second.release.id, ".release.json").read_text())
    assert len(said["files"]) == 10_000
