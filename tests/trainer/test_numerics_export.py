"""The drafter's folder: what servers read, what is refused, and that a failed write leaves the old one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import CheckpointError, ConfigError
from trainer.export import export_drafter, load_drafter


def a_target(**changes: Any) -> Any:
    text: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 50,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    }
    return SimpleNamespace(**{**text, **changes})


def a_config(target: Any = None, **options: Any) -> DrafterConfig:
    options = {"layers": 3, "block_size": 8, "mask_token_id": 49, "taps": 5, "sliding_window": 32, **options}
    return DrafterConfig.from_target(target or a_target(), **options)


def state_of(config: DrafterConfig) -> dict[str, torch.Tensor]:
    return Drafter(config, seed=2).state_dict()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    config = a_config()
    return export_drafter(state_of(config), config, tmp_path / "drafter")


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_new_drafter_takes_the_targets_geometry() -> None:
    config = a_config()
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    assert config.causal and config.sliding_window == 32
    # The base only: a drafter turns its whole head dimension, in one dimension of positions.
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    plain = a_config(sliding_window=None)
    assert plain.layer_types == ("full_attention",) * 3 and not plain.causal and plain.sliding_window is None
    assert a_config(full_layers=0).layer_types == ("sliding_attention",) * 3


def test_both_spellings_of_a_targets_rope_base_and_a_vision_language_wrapper() -> None:
    old = a_target(rope_parameters=None, rope_theta=5e5)
    assert a_config(old).rope_theta == 5e5
    each = a_target(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}})
    assert a_config(each).rope_theta == 1e6
    assert a_config(SimpleNamespace(text_config=a_target())) == a_config()
    with pytest.raises(ConfigError, match="RoPE base"):
        a_config(a_target(rope_parameters=None))


def test_the_tensors_of_five_layers_are_58() -> None:
    config = a_config(layers=5)
    names = set(state_of(config))
    assert len(names) == 58
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.k_norm.weight"} <= names


def test_an_export_comes_back_bit_for_bit(exported: Path) -> None:
    config, state = load_drafter(exported)
    assert config == a_config()
    assert all(torch.equal(state[k], v) for k, v in state_of(config).items())
    assert sorted(p.name for p in exported.parent.iterdir()) == ["drafter"]  # nothing left beside


def test_the_config_says_what_servers_must_know(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert config["is_causal"] is True and config["dflash_config"]["causal"] is True
    assert config["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert config["num_target_layers"] == 36 and config["block_size"] == 8
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e7 and config["rope_scaling"] is None
    assert config["use_sliding_window"] is True and config["sliding_window"] == 32
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert not {"partial_rotary_factor", "mrope_section"} & (config.keys() | config["rope_parameters"].keys())


def test_transformers_reads_the_config_as_it_was_meant(exported: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(exported, local_files_only=True)
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config.sliding_window == 32 and config.head_dim == 16 and config.block_size == 8
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    assert rope["rope_theta"] == 1e7


def test_a_sliding_drafter_that_looks_both_ways_says_so(tmp_path: Path) -> None:
    config = a_config(causal=False)
    folder = export_drafter(state_of(config), config, tmp_path / "d", dtype=torch.bfloat16)
    written = json.loads((folder / "config.json").read_text())
    assert written["is_causal"] is False and written["dflash_config"]["causal"] is False
    assert written["dtype"] == "bfloat16"
    loaded, state = load_drafter(folder)
    assert loaded == config and {t.dtype for t in state.values()} == {torch.bfloat16}


def test_a_missing_causality_means_causal_as_servers_take_it(exported: Path) -> None:
    edit(exported, lambda c: (c.pop("is_causal"), c["dflash_config"].pop("causal")))
    assert load_drafter(exported)[0].causal
    edit(exported, lambda c: c.update(is_causal=False))
    assert not load_drafter(exported)[0].causal


def test_the_older_rope_spelling_is_read(exported: Path) -> None:
    edit(exported, lambda c: c.pop("rope_parameters"))
    assert load_drafter(exported)[0] == a_config()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
)
def test_scaled_rope_is_read_in_both_spellings_and_used(exported: Path, scaling: dict[str, Any]) -> None:
    plain = Drafter(load_drafter(exported)[0])._frequencies
    edit(exported, lambda c: (c.pop("rope_parameters"), c.update(rope_scaling=scaling)))
    old = load_drafter(exported)[0]
    edit(exported, lambda c: (c.pop("rope_scaling"), c.update(rope_parameters={**scaling, "rope_theta": 1e7})))
    new = load_drafter(exported)[0]
    assert old == new and DrafterConfig.from_hf(new.to_hf()) == new
    drafter = Drafter(new)
    assert drafter._frequencies.shape == plain.shape and not torch.allclose(drafter._frequencies, plain)


# What is refused


@pytest.mark.parametrize(
    "change,named",
    [
        (lambda c: c.update(architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
        (lambda c: c.pop("dflash_config"), "dflash_config"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "dflash_config.mask_token_id"),
        (lambda c: c["dflash_config"].update(mask_token_id=50), "mask_token_id"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 36]), "target_layer_ids"),
        (lambda c: c.update(layer_types=["full_attention"]), "layer_types"),
        (lambda c: c.update(layer_types=["chunked_attention"] * 3), "layer_types"),
        (lambda c: c.update(sliding_window=None), "sliding_window"),
        (lambda c: c.update(is_causal=False), "is_causal"),
        (lambda c: c.update(rope_theta=1e4), "rope_theta"),
        (lambda c: c.update(attention_bias=True), "attention_bias"),
        (lambda c: c.update(block_size=1), "block_size"),
        (lambda c: c.update(num_key_value_heads=3), "num_key_value_heads"),
        (lambda c: c.pop("hidden_size"), "hidden_size"),
    ],
)
def test_a_config_that_is_no_drafters_is_refused_by_key(
    exported: Path, change: Callable[[dict[str, Any]], Any], named: str
) -> None:
    edit(exported, change)
    with pytest.raises(ConfigError, match=named) as caught:
        load_drafter(exported)
    assert caught.value.exit_code == 2


def test_an_unknown_rope_is_refused() -> None:
    config = replace(a_config(), rope_parameters={"rope_type": "dynamic", "rope_theta": 1e7})
    with pytest.raises(ConfigError, match="dynamic"):
        Drafter(config)


@pytest.mark.parametrize(
    "change,named",
    [
        (lambda s: s.pop("fc.weight"), r"1 tensors missing, first fc\.weight"),
        (lambda s: s.update({"lm_head.weight": torch.zeros(2)}), r"1 unknown, first lm_head\.weight"),
        (lambda s: s.update({"norm.weight": torch.ones(63)}), r"norm\.weight is \[63\], the config says \[64\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused_both_ways(
    exported: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], named: str
) -> None:
    state = load_file(str(exported / "model.safetensors"))
    change(state)
    with pytest.raises(CheckpointError, match=named):
        export_drafter(state, a_config(), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    save_file(state, str(exported / "model.safetensors"))
    with pytest.raises(CheckpointError, match=named) as caught:
        load_drafter(exported)
    assert caught.value.exit_code == 5


def test_damaged_and_absent_files_are_named(exported: Path, tmp_path: Path) -> None:
    whole = (exported / "model.safetensors").read_bytes()
    (exported / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(exported)
    (exported / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_drafter(exported)
    (exported / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_drafter(exported)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_drafter(tmp_path / "nowhere")


def test_an_export_replaces_an_earlier_one_and_nothing_else(exported: Path, tmp_path: Path) -> None:
    changed = {k: v + 1 for k, v in state_of(a_config()).items()}
    export_drafter(changed, a_config(), exported)
    assert torch.equal(load_drafter(exported)[1]["norm.weight"], changed["norm.weight"])
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="no earlier export"):
        export_drafter(changed, a_config(), precious)
    assert (precious / "notes.txt").read_text() == "keep"


def test_a_write_that_fails_leaves_the_earlier_export(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (exported / "model.safetensors").read_bytes()
    rename = Path.rename

    def no_space(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", no_space)
    with pytest.raises(ConfigError, match="No space left"):
        export_drafter({k: v + 1 for k, v in state_of(a_config()).items()}, a_config(), exported)
    assert (exported / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in exported.parent.iterdir()) == ["drafter"]


@pytest.mark.parametrize(
    "options,named",
    [
        ({"taps": 2, "target_layer_ids": [1, 2, 3]}, "taps"),
        ({"sliding_window": None, "full_layers": 1}, "full_layers"),
        ({"full_layers": 4}, "full_layers"),
        ({"taps": 40}, "taps"),
    ],
)
def test_contradicting_choices_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        a_config(**options)


def test_the_same_seed_gives_the_same_drafter_and_norms_start_at_one() -> None:
    config = a_config()
    one, two, other = state_of(config), state_of(config), Drafter(config, seed=3).state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert all((v == 1).all() for k, v in one.items() if "norm" in k)
    assert float(one["fc.weight"].std()) == pytest.approx(0.02, rel=0.05)
