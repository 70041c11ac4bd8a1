"""Which inventory and which folders a demo uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.demo.run import QUICK, QUICK_STEPS, Sizes, plan_of
from dflash_ops.demo.setup import find
from dflash_ops.errors import InventoryError, UsageError
from dflash_ops.inventory.create import create

NOWHERE = {"HOME": "/nonexistent"}


def test_the_inventory_of_this_folder_is_used(tmp_path: Path) -> None:
    create(tmp_path / "inventory.toml", root="work", interpreter="/usr/bin/python3")
    setup = find(None, None, environ=NOWHERE, cwd=tmp_path)
    assert setup.root == tmp_path / "work" and setup.option == ""
    assert setup.target == tmp_path / "work" / "target"
    assert setup.data == tmp_path / "work" / "data" / "train.jsonl"
    assert setup.prompts.parent == setup.held_out.parent == tmp_path / "work" / "data"
    assert setup.job.session == "dflash-demo"


def test_without_one_the_demo_writes_its_own_and_finds_it_again(tmp_path: Path) -> None:
    setup = find(None, None, environ=NOWHERE, cwd=tmp_path)
    assert setup.root == tmp_path / ".dflash" / "demo"
    assert setup.inventory.file == str(setup.root / "inventory.toml")
    assert setup.inventory.file in setup.option
    before = Path(setup.inventory.file).read_bytes()
    assert find(None, None, environ=NOWHERE, cwd=tmp_path).job == setup.job
    assert Path(setup.inventory.file).read_bytes() == before


def test_two_roots_have_two_sessions(tmp_path: Path) -> None:
    one, two = (find(None, tmp_path / n, environ=NOWHERE, cwd=tmp_path) for n in ("one", "two"))
    assert one.root == tmp_path / "one" and two.root == tmp_path / "two"
    assert one.job.session != two.job.session


def test_an_inventory_with_faults_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "inventory.toml").write_text("schema = ")
    with pytest.raises(InventoryError):
        find(None, None, environ=NOWHERE, cwd=tmp_path)
    assert not (tmp_path / ".dflash").exists()


def test_a_demo_job_that_cannot_run_here_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "inventory.toml"
    create(file, root="work", interpreter="/usr/bin/python3")
    good = file.read_text()
    with pytest.raises(UsageError, match="exclude"):
        find(file, tmp_path, environ=NOWHERE, cwd=tmp_path)
    file.write_text(good.replace('path = "target"', 'path = "/models/target"'))
    with pytest.raises(UsageError, match="makes its target itself"):
        find(file, None, environ=NOWHERE, cwd=tmp_path)
    file.write_text(
        good.replace('[hosts.local]\nkind = "local"', '[hosts.local]\nkind = "ssh"\naddress = "192.0.2.1"').replace(
            'root = "work"', 'root = "/work"'
        )
    )
    with pytest.raises(UsageError, match="not this machine"):
        find(file, None, environ=NOWHERE, cwd=tmp_path)
    file.write_text(good.replace("jobs.demo", "jobs.other").replace('"demo"', '"other"'))
    with pytest.raises(UsageError, match="no job named demo"):
        find(file, None, environ=NOWHERE, cwd=tmp_path)
    # Unless it was named, an inventory without a demo is someone's own: the demo stays apart from it.
    assert find(None, None, environ=NOWHERE, cwd=tmp_path).root == tmp_path / ".dflash" / "demo"


def test_quick_and_steps_change_this_run_only(tmp_path: Path) -> None:
    setup = find(None, tmp_path, environ=NOWHERE, cwd=tmp_path)
    own = setup.trainer.tables["train"]["steps"]
    assert plan_of(setup, steps=None, quick=False) == (setup, Sizes())
    quick, sizes = plan_of(setup, steps=None, quick=True)
    assert quick.trainer.tables["train"]["steps"] == QUICK_STEPS != own and sizes == QUICK
    seven, _ = plan_of(setup, steps=7, quick=True)
    assert seven.trainer.tables["train"]["steps"] == 7
    assert seven.job.overrides == {"train.steps": "7"}
    assert setup.trainer.tables["train"]["steps"] == own
