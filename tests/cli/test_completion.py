"""TAB in a real shell: commands, options, and names of what the inventory and this machine have; never a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
INVENTORY = """
[hosts.local]
kind = "local"
[hosts.gpu]
kind = "ssh"
address = "192.0.2.6"
[jobs.near]
host = "local"
root = "{root}"
[jobs.near.trainer]
target_devices = ["cpu"]
drafter_devices = ["cpu", "cpu"]
target.path = "/t"
data.path = "/d"
[jobs.far]
host = "gpu"
root = "/srv/far"
command = ["sleep", "1"]
"""


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A folder with an inventory, a job's files, and `bin/dflash-ops`; any way to a network ends in an error."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/dflash-ops"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dflash_ops.cli.main "$@"\n')
    program.chmod(0o755)
    root = tmp_path / "near"
    for name in ("releases/0123456789ab", "releases/.coming", "run/attempts/3/logs", "run/attempts/12"):
        (root / name).mkdir(parents=True)
    (root / "run/attempts/3/logs/target0.log").touch()
    (tmp_path / "inventory.toml").write_text(INVENTORY.format(root=root))
    return tmp_path


def environment(shell: Path) -> dict[str, str]:
    path = f"{shell / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPO), "HOME": str(shell), "XDG_CACHE_HOME": str(shell)}


def tab(shell: Path, *lines: str) -> list[list[str]]:
    """What bash offers for the last word of each line, by the script that the program itself prints."""
    script = (
        "source <(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 dflash-ops --show-completion bash)\n"
        'for line; do COMP_WORDS=(${line% *} "${line##* }"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))\n'
        "_dflash_ops_completion dflash-ops; echo ${COMPREPLY[@]}; done\n"
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", *lines],
        capture_output=True, text=True, timeout=120, cwd=shell, env=environment(shell),
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_offers_what_can_stand_there(shell: Path) -> None:
    wanted = {
        "dflash-ops st": ["status", "stop"],
        "dflash-ops checkpoints ver": ["verify"],
        "dflash-ops status --wa": ["--watch"],
        "dflash-ops status ": ["near", "far"],
        "dflash-ops stop near ": ["far"],
        "dflash-ops adopt g": ["gpu"],
        "dflash-ops logs near --worker ": ["target0", "drafter0", "drafter1"],
        "dflash-ops logs near --attempt 3 --worker ": ["target0"],
        "dflash-ops logs near --attempt ": ["12", "3"],
        "dflash-ops logs far --attempt ": [],
        "dflash-ops rollback ": ["0123456789ab", "near", "far"],
        "dflash-ops playbooks show fx_dynamo_c": ["fx_dynamo_conflict"],
        "dflash-ops status -i nowhere.toml ": [],
    }
    assert dict(zip(wanted, tab(shell, *wanted), strict=True)) == wanted


def test_a_broken_inventory_offers_nothing_and_says_nothing(shell: Path) -> None:
    (shell / "inventory.toml").write_text("[hosts.")
    assert tab(shell, "dflash-ops status ") == [[]]


def test_it_is_installed_where_bash_finds_it(shell: Path) -> None:
    done = subprocess.run(
        ["bash", "-ec", "dflash-ops --install-completion bash; source ~/.bashrc; complete -p dflash-ops"],
        capture_output=True, text=True, timeout=60, cwd=shell,
        env={**environment(shell), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )  # fmt: skip
    assert "_dflash_ops_completion dflash-ops" in done.stdout, done.stderr


@pytest.mark.parametrize(("name", "check"), [("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"])])
def test_scripts_of_other_shells(shell: Path, name: str, check: list[str]) -> None:
    env = {**environment(shell), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        ["dflash-ops", "--show-completion", name], capture_output=True, text=True, timeout=60, cwd=shell, env=env
    )
    assert f"_DFLASH_OPS_COMPLETE=complete_{name}" in done.stdout
    if shutil.which(name) is not None:
        (shell / "script").write_text(done.stdout)
        subprocess.run([*check, str(shell / "script")], check=True, timeout=60)
    args = {"_TYPER_COMPLETE_ARGS": "dflash-ops status ne", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    env = {**env, **args, "_DFLASH_OPS_COMPLETE": f"complete_{name}"}
    offered = subprocess.run(["dflash-ops"], capture_output=True, text=True, timeout=60, cwd=shell, env=env)
    assert "near" in offered.stdout and "on local" in offered.stdout and "far" not in offered.stdout
