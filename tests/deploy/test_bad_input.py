"""What cannot be deployed: one clear error, the right exit code, nothing half-done left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Toy


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; only root can make one."""
    place = tmp_path / "mounted"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("no permission to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_missing_program_is_named_with_the_key_to_correct(toy: Toy) -> None:
    toy.write(command=["/no/such/python", "{release}/train.py"])
    outcome = toy.ops("deploy")
    assert outcome.code == 3
    assert "/no/such/python is not there" in outcome.err
    assert "`command`" in outcome.err
    toy.nothing_started()


def test_a_program_that_may_not_run(toy: Toy) -> None:
    plain = toy.folder / "plain"
    plain.write_text("#!/bin/sh\n")
    toy.write(command=[str(plain)])
    outcome = toy.ops("deploy")
    assert outcome.code == 3
    assert "not executable" in outcome.err


def test_a_session_of_somebody_else_is_left_alone(toy: Toy) -> None:
    toy.tmux("-f", "/dev/null", "new-session", "-d", "-s", "toy", "sleep 600")
    outcome = toy.ops("deploy")
    assert outcome.code == 4
    assert "taken" in outcome.err
    assert f"tmux -L {toy.socket} attach" in outcome.err
    assert toy.session_there
    assert not os.path.lexists(toy.root / "current")
    assert not (toy.root / "run/attempts").is_dir()


def test_a_read_only_root(toy: Toy, mount: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
    toy.write(root=str(mount / "job"))
    outcome = toy.ops("deploy")
    assert outcome.code == 3
    assert "read-only" in outcome.err
    assert str(mount) in outcome.err
    assert "next:" in outcome.err
    plan = toy.ops("deploy", "--plan")
    assert plan.code == 3
    assert "read-only" in plan.err
    assert not list(mount.iterdir())


def test_a_full_disk_leaves_no_release_that_looks_complete(toy: Toy, mount: Path) -> None:
    toy.root = mount / "job"
    (toy.folder / "src/big.bin").write_bytes(os.urandom(300_000))
    toy.write(root=str(toy.root))
    plan = toy.ops("deploy", "--plan")
    assert plan.code == 3
    assert "needed" in plan.err
    outcome = toy.ops("deploy")
    assert outcome.code == 3
    assert "free at" in outcome.err
    toy.nothing_started()
    assert not list(toy.root.glob("releases/*"))
    assert not list(toy.root.glob("resident/*"))

    # What else is wrong is told at the same time.
    toy.write(command=["/no/such/python"])
    outcome = toy.ops("deploy")
    assert outcome.code == 3
    assert "needed" in outcome.err
    assert "/no/such/python is not there" in outcome.err


def test_a_root_that_is_a_file(toy: Toy) -> None:
    toy.root.write_text("I was here first")
    outcome = toy.ops("deploy")
    assert outcome.code == 3
    assert "file" in outcome.err
    assert toy.root.read_text() == "I was here first"


def test_a_root_with_an_odd_name_works(toy: Toy) -> None:
    toy.root = toy.folder / "-a 'b' \"c\" $HOME `x`;&* ünïcödé 模型 #{pid}"
    toy.write(root=str(toy.root))
    deployed = toy.ops("deploy")
    assert deployed.code == 0, deployed.err
    assert toy.until(lambda s: s["state"] == "stepping")["root"] == str(toy.root)
    assert toy.ops("stop").code == 0
    assert toy.status["state"] == "stopped"


def test_a_root_with_a_newline_is_refused_by_the_inventory(toy: Toy) -> None:
    toy.write(root=str(toy.folder / "new\nline"))
    outcome = toy.ops("deploy")
    assert outcome.code == 2
    assert "control character" in outcome.err


@pytest.mark.parametrize(
    "change", [{"source": "/no/such/folder"}, {"session": "a.b"}, {"hots": "here"}, {"host": "gone"}]
)
def test_a_broken_inventory_is_told_with_file_and_key(toy: Toy, change: dict[str, str]) -> None:
    toy.write(**change)
    outcome = toy.ops("deploy")
    assert outcome.code in (1, 2)
    assert "error:" in outcome.err
    assert "next:" in outcome.err
    toy.nothing_started()


def test_a_secret_that_is_not_there_is_refused_before_anything_is_sent(toy: Toy) -> None:
    toy.write(secret_env=["DFLASH_TEST_TOKEN"])
    outcome = toy.ops("deploy")
    assert outcome.code == 2
    assert "DFLASH_TEST_TOKEN" in outcome.err
    assert not toy.root.exists()


def test_a_secret_reaches_the_trainer_and_no_file(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_TEST_TOKEN", "s3cr3t-value")
    toy.write(secret_env=["DFLASH_TEST_TOKEN"])
    outcome = toy.ops("deploy", "--json")
    assert outcome.code == 0, outcome.err
    launcher = toy.record(1, "start")["launcher"]["pid"]
    assert b"DFLASH_TEST_TOKEN=s3cr3t-value" in Path(f"/proc/{launcher}/environ").read_bytes()
    found = subprocess.run(["grep", "-r", "-l", "s3cr3t", str(toy.root)], capture_output=True, text=True)
    assert found.stdout == ""
    assert "s3cr3t" not in outcome.out + outcome.err


def test_plan_touches_nothing(toy: Toy) -> None:
    before = sorted(toy.folder.rglob("*"))
    outcome = toy.ops("deploy", "--plan", "--json", "--set", "env.X=1")
    assert outcome.code == 0, outcome.err
    assert sorted(toy.folder.rglob("*")) == before
    assert outcome.json["plan"]
    assert outcome.json["files"] == 1
    for word in ("would send", "preflight", "activate", "override: env.X", "would start"):
        assert word in outcome.err
    assert not toy.session_there


def test_no_python_on_the_host(toy: Toy) -> None:
    python = os.path.realpath(sys.executable)
    text = toy.inventory.read_text().replace(f'python = "{python}"', 'python = "/no/such/python3"')
    toy.inventory.write_text(text)
    outcome = toy.ops("deploy")
    assert outcome.code == 1
    assert "/no/such/python3" in outcome.err
    assert "`python` of the host" in outcome.err
    assert not toy.root.exists()


def test_ctrl_c_while_it_starts_is_130(toy: Toy) -> None:
    code = "import sys, dflash_ops.cli.main as m, dflash_ops.deploy.run as r\n"
    code += "def stop(*a, **k): raise KeyboardInterrupt\n"
    code += "r.Deployment._preflight = stop\nm.main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "deploy", "-i", str(toy.inventory)], capture_output=True, text=True
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    toy.nothing_started()
