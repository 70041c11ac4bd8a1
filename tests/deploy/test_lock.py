"""Lock files: pinned or refused, with the line; and the environment that is told while it is made."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflash_ops.deploy import boot
from dflash_ops.deploy.lock import read_lock
from dflash_ops.deploy.transfer import build_pack
from dflash_ops.errors import CommandFailed, DeployError, InventoryError, PreflightError
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.hosts.local import LocalHost
from dflash_ops.inventory import Job, Venv
from dflash_ops.resident import venv

PYTHON = os.path.realpath(sys.executable)

GOOD = """\
# by pip-compile
--index-url https://packages.invalid/simple
torch==2.13.0+cpu \\
    --hash=sha256:aaaa \\
    --hash=sha256:bbbb
numpy==2.1.0 ; python_version >= "3.10"   # via torch
some_pkg[extra]==1.0
local @ file:///srv/wheels/local-1.0-py3-none-any.whl
"""


def job(tmp_path: Path, text: str) -> Job:
    (tmp_path / "lock").write_text(text)
    return Job("j", "h", "/r", "s", "/r/c", venv=Venv(str(tmp_path / "lock")), inventory="/i.toml")


def test_what_pip_itself_writes_is_taken(tmp_path: Path) -> None:
    assert read_lock(job(tmp_path, GOOD)) == GOOD
    assert read_lock(Job("j", "h", "/r", "s", "/r/c")) is None


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a==1\nb>=2\n", 2, "not pinned: b>=2"),
        ("a\n", 1, "not pinned"),
        ("a==1\n\n# x\n-r other.txt\n", 4, "-r other.txt"),
        ("a==1\n-e .\n", 2, "-e ."),
        ("a==1\n./local\n", 2, "not pinned"),
        ("a==1.*,<2\n", 1, "not pinned"),
        ("# nothing\n", None, "names no package"),
    ],
)
def test_what_would_be_another_environment_tomorrow(tmp_path: Path, text: str, line: int | None, word: str) -> None:
    with pytest.raises(InventoryError) as caught:
        read_lock(job(tmp_path, text))
    assert word in caught.value.what
    assert caught.value.line == line


def test_the_id_is_that_of_lock_and_python() -> None:
    one, facts = venv.identify(PYTHON, GOOD)
    assert one == venv.identify(PYTHON, GOOD)[0]
    assert one != venv.identify(PYTHON, GOOD + "\n")[0]
    assert tuple(facts["version"]) == sys.version_info[:3]
    with pytest.raises(PreflightError, match="there is no /no/such"):
        venv.identify("/no/such/python", GOOD)


def test_a_lock_that_cannot_be_installed_leaves_nothing(tmp_path: Path) -> None:
    """And what is being done is told, an object a line."""
    request = {"root": str(tmp_path), "python": PYTHON, "lock": "--no-index\nnosuchthing==1.0\n"}
    said: list[dict[str, object]] = []
    with pytest.raises(DeployError, match=r"nosuchthing==1\.0"):
        for line in boot.follow(
            LocalHost(), PYTHON, build_pack().content, "dflash_ops.resident.venv", request, idle=120
        ):
            said.append(line)  # noqa: PERF402
    assert any("progress" in line for line in said)
    assert [p.name for p in (tmp_path / "venvs").iterdir() if not p.name.startswith(".lock")] == []


def test_the_answer_of_a_stream_is_its_last_line() -> None:
    host = FakeHost("h")
    host.answer("python3", ..., stdout='{"schema":1,"progress":"a"}\n{"schema":1,"id":"x"}\n')
    assert [*boot.follow(host, "python3", b"", "m", {}, idle=1)] == [
        {"schema": 1, "progress": "a"},
        {"schema": 1, "id": "x"},
    ]
    host.answer("python3", ..., stdout='{"schema":1,"error":{"type":"DeployError","what":"no"}}\n', rc=1)
    with pytest.raises(DeployError, match="no"):
        [*boot.follow(host, "python3", b"", "m", {}, idle=1)]
    host.answer("python3", ..., rc=127)
    with pytest.raises(CommandFailed, match="there is no python3"):
        [*boot.follow(host, "python3", b"", "m", {}, idle=1)]
