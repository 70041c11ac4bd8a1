"""Targets of several families: features, embedding and head, and speculation that gives their own greedy output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import ConfigError, DataError
from trainer.evaluate import Mismatch, Report, evaluate, first_difference, merged
from trainer.speculate import greedy, speculate
from trainer.target import Target, load_embed_and_head, load_target

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
LINEAR = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
}


def qwen3(**more: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8, **more))


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))


def windowed() -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    return qwen3(use_sliding_window=True, sliding_window=7, layer_types=kinds)


def vision_language() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    spelling = "rope_parameters" if hasattr(transformers.Qwen3Config(), "rope_parameters") else "rope_scaling"
    text = {**SIZES, "head_dim": 8, spelling: rope}
    vision = {**VISION, "deepstack_visual_indexes": []}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return transformers.Qwen3VLForConditionalGeneration(config)


def hybrid() -> Any:
    """Gated linear attention and full attention, under a vision-language wrapper: the geometry of Qwen3.6."""
    config = transformers.Qwen3_5Config(
        text_config={**SIZES, **LINEAR}, vision_config=VISION, tie_word_embeddings=False
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def experts() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False
    )
    return transformers.Qwen3MoeForCausalLM(config)


def fused() -> Any:
    """Names of its own inside a layer: q, k and v in one."""
    config = transformers.Phi3Config(**{**SIZES, "pad_token_id": 0}, original_max_position_embeddings=128)
    return transformers.Phi3ForCausalLM(config)


FAMILIES = {
    "experts": experts,
    "fused": fused,
    "qwen3": qwen3,
    "qwen3-tied": lambda: qwen3(tie_word_embeddings=True),
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "windowed": windowed,
    "vision-language": vision_language,
    "hybrid": hybrid,
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """Name, folder and the model itself, with weights large enough that its greedy output wanders."""
    if request.param == "hybrid" and not hasattr(transformers, "Qwen3_5Config"):
        pytest.skip("this transformers has no Qwen3.5")
    if request.param == "vision-language" and not hasattr(transformers, "Qwen3VLConfig"):
        pytest.skip("this transformers has no Qwen3-VL")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = FAMILIES[request.param]().float().eval()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.25)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="40KB" if request.param == "qwen3" else "5GB")
    return request.param, folder, model


def loaded(folder: Path) -> Target:
    return load_target(folder, dtype=torch.float32, device="cpu")


IDS = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))


def test_a_tap_is_the_output_of_that_decoder_layer(family: tuple[str, Path, Any]) -> None:
    _, folder, model = family
    target = loaded(folder)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (5, 32, 60)
    with torch.no_grad():
        states = model(input_ids=IDS, output_hidden_states=True).hidden_states
    features = target.features(IDS, [3, 0, 2])
    expected = torch.cat([states[4], states[1], states[3]], dim=-1)
    assert torch.allclose(features, expected, atol=1e-5)


def test_padding_on_the_right_does_not_reach_real_positions(family: tuple[str, Path, Any]) -> None:
    target = loaded(family[1])
    padded = torch.cat([IDS, torch.full((2, 9), 5)], dim=1)
    alone = target.features(IDS, [1, 3])
    assert (target.features(padded, [1, 3])[:, :12] - alone).abs().max() < 1e-5 * alone.abs().max()


def test_nothing_after_the_last_tap_is_run_and_no_hook_is_left(family: tuple[str, Path, Any]) -> None:
    target = loaded(family[1])
    ran: list[int] = []
    for i, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda module, args, i=i: ran.append(i))
    target.features(IDS, [2, 0])
    assert ran == [0, 1, 2]
    assert all(not layer._forward_hooks for layer in target.layers)


def test_the_folders_are_shaped_like_published_ones(family: tuple[str, Path, Any]) -> None:
    name, folder, _ = family
    names = {k for file in folder.glob("*.safetensors") for k in load_file(str(file))}
    deep = name in ("vision-language", "hybrid")
    assert ("model.language_model.embed_tokens.weight" in names) == deep
    assert ("lm_head.weight" in names) != name.endswith("-tied")
    assert (folder / "model.safetensors.index.json").exists() == (name == "qwen3")


def test_a_drafter_reads_the_same_embedding_and_head(family: tuple[str, Path, Any]) -> None:
    name, folder, model = family
    target = loaded(folder)
    embed, head = load_embed_and_head(folder, torch.float32, "cpu")
    assert torch.equal(embed, target.embed_weight) and torch.equal(head, target.head_weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert torch.equal(embed, head) == name.endswith("-tied")


def a_drafter(target: Target, window: int | None) -> Drafter:
    config = DrafterConfig.from_target(
        target.config, layers=2, block_size=4, mask_token_id=59, target_layer_ids=[1, 3], sliding_window=window
    )
    return Drafter(config, seed=1)


@pytest.mark.parametrize("window", [None, 3])
def test_speculation_gives_the_targets_own_output(family: tuple[str, Path, Any], window: int | None) -> None:
    _, folder, model = family
    target = loaded(folder)
    prompt = IDS[0].tolist()
    with torch.no_grad():  # the slowest and surest way: no cache at all
        ids = list(prompt)
        for _ in range(20):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert greedy(target, prompt, 20) == ids[12:]
    out = speculate(target, a_drafter(target, window), prompt, 20)
    assert out.tokens == ids[12:]
    assert out.target_forwards == 1 + len(out.acceptance_lengths)
    assert all(1 <= n <= 4 for n in out.acceptance_lengths)


class Oracle(Drafter):
    """Proposes the target's own continuation, but a wrong token at some places: acceptance is known beforehand."""

    def __init__(self, target: Target, prompt: list[int], wrong: set[int]) -> None:
        super().__init__(DrafterConfig.from_target(target.config, layers=1, block_size=4, mask_token_id=31, taps=2))
        self.truth, self.first, self.wrong = greedy(target, prompt, 24), len(prompt), wrong
        self.hidden_of = torch.linalg.inv(target.head_weight.T)  # as many dimensions as tokens

    def propose(self, block_embeds: Any, features: Any, cache: Any) -> torch.Tensor:
        cache.length += features.shape[1]
        places = [cache.length - self.first + k for k in range(4)]
        tokens = [(self.truth[i] + (i in self.wrong)) % 32 for i in places]
        return torch.nn.functional.one_hot(torch.tensor([tokens]), 32).float() @ self.hidden_of


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SIZES, "vocab_size": 32}, head_dim=8))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.25)
    folder = tmp_path_factory.mktemp("easy")
    model.float().save_pretrained(folder)
    return loaded(folder)


PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    "wrong,lengths",
    [(set(), [4, 4]), ({2}, [2, 4, 4]), ({1}, [1, 4, 4]), ({3}, [3, 4, 4]), (set(range(24)), [1] * 8)],
)
def test_acceptance_counts_the_right_prefix_and_the_bonus_token(
    easy: Target, wrong: set[int], lengths: list[int]
) -> None:
    drafter = Oracle(easy, PROMPT, wrong)
    out = speculate(easy, drafter, PROMPT, 8)
    assert out.acceptance_lengths == lengths
    assert out.tokens == drafter.truth[:8]


def test_both_ways_stop_at_the_end_token(easy: Target) -> None:
    drafter = Oracle(easy, PROMPT, {6})
    end = drafter.truth[5]
    stop = drafter.truth.index(end) + 1
    assert greedy(easy, PROMPT, 20, {end}) == drafter.truth[:stop]
    assert speculate(easy, drafter, PROMPT, 20, {end}).tokens == drafter.truth[:stop]
    assert greedy(easy, PROMPT, 1) == speculate(easy, drafter, PROMPT, 1).tokens == drafter.truth[:1]


def test_an_evaluation_reports_acceptance_forwards_and_seconds(easy: Target) -> None:
    ticks = iter([0.0, 1.0, 11.0, 20.0, 22.0, 42.0])
    seen: list[tuple[int, int, float]] = []
    given: list[int] = []
    report = evaluate(
        easy,
        Oracle(easy, PROMPT, {2}),
        [PROMPT, PROMPT],
        8,
        progress=lambda done, total, tau: seen.append((done, total, tau)),
        each=given.append,
        clock=lambda: next(ticks),
    )
    assert report == Report(
        prompts=2,
        tokens=16,
        block_size=4,
        verifications=6,
        accepted=[6, 4, 4],
        mismatches=[],
        speculative_forwards=8,
        plain_forwards=16,
        speculative_seconds=3.0,
        plain_seconds=30.0,
    )
    assert seen == [(1, 2, pytest.approx(10 / 3)), (2, 2, pytest.approx(10 / 3))]
    assert given == [2, 4, 4, *[1] * 8] * 2
    said = json.loads(json.dumps(report.to_dict()))
    assert said["tau"] == pytest.approx(10 / 3) and said["lossless"] is True
    assert said["slot_acceptance"] == pytest.approx([1, 2 / 3, 2 / 3])
    assert said["slot_conditional"] == pytest.approx([1, 2 / 3, 1])
    assert (said["speculative_tokens_per_s"], said["plain_tokens_per_s"]) == pytest.approx((16 / 3, 16 / 30))
    assert said["speedup"] == pytest.approx(10) and said["speedup_forwards"] == 2
    both = merged([report, replace(report, mismatches=[Mismatch(1, 5, 7, 8, 0.5)])])
    assert (both.prompts, both.accepted, both.tau) == (4, [12, 8, 8], pytest.approx(10 / 3))
    assert both.mismatches == [Mismatch(3, 5, 7, 8, 0.5)] and not both.lossless
    with pytest.raises(DataError, match="block sizes"):
        merged([report, replace(report, block_size=8)])


