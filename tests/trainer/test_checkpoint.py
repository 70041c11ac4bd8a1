"""Checkpoints: whole or refused, never overwritten, and the next best one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_support import write_state  # type: ignore[import-not-found]

from trainer.checkpoint import (
    MANIFEST,
    MOMENTS,
    STATE,
    WEIGHTS,
    Store,
    choose,
    list_checkpoints,
    seal,
    verify,
)
from trainer.errors import CheckpointError, ConfigError
from trainer.tensor_files import read_tensors

SHAPES = {"a": (2, 3), "b": (4,)}


def tensors(fill: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    weights = {name: torch.full(shape, fill) for name, shape in SHAPES.items()}
    moments = {f"{kind}.{n}": torch.full(s, fill + 1) for kind in ("exp_avg", "exp_avg_sq") for n, s in SHAPES.items()}
    return weights, moments


def save(store: Store, step: int, fill: float = 0.0) -> Path:
    state: dict[str, Any] = {
        "step": step,
        "batches": step,
        "plan": {"base": {}},
        "data": {"sha256": ""},
        "drafter": {},
    }
    beside = store.begin(step, state)
    seal(beside, write_state(beside, *tensors(fill)))
    path = store.claim(step)
    assert not path.exists()  # also where another history had one of this name
    store.publish(beside, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != ".lock")


def test_what_was_saved_comes_back(folder: Path) -> None:
    store = Store(folder, 3)
    path = save(store, 7, fill=2.5)
    found = choose(folder, "auto")
    assert found is not None
    assert (found.path, found.step) == (path, 7)
    back = {(kind, name): tensor for kind, name, tensor in read_tensors(path, SHAPES)}
    assert len(back) == 6
    assert torch.equal(back["weight", "a"], torch.full((2, 3), 2.5))
    assert torch.equal(back["exp_avg_sq", "b"], torch.full((4,), 3.5))
    with pytest.raises(CheckpointError, match="missing or unknown"):
        list(read_tensors(path, {**SHAPES, "c": (1,)}))
    with pytest.raises(CheckpointError, match="a is"):
        list(read_tensors(path, {**SHAPES, "a": (3, 2)}))
    store.close()


@pytest.mark.parametrize("name", [WEIGHTS, MOMENTS, STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_damage_is_found_and_the_older_one_named(folder: Path, name: str, damage: str) -> None:
    store = Store(folder, 3)
    older, newest = save(store, 1), save(store, 2)
    store.close()
    file = newest / name
    raw = bytearray(file.read_bytes())
    if damage == "bit":
        # In the manifest one digit of a hash or size changes; everywhere else any byte will do.
        at = raw.index(b'"sha256": "') + 12 if name == MANIFEST else len(raw) // 2
        raw[at] = ord("0") if raw[at] != ord("0") else ord("1")
        file.write_bytes(raw)
    elif damage == "cut":
        file.write_bytes(raw[: len(raw) // 2])
    else:
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        choose(folder, "auto")
    assert caught.value.exit_code == 5
    assert str(newest) in caught.value.where
    assert f"--resume {older}" in caught.value.next
    chosen = choose(folder, str(older))
    assert chosen is not None
    assert chosen.step == 1
    assert choose(folder, older.name) is not None


def test_a_damaged_older_one_is_not_offered(folder: Path) -> None:
    store = Store(folder, 5)
    first, second, third = save(store, 1), save(store, 2), save(store, 3)
    store.close()
    for path in (second, third):
        (path / WEIGHTS).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        choose(folder, "auto")
    assert str(first) in caught.value.next
    (first / WEIGHTS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no other checkpoint"):
        choose(folder, "auto")


def test_none_refuses_to_run_beside_checkpoints(folder: Path) -> None:
    assert choose(folder, "none") is None
    assert choose(folder, "auto") is None
    store = Store(folder, 3)
    save(store, 1)
    store.close()
    with pytest.raises(ConfigError, match="1 checkpoints"):
        choose(folder, "none")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        choose(folder, "/absent")


def test_a_newer_schema_is_refused(folder: Path) -> None:
    store = Store(folder, 3)
    path = save(store, 1)
    store.close()
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "schema": 2}))
    with pytest.raises(CheckpointError, match="newer"):
        verify(path)


def test_only_the_last_ones_stay(folder: Path) -> None:
    store = Store(folder, 2)
    for step in (1, 2, 3, 4):
        save(store, step)
    store.close()
    assert names(folder) == ["step-00000003", "step-00000004"]


def test_a_history_that_was_left_is_set_aside_whole(folder: Path) -> None:
    store = Store(folder, 3)
    for step in (1, 2, 3):
        save(store, step, fill=step)
    store.close()
    again = Store(folder, 3)
    chosen = choose(folder, "step-00000001")
    assert chosen is not None
    again.resumed_from(chosen)
    assert len(list_checkpoints(folder)) == 3  # nothing is touched before something better is there
    save(again, 2, fill=20)
    save(again, 3, fill=30)
    assert [p.name for p in list_checkpoints(folder)] == ["step-00000001", "step-00000002", "step-00000003"]
    aside = sorted(p for p in folder.iterdir() if ".aside-" in p.name)
    assert [p.name.partition(".")[0] for p in aside] == ["step-00000002", "step-00000003"]
    assert {verify(p).step for p in aside} == {2, 3}
    again.close()


def test_a_half_written_one_is_no_checkpoint_and_is_swept(folder: Path) -> None:
    store = Store(folder, 3)
    write_state(store.begin(5, {}), *tensors(0))
    assert list_checkpoints(folder) == []
    store.close()
    assert names(folder) == []


def test_two_runs_cannot_share_a_folder(folder: Path) -> None:
    store = Store(folder, 3)
    with pytest.raises(ConfigError, match="another run"):
        Store(folder, 3)
    store.close()
    Store(folder, 3).close()


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path / "file" / "checkpoints", 3)
