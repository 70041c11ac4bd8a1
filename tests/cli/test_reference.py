"""docs/cli.md, docs/schemas/all.schema.json and the exit codes are what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_ops import errors
from dflash_ops.cli.examples import EXAMPLES
from dflash_ops.cli.main import COMMANDS, load_command, run
from dflash_ops.cli.reference import main, outputs
from trainer import errors as trainer_errors

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["docs/cli.md", "docs/schemas/all.schema.json"])
def test_what_is_made_from_the_commands_is_up_to_date(name: str) -> None:
    path = REPO / name
    assert path.read_text("utf-8") == outputs(REPO)[path], f"{name} is old: run `make docs` and commit what it writes"


def test_it_is_written_where_it_differs_and_told_where_it_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/schemas").symlink_to(REPO / "docs/schemas")
    assert main(["--check", str(tmp_path)]) == 1
    assert "docs/cli.md is not up to date: make docs" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0 and main(["--check", str(tmp_path)]) == 0
    assert (tmp_path / "docs/cli.md").read_text() == (REPO / "docs/cli.md").read_text()


def test_each_command_has_one_example_and_no_example_is_left_over() -> None:
    there = set()
    for name, entry in COMMANDS.items():
        below = getattr(load_command(name, entry), "commands", None)
        there |= {name} if below is None else {f"{name} {inner}" for inner in below}
    assert set(EXAMPLES) == there, "each command has one line in dflash_ops/cli/examples.py; then `make docs`"
    for name, line in EXAMPLES.items():
        assert line.startswith(f"dflash-ops {name}")


def test_the_documented_exit_codes_are_those_of_the_errors(capsys: pytest.CaptureFixture[str]) -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.DflashError)]
    assert {c.exit_code for c in classes} | {0, 130} == set(errors.EXIT_CODES)
    drawn = re.findall(r"── (\w+) .*?exit (\d)", errors.__doc__ or "")
    assert {name: int(code) for name, code in drawn}.items() <= {c.__name__: c.exit_code for c in classes}.items()
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    contracts = (REPO / "docs/contracts.md").read_text("utf-8")
    table = contracts[contracts.index("## Exit codes") :]
    for code, text in errors.EXIT_CODES.items():
        assert re.search(rf"^  {code} +{text[:40]}", said, re.MULTILINE)
        assert f"| {code} | {text} |" in table


def test_the_trainers_exit_codes_are_documented_too() -> None:
    contracts = (REPO / "docs/contracts.md").read_text("utf-8")
    table = contracts[contracts.index("## Exit codes") :]
    known = {c.exit_code for c in trainer_errors.BY_EXIT_CODE.values()} - {1}
    for code in {trainer_errors.FINISHED, trainer_errors.STOPPED, *known}:
        assert re.search(rf"^\| {code} \| \w", table, re.MULTILINE)
