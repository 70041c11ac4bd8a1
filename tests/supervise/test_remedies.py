"""From an action to what a trainer is told: the bundled one, a foreign one, and what is not available."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from supervise_support import TABLE

from dflash_ops.contracts import RULES, Action, JobSpec, Layer, Overlay, RemedyTable, Way, from_dict
from dflash_ops.supervise.remedies import Change, NotAvailable, apply, concrete, env_of, layer_of, without_device

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = from_dict(RemedyTable, json.loads((ROOT / "trainer/remedies.json").read_text()))


def change(action: Action, table: RemedyTable = TABLE, overlay: Overlay | None = None, **params: Any) -> Change:
    got = concrete(action, table, overlay or Overlay(), params)
    assert isinstance(got, Change), got
    return got


def refused(action: Action, table: RemedyTable = TABLE, overlay: Overlay | None = None, **params: Any) -> str:
    got = concrete(action, table, overlay or Overlay(), params)
    assert isinstance(got, NotAvailable), got
    return got.reason


def test_every_action_has_a_rule_and_the_bundled_trainer_an_answer() -> None:
    assert set(RULES) == set(Action)
    for action, rule in RULES.items():
        if rule.table:
            assert action.value in BUNDLED.ways or BUNDLED.reasons.get(action.value), action
    assert set(BUNDLED.ways) | set(BUNDLED.reasons) <= {a.value for a in Action}


def test_the_bundled_trainers_keys_are_keys_of_run_toml() -> None:
    page = (ROOT / "docs/run-config.md").read_text()
    for key in {k for way in BUNDLED.ways.values() for k in (*way.set, *way.scale)} | set(BUNDLED.values):
        table, name = key.split(".")
        section = page.split(f"\n## [{table}]\n", 1)[1].split("\n## ", 1)[0]
        assert f"| `{name}` |" in section, key


def test_what_is_in_force_already_is_not_available() -> None:
    assert change(Action.LOSS_REENTRANT).set == {"loss.mode": "checkpoint", "loss.reentrant": True}
    assert "in force already" in refused(Action.LOSS_NONREENTRANT)
    overlay = Overlay((Layer("1", "loss_reentrant", set={"loss.reentrant": True}),))
    assert "in force already" in refused(Action.LOSS_REENTRANT, overlay=overlay)
    assert change(Action.LOSS_NONREENTRANT, overlay=overlay).set["loss.reentrant"] is False
    assert "in force already" in refused(Action.LOSS_FUSED, BUNDLED)


def test_a_scaled_value_goes_on_from_the_overlay_and_has_an_end() -> None:
    assert change(Action.SMALLER_ANCHORS).set == {"loss.chunk": 1024}
    overlay = Overlay((Layer("1", "smaller_anchors", set={"loss.chunk": 1024}),))
    assert change(Action.SMALLER_ANCHORS, overlay=overlay).set == {"loss.chunk": 512}
    least = Overlay((Layer("1", "smaller_anchors", set={"loss.chunk": 1}),))
    assert "cannot be less" in refused(Action.SMALLER_ANCHORS, overlay=least)
    assert "not known" in refused(Action.SMALLER_ANCHORS, RemedyTable({"smaller_anchors": Way(scale={"a": 0.5})}))


@pytest.mark.parametrize(
    ("device", "target", "drafter"),
    [
        ("cuda:1", ["cuda:0"], ["cuda:2"]),
        ("cuda:2", ["cuda:0"], ["cuda:1"]),  # the last drafter is lost: a target gives its device
    ],
)
def test_a_device_is_left_out_and_the_others_divided(device: str, target: list[str], drafter: list[str]) -> None:
    got = change(Action.EXCLUDE_DEVICE, device=device).set
    assert got == {"workers.target_devices": target, "workers.drafter_devices": drafter}


def test_no_device_to_leave_out() -> None:
    assert "not known" in refused(Action.EXCLUDE_DEVICE)
    assert "cuda:9 is none of the job" in refused(Action.EXCLUDE_DEVICE, device="cuda:9")
    two = {"workers.target_devices": ["cuda:0"], "workers.drafter_devices": ["cuda:1"]}
    got = without_device("cuda:0", two)
    assert isinstance(got, NotAvailable)
    assert "no device would be left" in got.reason
    assert isinstance(without_device("cpu", {k: ["cpu"] for k in two}), NotAvailable)
    assert isinstance(without_device("cuda:0", {}), NotAvailable)


@pytest.mark.parametrize(
    ("command", "env"),
    [
        ("NCCL_P2P_DISABLE=1", {"NCCL_P2P_DISABLE": "1"}),
        ("A=1 B=x:y", {"A": "1", "B": "x:y"}),
        ("num_workers = {n}", {}),
        ("X={n}", {}),
        ("A=1; rm -rf /", {}),
        ("A=$(id)", {}),
        ("", {}),
    ],
)
def test_assignments_of_a_playbooks_command(command: str, env: dict[str, str]) -> None:
    assert env_of(command) == env


def test_only_variables_of_allocator_and_collectives_may_be_changed() -> None:
    assert change(Action.ENV_CHANGE, env={"NCCL_P2P_DISABLE": "1"}).env == {"NCCL_P2P_DISABLE": "1"}
    assert "none of the variables" in refused(Action.ENV_CHANGE, env={"LD_PRELOAD": "x.so"})
    assert "remedies table" in refused(Action.ENV_CHANGE, env={})


@pytest.mark.parametrize("bad", ["--trust_remote_code", "weights_only=False", "sudo reboot", "chmod 777 x"])
def test_a_forbidden_thing_does_not_get_through_a_remedies_table(bad: str) -> None:
    table = RemedyTable({"loss_fused": Way(args=(bad,))})
    assert "never done by itself" in refused(Action.LOSS_FUSED, table)
    table = RemedyTable({"loss_fused": Way(set={"x": bad})})
    assert "never done by itself" in refused(Action.LOSS_FUSED, table)


def test_what_a_trainer_cannot_do_says_why() -> None:
    assert "process of its own already" in refused(Action.WORKERS_PROCESSES, BUNDLED)
    assert "does not say how" in refused(Action.WORKERS_PROCESSES, RemedyTable())
    assert change(Action.FRESH_COMPILE_CACHE, RemedyTable()).env["TORCHINDUCTOR_CACHE_DIR"] == "{attempt}/inductor"
    assert "hard limit" in refused(Action.RAISE_NOFILE)
    assert change(Action.RAISE_NOFILE, nofile=4096).nofile == 4096
    assert concrete(Action.RESTART, TABLE, Overlay()) == Change()


SPEC = JobSpec("main", "/r", "s", ("python3", "-m", "trainer", "--resume", "auto"), "/r/c", env={"A": "1"})


def layers() -> Overlay:
    one = layer_of(
        Change({"loss.reentrant": True, "x.y": [1]}, {"MASTER_PORT": "{free_port}"}, ("--p", "{free_port}")),
        id="1", action="a", kind="k", fingerprint="f", t=0.0, reason="r",
    )  # fmt: skip
    assert one is not None
    return Overlay((one,))


def test_an_overlay_on_a_job() -> None:
    job = apply(SPEC, layers(), port=7)
    assert job.argv[5:] == ("--set", "loss.reentrant=true", "--set", "x.y=[1]", "--p", "7")
    assert job.env == {"A": "1", "MASTER_PORT": "7"}
    assert job.overrides == {"overlay.loss.reentrant": "true", "overlay.x.y": "[1]"}
    assert apply(SPEC, Overlay()) == SPEC


def test_a_foreign_trainer_is_told_to_go_on_except_where_it_begins_anew() -> None:
    from dataclasses import replace

    foreign = replace(SPEC, argv=("./t",), remedies=RemedyTable({"restart": Way(args=("--resume",), env={"R": "1"})}))
    assert apply(foreign, Overlay()).argv == ("./t", "--resume")
    assert apply(foreign, Overlay()).env == {"A": "1", "R": "1"}
    assert apply(foreign, Overlay(), fresh=True) == foreign
    assert apply(apply(foreign, Overlay()), Overlay()).argv == ("./t", "--resume"), "told once"


def test_layers_are_taken_back_one_by_one() -> None:
    one, two = Layer("1", "a", set={"k": 1}, nofile=10), Layer("2", "b", set={"k": 2}, args=("--x",))
    both = Overlay().with_layer(one).with_layer(two).with_layer(two)
    assert (both.set, both.args, both.nofile) == ({"k": 2}, ("--x",), 10)
    assert both.without(("2",)) == Overlay((one,))
    assert both.with_layer(None) == both
    assert layer_of(Change(), id="1", action="a", kind="", fingerprint="", t=0, reason="") is None