def test_an_output_that_is_not_the_targets_is_reported(easy: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Oracle(easy, PROMPT, set())
    own, other = drafter.truth[5], (drafter.truth[5] + 1) % 32
    monkeypatch.setattr("trainer.evaluate.greedy", lambda *args, **_: [*greedy(*args)[:5], other])
    report = evaluate(easy, drafter, [PROMPT], 8)
    (found,) = report.mismatches
    assert not report.lossless and (found.prompt, found.position) == (0, 5)
    assert (found.speculative, found.plain) == (own, other)
    # The target itself prefers its own token by this much, so the output called plain is the wrong one here.
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, *drafter.truth[:5]]])
        logits = easy.step(ids, easy.new_cache())[0][0, -1] @ easy.head_weight.T
    assert found.gap is not None and found.gap < 0
    assert found.gap == pytest.approx(float(logits[other] - logits[own]), rel=1e-4)
    monkeypatch.setattr("trainer.evaluate.greedy", lambda *args, **_: greedy(*args)[:5])
    (shorter,) = evaluate(easy, drafter, [PROMPT], 8).mismatches
    assert (shorter.position, shorter.speculative, shorter.plain, shorter.gap) == (5, own, None, None)
    assert first_difference([1, 2], [1, 2, 3]) == 2


# Errors


def test_a_drafter_of_another_target_and_empty_inputs_are_refused(easy: Target) -> None:
    drafter = Oracle(easy, PROMPT, set())
    with pytest.raises(DataError, match="no prompts"):
        evaluate(easy, drafter, [], 8)
    with pytest.raises(ConfigError, match="empty prompt"):
        speculate(easy, drafter, [], 8)
    with pytest.raises(ConfigError, match="max_new"):
        greedy(easy, PROMPT, 0)
    other = DrafterConfig.from_target(
        transformers.Qwen3Config(**{**SIZES, "hidden_size": 64}), layers=1, block_size=4, mask_token_id=31, taps=2
    )
    with pytest.raises(ConfigError, match="hidden_size is 64, the target's is 32"):
        speculate(easy, Drafter(other), PROMPT, 8)


def test_a_layer_that_the_target_lacks_is_refused(easy: Target) -> None:
    with pytest.raises(ConfigError, match=r"layers 0\.\.4"):
        easy.features(IDS, [1, 5])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    qwen3().save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder: Path, drop: str, add: dict[str, torch.Tensor] | None = None) -> None:
    file = folder / "model.safetensors"
    kept = {k: v.clone() for k, v in load_file(str(file)).items() if k != drop}
    save_file({**kept, **(add or {})}, str(file), metadata={"format": "pt"})


def test_a_target_that_lacks_a_weight_is_refused_and_not_filled_with_noise(folder: Path) -> None:
    change_weights(folder, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(ConfigError, match=r"lacks 1 weights, first .*layers\.2\.mlp\.up_proj"):
        loaded(folder)


def test_bad_target_folders_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, fault in (("nowhere", "no such folder"), ("empty", r"no config\.json")):
        with pytest.raises(ConfigError, match=fault):
            loaded(tmp_path / name)
        with pytest.raises(ConfigError, match=fault):
            load_embed_and_head(tmp_path / name, torch.float32, "cpu")
    change_weights(folder, "lm_head.weight")
    with pytest.raises(ConfigError, match="not tied"):
        load_embed_and_head(folder, torch.float32, "cpu")
    good = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    for load in (loaded, lambda f: load_embed_and_head(f, torch.float32, "cpu")):
        with pytest.raises(ConfigError):
            load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"weights are missing: model\.safetensors"):
        load_embed_and_head(folder, torch.float32, "cpu")
    (folder / "model.safetensors").write_bytes(good)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        loaded(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "nobody-knows-it"}))
    with pytest.raises(ConfigError, match="nobody-knows-it"):
        loaded(folder)


def test_other_embeddings_in_the_file_are_passed_over(folder: Path) -> None:
    right = load_file(str(folder / "model.safetensors"))["model.embed_tokens.weight"]
    change_weights(
        folder, "", {"mtp.embed_tokens.weight": torch.zeros(60, 32), "visual.lm_head.weight": torch.zeros(1)}
    )
    embed, head = load_embed_and_head(folder, torch.bfloat16, "cpu")
    assert torch.equal(embed, right.bfloat16()) and head.shape == (60, 32) and head.abs().sum() > 0


def test_a_tied_target_whose_file_has_a_stale_head_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    qwen3(tie_word_embeddings=True).save_pretrained(tmp_path)
    change_weights(tmp_path, "", {"lm_head.weight": torch.zeros(60, 32)})
    embed, head = load_embed_and_head(tmp_path, torch.float32, "cpu")
    assert torch.equal(head, embed) and embed.abs().sum() > 0


def test_the_language_models_embedding_wins_over_another_towers(tmp_path: Path) -> None:
    vision_language().save_pretrained(tmp_path)
    right = load_file(str(tmp_path / "model.safetensors"))["model.language_model.embed_tokens.weight"]
    change_weights(tmp_path, "", {"audio.embed_tokens.weight": torch.zeros(60, 32)})
    assert torch.equal(load_embed_and_head(tmp_path, torch.float32, "cpu")[0], right)
