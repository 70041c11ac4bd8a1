"""Uploads: whole or not there, cut at any byte; stale ones removed, living ones not; damage noticed and repaired."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.contracts import to_dict
from dflash_ops.deploy import boot
from dflash_ops.deploy.release import Built, build, tar_end, tar_header, tar_stream
from dflash_ops.deploy.run import Pack, build_pack
from dflash_ops.errors import CommandFailed, PreflightError, TransferError
from dflash_ops.hosts.local import LocalHost


@pytest.fixture(scope="module")
def pack() -> Pack:
    return build_pack()


@pytest.fixture
def built(tmp_path: Path) -> Built:
    source = tmp_path / "src"
    (source / "pkg").mkdir(parents=True)
    (source / "train.py").write_text("print(1)\n")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "pkg/data.bin").write_bytes(os.urandom(100_000))
    (source / "link").symlink_to("pkg/data.bin")
    return build(source)


def stream(built: Built) -> bytes:
    return b"".join([*tar_stream(built, "release"), tar_end()])


def send(root: Path, built: Built, pack: Pack, payload: bytes, *, resident: bool = False) -> dict[str, Any]:
    said = {"id": pack.id, "size": len(pack.content), "sha256": pack.sha256} if resident else None
    request = {"root": str(root), "token": os.urandom(4).hex(), "release": to_dict(built.release), "resident": said}
    return boot.call(
        LocalHost(),
        sys.executable,
        pack.content,
        "dflash_ops.resident.receive",
        request,
        deadline=30,
        payload=[payload],
    )


def complete(root: Path) -> list[str]:
    """What is in releases/ and resident/ and looks like something to use, or like a leftover."""
    return sorted(p.name for p in [*root.glob("releases/*"), *root.glob("releases/.*"), *root.glob("resident/*")])


def test_what_arrives_is_what_left(tmp_path: Path, built: Built, pack: Pack) -> None:
    root = tmp_path / "root"
    os.umask(0o077)
    try:
        said = send(root, built, pack, stream(built), resident=True)
    finally:
        os.umask(0o022)
    place = root / "releases" / built.release.id
    assert said["release"] == built.release.id
    assert build(place).release.id == built.release.id  # modes, links and content, and .release.json is no part of it
    assert (place / "link").readlink() == Path("pkg/data.bin")
    assert (root / f"resident/{pack.id}.pyz").read_bytes() == pack.content
    assert complete(root) == sorted(
        [built.release.id, f"{pack.id}.pyz", f"{pack.id}.{sys.implementation.cache_tag}.zip"]
    )


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_an_upload_that_is_cut_leaves_nothing(tmp_path: Path, built: Built, pack: Pack, share: float) -> None:
    whole = stream(built)
    with pytest.raises(TransferError):
        send(tmp_path, built, pack, whole[: int(len(whole) * share) if share < 0.999 else len(whole) - 2000])
    assert complete(tmp_path) == []


def test_a_receiver_that_is_killed_leaves_a_folder_that_the_next_upload_removes(
    tmp_path: Path, built: Built, pack: Pack
) -> None:
    root = tmp_path / "root"
    whole = stream(built)
    request = {"root": str(root), "token": "aa", "release": to_dict(built.release), "resident": None}
    caught: list[bytes] = []

    class Recorder:
        name = "recorder"

        def run(self, argv: Any, *, deadline: float, stdin: Iterator[bytes], **_: Any) -> Any:
            caught.extend(stdin)
            raise CommandFailed("recorded")

    with pytest.raises(CommandFailed):
        boot.call(Recorder(), "python3", pack.content, "dflash_ops.resident.receive", request, deadline=1,  # type: ignore[arg-type]
                  payload=[whole[: len(whole) // 2]])  # fmt: skip
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", boot.LOADER], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"".join(caught))
    process.stdin.flush()
    while not list(root.glob("releases/.incoming-*/release/pkg")):
        assert process.poll() is None
    # While it lives its folder is its own, whatever another deploy does ...
    send(root, built, pack, whole)
    assert len(list(root.glob("releases/.incoming-*"))) == 1
    # ... and once it is dead the next one takes it away.
    process.kill()
    process.wait(20)
    process.stdin.close()
    assert len(list(root.glob("releases/.incoming-*"))) == 1
    send(root, built, pack, whole)
    assert complete(root) == [built.release.id]


@pytest.mark.parametrize("harm", ["content", "missing", "mode-of-a-link"])
def test_a_release_that_was_edited_there_is_sent_anew_and_the_edit_kept(
    tmp_path: Path, built: Built, pack: Pack, harm: str
) -> None:
    root = tmp_path / "root"
    send(root, built, pack, stream(built))
    place = root / "releases" / built.release.id
    if harm == "content":
        (place / "train.py").write_text("print(2)\n")
    elif harm == "missing":
        (place / "train.py").unlink()
    else:
        (place / "link").unlink()
        (place / "link").write_bytes((place / "pkg/data.bin").read_bytes())
    probe = {"root": str(root), "release": to_dict(built.release), "resident": pack.id}
    said = boot.call(LocalHost(), sys.executable, pack.content, "dflash_ops.resident.probe", probe, deadline=30)
    assert said["release"] == "damaged"
    kept = send(root, built, pack, stream(built))["damaged_kept"]
    assert (root / "releases" / kept).is_dir()
    assert build(place).release.id == built.release.id
    again = boot.call(LocalHost(), sys.executable, pack.content, "dflash_ops.resident.probe", probe, deadline=30)
    assert again["release"] == "whole"


def test_bytecode_that_python_wrote_there_is_no_damage(tmp_path: Path, built: Built, pack: Pack) -> None:
    send(tmp_path, built, pack, stream(built))
    (tmp_path / "releases" / built.release.id / "__pycache__").mkdir()
    probe = {"root": str(tmp_path), "release": to_dict(built.release), "resident": pack.id}
    said = boot.call(LocalHost(), sys.executable, pack.content, "dflash_ops.resident.probe", probe, deadline=30)
    assert said["release"] == "whole"


@pytest.mark.parametrize(
    "evil",
    [
        tar_header("../../evil", 0),
        tar_header("/tmp/evil", 0),
        tar_header("release/unannounced", 0),
        tar_header("release/train.py", 0, link="/etc/passwd"),
        tar_header("release/train.py", 0) + tar_header("release/train.py", 0),
    ],
)
def test_a_stream_that_holds_something_else_is_refused(tmp_path: Path, built: Built, pack: Pack, evil: bytes) -> None:
    with pytest.raises(TransferError):
        send(tmp_path, built, pack, evil + stream(built))
    assert complete(tmp_path) == []


def test_content_that_is_not_what_was_announced_is_refused(tmp_path: Path, built: Built, pack: Pack) -> None:
    with pytest.raises(TransferError, match=r"train\.py arrived with"):
        send(tmp_path, built, pack, stream(built).replace(b"print(1)", b"print(7)"))
    assert complete(tmp_path) == []


def test_a_lock_that_is_held_is_what_makes_a_folder_somebodys(tmp_path: Path, built: Built, pack: Pack) -> None:
    theirs = tmp_path / "releases/.incoming-x-y"
    theirs.mkdir(parents=True)
    held = os.open(theirs, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    send(tmp_path, built, pack, stream(built))
    assert theirs.is_dir()
    os.close(held)
    send(tmp_path, built, pack, stream(built))
    assert not theirs.exists()


def test_errors_of_the_other_side_keep_their_class(tmp_path: Path, built: Built, pack: Pack) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="file") as caught:
        send(tmp_path / "file", built, pack, stream(built))
    assert caught.value.exit_code == 3
    assert caught.value.next


def test_nothing_is_left_on_the_machine_by_asking(tmp_path: Path, pack: Pack) -> None:
    root = tmp_path / "root"
    said = boot.call(
        LocalHost(), sys.executable, pack.content, "dflash_ops.resident.probe",
        {"root": str(root), "release": None, "resident": pack.id}, deadline=30,
    )  # fmt: skip
    assert (said["release"], said["resident"], said["snapshot"]) == ("none", False, None)
    assert not root.exists()


def test_an_old_python_there_is_told_as_such(tmp_path: Path, pack: Pack) -> None:
    old = tmp_path / "python3"
    old.write_text(
        f"#!/bin/sh\nshift 3\nexec {sys.executable} -c "
        "'import sys; sys.version_info = (3, 8, 1); i = sys.stdin.buffer; exec(i.read(int(i.readline())))'\n"
    )
    old.chmod(0o755)
    with pytest.raises(PreflightError, match=r"3\.8"):
        boot.call(LocalHost(), str(old), pack.content, "dflash_ops.resident.probe", {}, deadline=30)


def test_without_memory_files_a_temporary_one_does_and_is_gone_afterwards(
    tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    python = tmp_path / "python3"
    python.write_text(
        f"#!/bin/sh\nshift 3\nexec {sys.executable} -c "
        "'import os, sys; del os.memfd_create; i = sys.stdin.buffer; exec(i.read(int(i.readline())))'\n"
    )
    python.chmod(0o755)
    request = {"root": str(tmp_path / "root"), "release": None, "resident": pack.id}
    said = boot.call(LocalHost(), str(python), pack.content, "dflash_ops.resident.probe", request, deadline=30)
    assert said["release"] == "none"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_pack_cut_on_the_way_is_told_as_such(pack: Pack) -> None:
    cut = next(boot.opening(pack.content, "x", {})) + b"short"
    done = LocalHost().run([sys.executable, "-c", boot.LOADER], deadline=30, stdin=cut)
    assert b"ended early" in done.stdout
    assert done.rc == 1
