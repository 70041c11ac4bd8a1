"""The nearest name where one is wrong, JSON where JSON was asked for, and the environment's word on colours."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from dflash_ops.cli.common import colours, is_plain
from dflash_ops.cli.main import run
from dflash_ops.contracts.layout import Layout
from dflash_ops.errors import UsageError
from dflash_ops.resident import logs, rollback
from trainer.cli import main as trainer_main

REPO = Path(__file__).resolve().parents[2]
ALL = json.loads((REPO / "docs/schemas/all.schema.json").read_text("utf-8"))
INVENTORY = """
[hosts.local]
kind = "local"
[jobs.main]
host = "local"
root = "{root}"
command = ["sleep", "1"]
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "inventory.toml"
    path.write_text(INVENTORY.format(root=tmp_path / "root"))
    monkeypatch.setenv("DFLASH_INVENTORY", str(path))
    return path


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["statsu"], "Did you mean 'status'?"),
        (["restart"], "Did you mean 'deploy --replace --resume'?"),
        (["evaluate"], "Did you mean 'python -m trainer evaluate'?"),
        (["checkpoints", "lsit"], "'list'"),
        (["deploy", "--repalce"], "--replace"),
        (["status", "mian"], "there is no job 'mian'; did you mean 'main'?"),
        (["adopt", "loacl", "--session", "s"], "there is no host 'loacl'; did you mean 'local'?"),
        (["playbooks", "show", "FX_dynamo_conflct"], "did you mean 'fx_dynamo_conflict'?"),
        (["deploy", "main", "--set", "limit.hung_s=3"], "did you mean 'limits.hung_s'?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(
    args: list[str], said: str, inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status"], ["incidents", "list"]])
def test_a_node_is_one_of_one_job(words: list[str], inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = f'[jobs.other]\nhost = "local"\nroot = "{inventory.parent}/other"\ncommand = ["sleep", "1"]\n'
    inventory.write_text(inventory.read_text() + other)
    assert run([*words, "--all", "--node", "0"]) == 2
    assert "--node is one of one job's nodes" in capsys.readouterr().err
    assert run([*words, "main", "--node", "1"]) == 2
    assert "one machine only" in capsys.readouterr().err


def test_workers_and_releases_too(tmp_path: Path) -> None:
    """Told where they are known: beside the job."""
    layout = Layout(tmp_path)
    (layout.attempt(1).logs).mkdir(parents=True)
    (layout.attempt(1).logs / "target0.log").touch()
    layout.release("0123456789ab").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"no worker 'traget0'; did you mean 'target0'\?"):
        logs.main(["--root", str(tmp_path), "--worker", "traget0"])
    with pytest.raises(UsageError, match=r"begin with '0123456798'; did you mean '0123456789ab'\?"):
        rollback.choose(layout, {"release": "0123456798"})


def test_the_trainers_commands_and_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    for args, said in ((["evalute"], "'evaluate'"), (["audit", "x", "--jsno"], "'--json'")):
        with pytest.raises(SystemExit) as left:
            trainer_main(args)
        assert left.value.code == 2
        assert f"did you mean {said}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "kind"),
    [
        (["status", "mian"], 2, "UsageError"),
        (["status", "--jsno"], 2, "UsageError"),
        (["status", "-i", "/nowhere/inventory.toml"], 2, "InventoryError"),
        (["checkpoints", "list"], 1, "CommandFailed"),
        (["playbooks", "show", "nothing"], 2, "UsageError"),
        (["triage", "/nowhere/train.log"], 2, "UsageError"),
    ],
)
def test_an_error_under_json_is_json_and_still_a_sentence(
    args: list[str], code: int, kind: str, inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*args, "--json"]) == code
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    jsonschema.validate(said, ALL)
    assert (said["kind"], said["exit"], said["error"]["type"]) == ("error", code, kind)
    assert said["error"]["what"].splitlines()[0] in captured.err


def test_every_fault_of_an_inventory_is_in_the_answer(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory.write_text('[hosts.h]\nkind = "lokal"\n[jobs.a]\nhost = "x"\n')
    assert run(["status", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert len(said["errors"]) > 1 and said["error"] == said["errors"][0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "terminal", "pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": ""}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"CLICOLOR_FORCE": "1"}, True, True),
        ({"CLICOLOR_FORCE": "0"}, True, False),
        ({"CLICOLOR": "0"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_who_gets_colours(environ: dict[str, str], terminal: bool, pipe: bool) -> None:
    assert colours(Terminal(), environ) is terminal
    assert colours(io.StringIO(), environ) is pipe
    assert is_plain(io.StringIO(), environ)
    assert is_plain(Terminal(), environ) is (environ.get("TERM") == "dumb")


def cli(line: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS")}
    program = f"{sys.executable} -m dflash_ops.cli.main"
    return subprocess.run(
        ["bash", "-c", line.replace("dflash-ops", program)],
        capture_output=True, timeout=60, env={**kept, "PYTHONPATH": str(REPO), **env},
    )  # fmt: skip


def test_a_table_and_an_error_are_coloured_in_a_pipe_only_if_somebody_asks(inventory: Path) -> None:
    line = "dflash-ops status main; dflash-ops status nope"
    for env, coloured in (({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)):
        done = cli(line, TERM="xterm", **env)  # type: ignore[arg-type]
        assert (b"\x1b[" in done.stdout, b"\x1b[" in done.stderr) == (coloured, coloured), (env, done)


def test_the_width_is_the_one_that_was_asked_for() -> None:
    said = cli("dflash-ops --help", COLUMNS="50").stdout.decode()
    assert max(map(len, said.splitlines())) <= 50


@pytest.mark.parametrize("line", ["dflash-ops playbooks list --json", "dflash-ops status -i {i}"])
def test_a_reader_that_leaves_hears_nothing_more(line: str, inventory: Path) -> None:
    done = cli(line.format(i=inventory) + " | true")
    assert done.stderr == b""
