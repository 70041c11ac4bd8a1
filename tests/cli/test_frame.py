"""The frame around the commands: fast, lazy, and every error a sentence with a next step."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ops import __version__
from dflash_ops.cli import main as frame
from dflash_ops.cli.common import render_error
from dflash_ops.errors import DflashError, InventoryError
from dflash_ops.inventory import InventoryErrors

REPO = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "dflash_ops.cli.main"]


def cli(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPO), **options.pop("env", {})}
    return subprocess.run([*CLI, *args], capture_output=True, text=True, timeout=60, env=env, **options)


Body = Callable[[], int | None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Body], None]:
    """Puts a command `probe` into the table whose body is the one given."""

    def put(body: Body) -> None:
        module = types.ModuleType("dflash_ops.cli.probe")
        module.command = body  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "dflash_ops.cli.probe", module)
        monkeypatch.setitem(frame.COMMANDS, "probe", frame.Entry("probe", "A probe."))

    return put


def test_help_lists_every_command_with_its_line() -> None:
    done = cli("--help")
    assert done.returncode == 0
    for name, entry in frame.COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert entry.help.split(",")[0].split(":")[0] in " ".join(done.stdout.split())
    assert cli("-h").stdout == done.stdout


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dflash_ops.cli.main import run\nrun(['--help'])\n"
        "heavy = {'rich', 'paramiko', 'libtmux', 'torch', 'transformers', 'tomllib', 'asyncio'}\n"
        "heavy |= {'dflash_ops.inventory'}\n"
        "frame = {'dflash_ops.cli.main', 'dflash_ops.cli.common', 'dflash_ops.cli.complete', 'dflash_ops.cli.early'}\n"
        "own = {m for m in sys.modules if m.startswith('dflash_ops.cli.')} - frame\n"
        "print('LOADED', sorted((heavy & set(sys.modules)) | own))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout + done.stderr


def test_status_with_json_draws_nothing_and_imports_nothing_to_draw_or_to_travel_with(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(f'[hosts.h]\nkind = "local"\n[jobs.a]\nhost = "h"\nroot = "{tmp_path}/r"\ncommand = ["true"]\n')
    code = (
        f"import sys\nfrom dflash_ops.cli.main import run\nrun(['status', '--json', '-i', {str(path)!r}])\n"
        "heavy = {'rich', 'paramiko', 'libtmux', 'torch', 'transformers', 'asyncio'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.rstrip().endswith("LOADED []"), done.stdout + done.stderr


def test_every_command_of_the_table_that_exists_shows_its_help() -> None:
    for entry in frame.COMMANDS.values():
        if (REPO / "dflash_ops" / "cli" / f"{entry.module}.py").exists():
            assert frame.load_command(entry.module, entry).get_short_help_str(500).rstrip(".")


def test_version() -> None:
    assert cli("--version").stdout == f"dflash-ops {__version__}\n"


def test_no_command_shows_help() -> None:
    done = cli()
    assert done.returncode == 2
    assert "Commands:" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["stauts"], "Did you mean 'status'?"),
        (["xyzzy"], "There are: init, doctor"),
        (["--nope"], "No such option"),
        (["doctor", "--nope"], "No such option"),
        (["logs", "a", "b"], "unexpected extra argument"),
        (["init", "--host"], "requires an argument"),
    ],
)
def test_arguments_that_cannot_be_meant(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(args) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("value", "rc"), [(None, 0), (0, 0), (3, 3), (True, 0)])
def test_a_command_gives_its_exit_code(value: int | None, rc: int, command: Callable[[Body], None]) -> None:
    command(lambda: value)
    assert frame.run(["probe"]) == rc


def test_an_error_is_told_with_where_and_next(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        error = DflashError("it did not work", "host gpu", "try this")
        error.exit_code = 4
        raise error

    command(body)
    assert frame.run(["probe"]) == 4
    assert capsys.readouterr().err == "error: it did not work\n  where: host gpu\n  next:  try this\n"


def test_debug_shows_the_traceback_wherever_it_stands(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        raise DflashError("it did not work")

    command(body)
    for args in (["--debug", "probe"], ["probe", "--debug"]):
        assert frame.run(args) == 1
        assert "Traceback" in capsys.readouterr().err
    assert frame.run(["probe"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("DFLASH_DEBUG", "1")
    assert frame.run(["probe"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_what_nobody_expected_is_a_sentence_and_the_way_to_the_traceback(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise ZeroDivisionError("division by zero")

    command(body)
    assert frame.run(["probe"]) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in said
    assert "--debug" in said
    assert "Traceback" not in said
    assert frame.run(["probe", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_every_fault_of_an_inventory_is_told(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text('[hosts.h]\nkind = "lokal"\n[jobs.a]\nhost = "x"\n')
    done = cli("deploy" if (REPO / "dflash_ops/cli/deploy.py").exists() else "doctor", "-i", str(path))
    text = done.stdout + done.stderr
    assert f"{path}:2" in text
    assert f"{path}:4" in text


def test_colours_on_a_terminal_only_and_not_with_no_color(tmp_path: Path) -> None:
    code = (
        "import sys; from dflash_ops.cli.common import render_error; from dflash_ops.errors import DflashError;"
        "render_error(DflashError('what', 'where', 'next'), sys.stderr)"
    )

    def said(**env: str) -> bytes:
        outer, inner = pty.openpty()
        keep = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}
        subprocess.run(
            [sys.executable, "-c", code],
            stderr=inner,
            timeout=60,
            env={**keep, "PYTHONPATH": str(REPO), "TERM": "xterm", **env},
        )
        os.close(inner)
        text = os.read(outer, 4096)
        os.close(outer)
        return text

    assert b"\x1b[1;31merror:\x1b[0m what" in said()
    assert b"\x1b" not in said(NO_COLOR="1")
    assert b"\x1b" not in said(TERM="dumb")


def test_a_foreign_text_does_not_reach_the_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    render_error(DflashError("bad \x1b[2J\x07 text\nsecond line ü"), sys.stderr)
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "second line ü" in said


def test_several_errors_end_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    one = InventoryError("first", file="f", key="a", line=1, fix="x")
    render_error(InventoryErrors([one, InventoryError("second", file="f", line=2)]), sys.stderr)
    said = capsys.readouterr().err
    assert said.index("first") < said.index("second")
    assert "f:1, key a" in said
    assert said.endswith("2 faults\n")


def test_ctrl_c_is_130_and_no_traceback() -> None:
    code = (
        "import sys, time, types\nfrom dflash_ops.cli import main as frame\n"
        "def command():\n    print('ready', flush=True)\n    time.sleep(100)\n"
        "m = types.ModuleType('dflash_ops.cli.probe'); m.command = command; sys.modules[m.__name__] = m\n"
        "frame.COMMANDS['probe'] = frame.Entry('probe', 'x')\nframe.main(['probe'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)  # into the sleep itself
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "interrupted"


def test_ctrl_c_while_the_program_is_loaded_is_no_traceback_either() -> None:
    code = """
import os, signal, sys
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressed())
import dflash_ops.cli.main
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print("loaded")
"""
    for module, rc, said in (("typer", 130, ""), ("dflash_ops.errors", 130, ""), ("none", 0, "loaded\n")):
        done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (rc, said), done.stderr
        assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    """`dflash-ops ... | head`: no traceback when the other end of the pipe is gone."""
    done = subprocess.run(
        f"{sys.executable} -m dflash_ops.cli.main --help | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["--help", "--version"])
def test_output_that_cannot_be_written_is_told_and_is_no_fault_of_the_tool(command: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m dflash_ops.cli.main {command} > /dev/full",
        shell=True, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and "fault of dflash-ops" not in done.stderr
    assert done.stderr.count("error:") == 1 and "Exception ignored" not in done.stderr


def test_a_closed_output_does_not_end_a_command() -> None:
    done = subprocess.run(
        f"{sys.executable} -m dflash_ops.cli.main --version >&- 2>&-",
        shell=True, timeout=60, env={**os.environ, "PYTHONPATH": str(REPO)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0
