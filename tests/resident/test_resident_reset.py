"""`incidents reset`: what the supervisor had given up is tried again once a person has looked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from resident_lab import Lab, wait_for  # type: ignore[import-not-found]

from dflash_ops.cli.main import run
from dflash_ops.contracts import Budgets, Policy
from dflash_ops.resident import lease, reset
from dflash_ops.tell.incidents import incidents

ROOT = Path(__file__).parents[2]
SAVING = Path(__file__).parent / "saving.py"
ACT = Policy(mode="act", budgets=Budgets(backoff_s=0.2, backoff_cap_s=1.0))


def inventory(one: Lab, folder: Path) -> str:
    (one.root / "resident").mkdir()
    (one.root / "resident/current.pyz").symlink_to(one.pyz)
    path = folder / "inventory.toml"
    path.write_text(
        f'schema = 1\n[hosts.here]\nkind = "local"\npython = {json.dumps(sys.executable)}\n[jobs.tiny]\nhost = "here"\n'
        f"root = {json.dumps(str(one.root))}\ncommand = [\"true\"]\nprogress = '(?P<step>x)'\n"
    )
    return str(path)


def test_what_was_given_up_is_tried_again_after_a_person_has_looked(
    one: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = inventory(one, tmp_path)
    ops: Any = lambda *args: run(["incidents", "reset", *args, "-i", file])  # noqa: E731
    assert ops("--reason", "why") == 2  # nothing was ever started
    for name in ("always-raise:boom",):
        (one.control / name).write_text("12")
    env = {"CONTROL": str(one.control), "SAVE": str(one.root / "checkpoints")}
    policy = Policy("act", ("unrecognised_error:restart",), ACT.budgets, ladders={"unrecognised_error": ("restart",)})
    one.start(argv=(sys.executable, "-u", str(SAVING)), env=env, policy=policy)
    wait_for(lambda: one.events("held"), "it is left to a person", 60)
    before = len(one.events("attempt_started"))
    assert before == 3
    assert incidents(one.events())[-1].state.value == "held"

    assert ops() == 2
    assert "--reason TEXT" in capsys.readouterr().err
    (one.control / "always-raise:boom").unlink()  # the person mended it
    assert ops("--reason", "mended the data", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    jsonschema.validate(said, json.loads((ROOT / "docs/schemas/incidents_reset.schema.json").read_text()))
    assert said["cleared"] == {"failures": 1, "actions": 2, "told": 1}
    wait_for(lambda: [e for e in one.events("action_outcome") if e.data["outcome"] == "verified"], "it goes on", 60)
    assert len(one.events("attempt_started")) == before + 1
    (event,) = one.events("supervise_reset")
    assert event.actor.startswith("operator ")
    assert event.data["reason"] == "mended the data"
    found = incidents(one.events())[-1]
    assert found.state.value == "repaired"
    assert any("all counts were cleared: mended the data" in line.text for line in found.lines)


def test_while_the_supervisor_acts_nothing_is_cleared(one: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    one.start(argv=("true",))
    held = lease.take(one.layout, "another")
    assert held is not None
    monkeypatch.setattr(reset, "PATIENCE_S", 0.2)
    with pytest.raises(reset.JobBusy, match="acts on this job"):
        reset.reset(one.layout, "why", "operator ada")
    assert not one.events("supervise_reset")
    held.release()
    refused = one.run("reset", "--reason", "why", "--actor", "supervisor")
    assert (refused.rc, refused.error["type"]) == (2, "UsageError")
