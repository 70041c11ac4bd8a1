"""Exports as servers read them, and runs that go on from a drafter's folder that somebody else wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_parts import call
from pipeline_support import Run  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file

from trainer.checkpoint import WEIGHTS, list_checkpoints
from trainer.config import load_config
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import ConfigError
from trainer.export import export_drafter, load_drafter
from trainer.prepare import prepare

#: A published drafter of the tiny target: the older RoPE spelling, another base, other widths than the target has.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 1024, "rope_theta": 50000.0, "rope_scaling": None,
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 16,
    "num_target_layers": 4, "block_size": 4, "torch_dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 259, "target_layer_ids": [1, 2], "causal": False}, "is_causal": False,
}  # fmt: skip
FITTING = {
    "drafter.layers": 2, "drafter.block_size": 4, "drafter.taps": None, "drafter.layer_ids": [1, 2],
    "drafter.sliding_window": 16, "train.epochs": None, "train.steps": 1,
}  # fmt: skip


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    state = Drafter(DrafterConfig.from_hf(PUBLISHED), seed=7).state_dict()
    save_file({k: v.bfloat16() for k, v in state.items()}, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def target_config() -> Any:
    """A vision-language target of 64 layers with the RoPE fields that must not reach the drafter."""
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 80, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    return type("Config", (), {"text_config": type("Text", (), text)()})()


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({"sliding_window": 2048}, True),
        ({"sliding_window": 2048, "causal": False}, False),
        ({"sliding_window": 2048, "full_layers": 0}, True),
        ({}, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_export_of_five_layers_has_every_field_that_servers_read(
    options: dict[str, Any], causal: bool | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = DrafterConfig.from_target(target_config(), layers=5, block_size=16, mask_token_id=79, **options)
    folder = export_drafter(Drafter(made).state_dict(), made, tmp_path / "out", dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    full = options.get("full_layers", 1 if options else 5)
    expected = {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 80, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "attention_bias": False, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "block_size": 16, "num_target_layers": 64,
        "layer_types": ["sliding_attention"] * (5 - full) + ["full_attention"] * full,
        "sliding_window": 2048 if options else None, "use_sliding_window": bool(options), "max_window_layers": 5,
        "rope_theta": 1e7, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "dtype": str(dtype)[6:], "torch_dtype": str(dtype)[6:],
    }  # fmt: skip
    assert {k: config.get(k) for k in expected} == expected
    dflash = {"mask_token_id": 79, "target_layer_ids": [1, 16, 31, 46, 61]}
    assert config["dflash_config"] == (dflash if causal is None else {**dflash, "causal": causal})
    assert config.get("is_causal") is causal
    assert not {"partial_rotary_factor", "mrope_section", "mrope_interleaved", "text_config"} & config.keys()
    state = load_file(str(folder / "model.safetensors"))
    assert len(state) == 58 and {t.dtype for t in state.values()} == {dtype}
    assert not [name for name in state if "embed" in name or "lm_head" in name or name.startswith("model.")]
    assert state["fc.weight"].shape == (32, 5 * 32)
    assert DrafterConfig.from_hf(config) == made


def test_causality_that_layers_differ_in_can_be_left_to_the_servers(tmp_path: Path) -> None:
    for options, said in (({}, None), ({"causal": False}, False), ({"full_layers": 0}, True)):
        made = DrafterConfig.from_target(
            target_config(), layers=2, block_size=4, mask_token_id=79, sliding_window=8, **options
        )
        folder = export_drafter(Drafter(made).state_dict(), made, tmp_path / str(said), by_layer=True)
        config = json.loads((folder / "config.json").read_text())
        assert (config.get("is_causal"), config["dflash_config"].get("causal")) == (said, said)
        assert load_drafter(folder)[0] == made


def test_import_prints_the_table_that_goes_on_from_it(published: Path, tiny_target: Path, tmp_path: Path) -> None:
    import tomllib

    done = call("import", published, "--target", tiny_target, "--json")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    table = tomllib.loads("\n".join(lines))["drafter"]
    assert table == {
        "init_from": str(published), "layers": 2, "block_size": 4, "layer_ids": [1, 2], "mask_token_id": 259,
        "sliding_window": 16, "full_layers": 1,
    }  # fmt: skip
    assert json.loads(last)["drafter"] == table
    assert "# sliding layers look both ways" in done.stdout and "RoPE base is 50000, the target's 10000" in done.stdout
    sharded = shutil.copytree(published, tmp_path / "sharded")
    state = load_file(str(sharded / "model.safetensors"))
    (sharded / "model.safetensors").unlink()
    parts = {"one.safetensors": sorted(state)[:5], "two.safetensors": sorted(state)[5:]}
    for name, keys in parts.items():
        save_file({k: state[k] for k in keys}, str(sharded / name))
    index = {"weight_map": {k: name for name, keys in parts.items() for k in keys}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert call("import", sharded).returncode == 0
    (sharded / "two.safetensors").unlink()
    gone = call("import", sharded)
    assert gone.returncode == 5 and "cannot be read" in gone.stderr
    wrong = call("import", tiny_target)
    assert wrong.returncode == 2 and "not a DFlash drafter" in wrong.stderr
    (published / "config.json").write_text(json.dumps({**PUBLISHED, "num_target_layers": 36}))
    other = call("import", published, "--target", tiny_target)
    assert other.returncode == 2 and "num_target_layers is 36, the target's 4" in other.stderr


def test_each_difference_between_run_and_drafter_is_named(make_run: Callable[..., Run], published: Path) -> None:
    run = make_run(**FITTING, **{"drafter.init_from": str(published)})

    def prepared(*overrides: str) -> Any:
        return prepare(load_config(run.config, overrides), None, "none")

    made = prepared().drafter
    # What [drafter] has no key for comes with the weights.
    assert (made.intermediate_size, made.num_attention_heads, made.head_dim) == (96, 2, 32)
    assert (made.rope_theta, made.rms_norm_eps, made.causal) == (50000.0, 1e-5, False)
    assert any("RoPE base is 50000, the target's 10000" in note for note in prepared().notes)
    for override, named in (
        ("drafter.layers=3", r"num_hidden_layers is 2 there, 3 here \(drafter\.layers\)"),
        ("drafter.block_size=8", r"block_size is 4 there, 8 here \(drafter\.block_size\)"),
        ("drafter.layer_ids=[0,2]", r"target_layer_ids is \[1, 2\] there, \[0, 2\] here \(drafter\.layer_ids\)"),
        ("drafter.mask_token_id=1", r"mask_token_id is 259 there, 1 here"),
        ("drafter.sliding_window=8", r"sliding_window is 16 there, 8 here"),
        ("drafter.full_layers=0", r"layer_types is .* \(drafter\.full_layers\)"),
    ):
        with pytest.raises(ConfigError, match=named) as caught:
            prepared(override)
        assert caught.value.exit_code == 2 and "trainer import" in caught.value.next
    (published / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no drafter can be read there"):
        prepared()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_on_from_published_weights_and_resumes_without_their_folder(
    make_run: Callable[..., Run], published: Path
) -> None:
    run = make_run(**FITTING, **{"drafter.init_from": str(published), "train.lr": 1e-9, "train.warmup": 0.0})
    before = {k: v.float() for k, v in load_file(str(published / "model.safetensors")).items()}
    assert run.finish() == 0, run.log
    assert "note: the drafter's RoPE base is 50000" in run.log
    (checkpoint,) = list_checkpoints(run.checkpoints)
    after = load_file(str(checkpoint / WEIGHTS))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, before[name], atol=1e-6, rtol=0)
        assert tensor.dtype == torch.float32
    shutil.rmtree(published)
    again = prepare(load_config(run.config), run.checkpoints, "auto")
    assert (again.step, again.drafter.rope_theta, again.drafter.intermediate_size) == (1, 50000.0, 96)
    with pytest.raises(ConfigError, match="block_size was 4, is 8"):
        prepare(load_config(run.config, ["drafter.block_size=8"]), run.checkpoints, "auto")
