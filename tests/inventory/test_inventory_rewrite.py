"""Two lists of devices changed in an inventory that a person wrote: nothing else of it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.errors import DflashError
from dflash_ops.inventory import load
from dflash_ops.inventory.rewrite import set_devices

HEAD = """\
# Mine, with öther thoughts: target_devices = [9]
schema = 1

[hosts.here]
kind = "local"

[jobs.other]                      # target_devices = ["cpu"] stands here as well
host = "here"
root = "/srv/other"
[jobs.other.trainer]
target_devices = [0, 1]
drafter_devices = [2]

[jobs."größe 2"]
host = "here"
root = "/srv/big"
"""

#: How the job's trainer may be written, and what becomes of it with 2 targets and 1 drafter.
FORMS = [
    (
        '[jobs."größe 2".trainer]\ntarget_devices = [0]   # one,  so far\n\tdrafter_devices=[1,2]# two\n',
        '[jobs."größe 2".trainer]\ntarget_devices = [0, 1]   # one,  so far\n\tdrafter_devices=[2]# two\n',
    ),
    (
        'trainer = { target_devices = ["cuda:0"], drafter_devices = ["1-2"], train = { lr = 1e-3 } }  # whole\n',
        'trainer = { target_devices = ["cuda:0", "cuda:1"], drafter_devices = [2], train = { lr = 1e-3 } }  # whole\n',
    ),
    (
        'trainer.target_devices = [\n  0,\n]\ntrainer.drafter_devices = [ "cuda:1", 2 ]\n',
        'trainer.target_devices = [0, 1]\ntrainer.drafter_devices = ["cuda:2"]\n',
    ),
]


def write(folder: Path, body: str, newline: str = "\n") -> Path:
    file = folder / "inventory.toml"
    file.write_bytes((HEAD + body).replace("\n", newline).encode())
    return file


def change(file: Path, target: str = "cuda:0 cuda:1", drafter: str = "cuda:2") -> bool:
    return set_devices(load(file).job("größe 2"), target.split(), drafter.split())


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(("before", "after"), FORMS)
def test_only_the_two_lists_change(tmp_path: Path, before: str, after: str, newline: str) -> None:
    file = write(tmp_path, before, newline)
    file.chmod(0o640)
    assert change(file)
    assert file.read_bytes() == (HEAD + after).replace("\n", newline).encode()
    assert file.stat().st_mode & 0o777 == 0o640
    job = load(file).job("größe 2")
    assert job.trainer is not None
    assert (job.trainer.target_devices, job.trainer.drafter_devices) == (("cuda:0", "cuda:1"), ("cuda:2",))
    assert not change(file)  # it has them already
    assert [p.name for p in tmp_path.iterdir()] == ["inventory.toml"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    file = write(tmp_path / "kept", FORMS[0][0])
    link = tmp_path / "inventory.toml"
    link.symlink_to(file)
    assert change(link)
    assert link.is_symlink()
    assert "[0, 1]   # one" in file.read_text("utf-8")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("trainer.target_devices = [\n  0,  # the good one\n]\ntrainer.drafter_devices = [1, 2]\n", "form"),
        (FORMS[0][0] + "not_a_key = 1\n", "read"),
    ],
)
def test_what_cannot_be_done_safely_is_left_and_said(tmp_path: Path, body: str, word: str) -> None:
    file = write(tmp_path, body.replace("not_a_key = 1\n", ""))
    job = load(file).job("größe 2")
    file.write_text(HEAD + body, "utf-8")
    raw = file.read_bytes()
    with pytest.raises(DflashError, match=word) as refused:
        set_devices(job, ["cuda:0", "cuda:1"], ["cuda:2"])
    assert "target_devices = [0, 1]\n  drafter_devices = [2]" in refused.value.next
    assert '[jobs."größe 2".trainer]' in refused.value.next
    assert file.read_bytes() == raw


def test_an_inventory_that_somebody_changed_meanwhile_is_left(tmp_path: Path) -> None:
    file = write(tmp_path, FORMS[0][0])
    job = load(file).job("größe 2")
    file.write_text(file.read_text("utf-8").replace("target_devices = [0] ", "target_devices = [5] "), "utf-8")
    with pytest.raises(DflashError, match="changed meanwhile"):
        set_devices(job, ["cuda:0", "cuda:1"], ["cuda:2"])
    assert "[5]" in file.read_text("utf-8")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, FORMS[0][0])
    job = load(file).job("größe 2")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DflashError, match="No space left"):
        set_devices(job, ["cuda:0", "cuda:1"], ["cuda:2"])
    monkeypatch.undo()
    assert file.read_text("utf-8") == HEAD + FORMS[0][0]
