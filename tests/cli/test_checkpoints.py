"""`dflash-ops checkpoints`, from an inventory to the folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jsonschema
import pytest

from dflash_ops.cli.checkpoints import _show
from dflash_ops.cli.main import run
from dflash_ops.deploy.zipapp import build_resident

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs/schemas/checkpoints.schema.json").read_text())


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    root = tmp_path / "job root"
    (root / "resident").mkdir(parents=True)
    (root / "run").mkdir()
    build_resident(root / "resident/current.pyz")
    for step in (5, 10):
        made = root / "checkpoints" / f"step-{step:08d}"
        made.mkdir(parents=True)
        (made / "w").write_bytes(b"abc")
        entry = {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
        (made / "manifest.json").write_text(json.dumps({"files": {"w": entry}}))
    path = tmp_path / "inventory.toml"
    path.write_text(
        'schema = 1\n[hosts.here]\nkind = "local"\n[jobs.one]\nhost = "here"\n'
        f"root = {json.dumps(str(root))}\ncommand = [\"true\"]\nprogress = '(?P<step>x)'\n"
    )
    return path


def test_list_verify_aside_restore(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ops(*args: str) -> tuple[int, str]:
        code = run(["checkpoints", *args, "-i", str(inventory)])
        return code, capsys.readouterr().out

    code, out = ops("list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step", "10", "5", "in"]
    assert "not checked" in out
    code, out = ops("verify", "--json")
    assert code == 0
    jsonschema.validate(json.loads(out), SCHEMA)
    (inventory.parent / "job root/checkpoints/step-00000010/w").write_bytes(b"ab")
    code, out = ops("verify")
    assert code == 1
    assert "NOT WHOLE: w has 2 bytes, the manifest says 3" in " ".join(out.split())
    for args in (("aside", "--newer-than", "5", "--reason", "cut"), ("restore",)):
        code, out = ops(*args, "--json")
        assert code == 0
        jsonschema.validate(json.loads(out), SCHEMA)
    assert ops("restore")[0] == 2
    assert ops("list", "nojob")[0] == 2


def test_a_name_in_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    one = {"step": 5, "bytes": 3, "t": 0.0, "path": "/c/step-5[old]", "verified": False, "fault": "w[0] is missing"}
    _show({"folder": "/c", "checkpoints": [one], "aside": []})
    out = " ".join(capsys.readouterr().out.split())
    assert "step-5[old]" in out
    assert "NOT WHOLE: w[0] is missing" in out
