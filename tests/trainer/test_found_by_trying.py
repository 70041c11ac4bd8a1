"""Faults that a newcomer met with the docs in hand: each is told in his own words, and costs him nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_support import Run  # type: ignore[import-not-found]

from trainer.checkpoint import MOMENTS, STATE, WEIGHTS, choose, seal, sha256
from trainer.cli import main
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import CheckpointError, ConfigError
from trainer.export import export_drafter, load_drafter
from trainer.target import load_target
from trainer.target_files import read_target


def a_drafter(target: Path, out: Path) -> DrafterConfig:
    """One layer for this target, exported to `out`."""
    from types import SimpleNamespace

    raw = SimpleNamespace(**read_target(str(target)).raw)
    config = DrafterConfig.from_target(raw, layers=1, block_size=4, mask_token_id=259, target_layer_ids=[1])
    export_drafter(Drafter(config, seed=0).state_dict(), config, out, dtype=torch.bfloat16)
    return config


def test_an_export_into_a_targets_folder_leaves_the_target(tiny_target: Path, tmp_path: Path) -> None:
    """A target has the same two file names as an export."""
    target = shutil.copytree(tiny_target, tmp_path / "target")
    before = {file.name: sha256(file) for file in target.iterdir()}
    with pytest.raises(ConfigError, match="no earlier export"):
        a_drafter(target, target)
    assert {file.name: sha256(file) for file in target.iterdir()} == before

    a_drafter(target, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="no earlier export"):
        a_drafter(target, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_size": "abc"}, "block_size is 'abc', no whole number"),
        ({"head_dim": -4}, "head_dim is -4, no whole number"),
        ({"hidden_size": True}, "hidden_size is True, no whole number"),
        ({"layer_types": 5}, "layer_types is 5, no list"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', no number"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], no object"),
        ({"rope_theta": "x"}, "rope_theta is 'x', no number"),
        ({"layer_types": ["sliding_attention"], "sliding_window": "x"}, "sliding_window is 'x'"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": "ab"}}, "target_layer_ids is 'ab', no list"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [None]}}, "target_layer_ids is None"),
    ],
)
def test_a_drafters_config_of_wrong_types_is_named_by_key(
    tiny_target: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    out = tmp_path / "out"
    a_drafter(tiny_target, out)
    described = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**described, **change}))
    with pytest.raises(ConfigError, match=says) as caught:
        load_drafter(out)
    assert caught.value.where.startswith(f"{out}/config.json: ")
    assert caught.value.next


def found_by_check(run: Run, capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    """The one fault that `check` tells."""
    command = ["check", "--config", str(run.config), *(word for o in overrides for word in ("--set", o))]
    assert main(command) == 2
    (error,) = json.loads(capsys.readouterr().out.splitlines()[-1])["errors"]
    found: dict[str, Any] = error
    return found


def test_faults_name_the_keys_of_run_toml(
    make_run: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("a", **{"drafter.taps": None})
    for overrides, key in (
        (["drafter.layer_ids=[0,99]"], "drafter.layer_ids, target "),
        (["drafter.mask_token_id=260", "drafter.taps=1"], "drafter.mask_token_id, target "),
        (["drafter.taps=9"], "drafter.taps, target "),
    ):
        error = found_by_check(run, capsys, *overrides)
        assert error["where"].startswith(key), error
        assert "target_layer_ids" not in json.dumps(error)
        assert error["next"]

    text = tmp_path / "text.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text.write_text(json.dumps({"messages": turns}) + "\n")
    error = found_by_check(run, capsys, "drafter.taps=1", f"data.path={text}", f"data.tokenizer={tmp_path / 'absent'}")
    assert (error["what"], error["where"]) == ("there is no such folder of a tokenizer", str(tmp_path / "absent"))


def test_resuming_from_the_folder_of_the_checkpoints_names_the_newest(tmp_path: Path) -> None:
    whole = tmp_path / "step-00000003"
    whole.mkdir()
    state = {"step": 3, "batches": 3, "plan": {"base": {}}, "data": {"sha256": ""}, "drafter": {}}
    (whole / STATE).write_text(json.dumps(state))
    for name in (WEIGHTS, MOMENTS):
        (whole / name).write_bytes(b"x")
    seal(whole, {name: {"bytes": 1, "sha256": sha256(whole / name)} for name in (WEIGHTS, MOMENTS)})
    with pytest.raises(CheckpointError, match="this folder is no checkpoint") as caught:
        choose(tmp_path, str(tmp_path))
    assert caught.value.next == f"the newest other one that is whole: --resume {whole}"


def test_smoke_into_a_place_that_cannot_be_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["smoke", "--out", str(out)]) == 2
        assert str(out) in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_prompts_that_only_the_target_knows_to_be_bad_are_all_named_or_left_out(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [[1, 2, 3], [1] * 600, [5, 6], [999]]
    prompts.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    command = ["regenerate", "--target", str(tiny_target), "--prompts", str(prompts), "--out", str(out)]
    command += ["--max-new", "2", "--threads", "1"]
    assert main(command) == 6
    told = capsys.readouterr().err
    assert f"{prompts}:2: the prompt has 600 tokens" in told
    assert f"{prompts}:4: token id 999" in told
    assert out.read_bytes() == b""

    for _ in range(2):  # the second call finds it finished
        assert main([*command, "--skip-bad", "--json"]) == 0
        said = capsys.readouterr()
        assert f"left out: {prompts}:2: the prompt has 600 tokens" in said.err
        record = json.loads(said.out.splitlines()[-1])
        assert (record["responses"], record["skipped"]) == (2, 2)
        assert [len(json.loads(line)["input_ids"]) for line in out.read_text().splitlines()] == [4, 5]


@pytest.mark.parametrize(("device", "says"), [("foo", "'foo' is no device"), ("cuda:99", "cuda:99 is asked for")])
def test_a_device_that_is_not_there_is_told(tiny_target: Path, device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_target(tiny_target, dtype=torch.float32, device=device)
