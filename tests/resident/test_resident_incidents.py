"""`incidents` over the journal of a real crash that the supervisor ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from resident_lab import Lab, wait_for  # type: ignore[import-not-found]

from dflash_ops.cli.main import run
from dflash_ops.contracts import Budgets, Policy

ROOT = Path(__file__).resolve().parents[2]


def test_a_killed_trainer_and_an_unknown_error(one: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("at25-kill", "at40-raise:boom"):
        (one.control / what).touch()
    policy = Policy(mode="act", budgets=Budgets(backoff_s=0.2, backoff_cap_s=1.0))
    env = {"CONTROL": str(one.control), "SAVE": str(one.root / "checkpoints")}
    one.start(argv=(sys.executable, "-u", str(Path(__file__).parent / "saving.py")), env=env, policy=policy)
    wait_for(lambda: one.events("held"), "a person is told", 60)
    (one.root / "resident").mkdir(exist_ok=True)
    if not (one.root / "resident/current.pyz").exists():
        (one.root / "resident/current.pyz").symlink_to(one.pyz)
    inventory = tmp_path / "inventory.toml"
    inventory.write_text(
        f'schema = 1\n[hosts.here]\nkind = "local"\npython = {json.dumps(sys.executable)}\n[jobs.tiny]\nhost = "here"\n'
        f"root = {json.dumps(str(one.root))}\ncommand = [\"true\"]\nprogress = '(?P<step>x)'\n"
    )

    def ops(*args: str) -> tuple[int, str]:
        code = run(["incidents", *args, "-i", str(inventory)])
        return code, capsys.readouterr().out

    code, out = ops("list", "--json")
    assert code == 0
    said = json.loads(out)
    jsonschema.validate(said, json.loads((ROOT / "docs/schemas/incidents.schema.json").read_text()))
    killed, unknown = said["jobs"][0]["incidents"]
    assert (killed["kind"], killed["state"], killed["attempts"]) == ("host_oom_sigkill", "repaired", [1])
    assert (killed["step"], killed["resumed"], killed["lost_steps"]) == (25, 20, 5)
    assert killed["proof"]["step"] > 25
    assert (unknown["state"], unknown["step"], unknown["lost_steps"]) == ("held", 40, None)
    code, out = ops("list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["no", "1", "2"]
    code, out = ops("show", "1", "tiny")
    assert code == 0
    assert "start attempt 2: " in out
    assert "restart: it helped" in out
    assert "5 steps done again, from step 20 on" in out
    assert ops("show", "3")[0] == 2
    assert ops("list", "nojob")[0] == 2
