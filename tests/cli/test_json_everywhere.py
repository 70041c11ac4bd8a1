"""docs/schemas/all.schema.json is the one document, and every command that reads has `--json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dflash_ops.cli.main import COMMANDS, load_command, run
from dflash_ops.cli.schemas import kinds_of, whole

FOLDER = Path(__file__).resolve().parents[2] / "docs/schemas"
ALL = json.loads((FOLDER / "all.schema.json").read_text("utf-8"))
#: Commands that answer nothing that a program would read, and why.
WITHOUT = {
    "init": "writes a file",
    "attach": "a terminal",
    "demo": "its last line is a JSON object as it is",
    "exporter": "speaks Prometheus",
}


def test_every_command_that_reads_has_json() -> None:
    for name, entry in COMMANDS.items():
        made = load_command(name, entry)
        for inner in getattr(made, "commands", {"": made}).values():
            has = any("--json" in p.opts for p in inner.params)
            assert has or WITHOUT.get(name), f"{name} {inner.name}"


def test_each_kind_is_told_by_its_own_part() -> None:
    jsonschema.Draft202012Validator.check_schema(ALL)
    for path in FOLDER.glob("*.schema.json"):
        if path.name != "all.schema.json":
            part = json.loads(path.read_text("utf-8"))
            assert set(kinds_of(part)) <= set(ALL["properties"]["kind"]["enum"]), path.name
    with pytest.raises(jsonschema.ValidationError, match="'jobs' is a required property"):
        jsonschema.validate({"schema": 1, "kind": "status"}, ALL)
    with pytest.raises(jsonschema.ValidationError, match="is not one of"):
        jsonschema.validate({"schema": 1, "kind": "nonsense"}, ALL)


def test_a_part_without_its_name_or_with_another_ones_kind_is_refused(tmp_path: Path) -> None:
    part = {"$id": "a.schema.json", "properties": {"kind": {"const": "a"}}}
    (tmp_path / "a.schema.json").write_text(json.dumps(part))
    (tmp_path / "b.schema.json").write_text(json.dumps(part))
    with pytest.raises(ValueError, match="its"):
        whole(tmp_path)
    (tmp_path / "b.schema.json").write_text(json.dumps({**part, "$id": "b.schema.json"}))
    with pytest.raises(ValueError, match="the kind 'a' is also in"):
        whole(tmp_path)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["playbooks", "list"], 0),
        (["playbooks", "show", "cuda_oom"], 0),
        (["playbooks", "lint"], 0),
        (["triage", "{log}"], 0),
        (["status", "-i", "{inventory}"], 0),
        (["status", "--all", "-i", "{inventory}"], 0),
        (["supervise", "--once", "-i", "{inventory}"], None),
        (["doctor", "-i", "{inventory}"], None),
    ],
)
def test_what_is_said_fits_the_document(
    args: list[str], code: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "log").write_text("OSError: [Errno 28] No space left on device\n")
    job = f'[hosts.local]\nkind = "local"\n[jobs.a]\nhost = "local"\nroot = "{tmp_path}/r"\ncommand = ["true"]\n'
    (tmp_path / "inventory.toml").write_text(job)
    words = [word.format(log=tmp_path / "log", inventory=tmp_path / "inventory.toml") for word in args]
    ended = run([*words, "--json"])
    assert code is None or ended == code
    answers: list[dict[str, Any]] = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert answers or args[0] == "supervise"  # which says only what is news
    for answer in answers:
        jsonschema.validate(answer, ALL)
