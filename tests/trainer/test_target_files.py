"""A target's folder as it is found: every shape that is published is read, every fault of a copy is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_parts import call
from pipeline_support import Run
from safetensors.torch import save_file

from trainer.errors import ConfigError
from trainer.target import load_embed_and_head
from trainer.target_files import read_target

V, H = 12, 8


def save(folder: Path, names: dict[str, list[int]], *, shards: int = 1, **config: Any) -> Path:
    """A folder with tensors of these shapes, each filled with the number of its place."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(names.items())}
    raw = {"model_type": "x", "vocab_size": V, "hidden_size": H, **config}
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"))
        return folder
    weight_map = {}
    for s in range(shards):
        part = dict(list(tensors.items())[s::shards])
        name = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        save_file(part, str(folder / name))
        weight_map.update(dict.fromkeys(part, name))
    total = sum(t.numel() * 4 for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


PLAIN = {"model.embed_tokens.weight": [V, H], "model.norm.weight": [H], "lm_head.weight": [V, H]}
DEEP = {
    "model.visual.embed_tokens.weight": [3, 3],
    "model.language_model.embed_tokens.weight": [V, H],
    "mtp.embed_tokens.weight": [V, H],
    "lm_head.weight": [V, H],
}
TEXT = {"text_config": {"vocab_size": V, "hidden_size": H}, "vocab_size": 5, "hidden_size": 3}


@pytest.mark.parametrize(
    ("names", "config", "places"),
    [
        (PLAIN, {}, (0, 2)),
        (PLAIN, {"tie_word_embeddings": True}, (0, 0)),
        (DEEP, TEXT, (1, 3)),
        (DEEP, {**TEXT, "text_config": {**TEXT["text_config"], "tie_word_embeddings": True}}, (1, 1)),
        ({"language_model.model.embed_tokens.weight": [V, H], "language_model.lm_head.weight": [V, H]}, TEXT, (0, 1)),
        ({"thinker.model.embed_tokens.weight": [V, H], "thinker.model.norm.weight": [H]}, {}, (0, 0)),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_embedding_and_head_are_found_wherever_they_are(
    tmp_path: Path, names: dict[str, list[int]], config: dict[str, Any], places: tuple[int, int], shards: int
) -> None:
    folder = save(tmp_path, names, shards=shards, **config)
    facts = read_target(str(folder))
    assert (facts.vocab_size, facts.hidden_size, facts.tied) == (V, H, places[0] == places[1])
    assert facts.weight_bytes == sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    embed, head = load_embed_and_head(folder, torch.float32, "cpu")
    assert (int(embed[0, 0]), int(head[0, 0])) == places and head.shape == (V, H)


def change(file: str, edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(edit(json.loads(path.read_text()))))

    return apply


INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


def moved(index: dict[str, Any]) -> dict[str, Any]:
    index["weight_map"]["lm_head.weight"] = SECOND
    return index


@pytest.mark.parametrize(
    ("break_it", "fault", "hint"),
    [
        (lambda f: (f / SECOND).unlink(), f"weights are missing: {SECOND}", "copy the target's folder again"),
        (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-3]), "its header says", "copy"),
        (lambda f: (f / SECOND).write_bytes(b"\xff" * 40), "no whole safetensors file", "copy"),
        (lambda f: (f / INDEX).unlink(), "there are 2 files of weights, first model-00001", "copy"),
        (lambda f: (f / INDEX).write_text("[]"), f"{INDEX} cannot be read", "folder"),
        (
            change(INDEX, moved),
            f"the index places lm_head.weight in {SECOND}, which does not hold it",
            "one and the same",
        ),
        (
            change("config.json", lambda c: {**c, "vocab_size": V + 1}),
            r"is \[12, 8\], config.json says",
            "one and the same",
        ),
        (change("config.json", lambda c: {"vocab_size": V}), "lacks 'hidden_size'", "folder"),
        (change("config.json", lambda c: []), "not an object", "folder"),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), "cannot be read", "folder"),
        (lambda f: (f / "config.json").unlink(), "no config.json: this is no target", "hub id"),
    ],
)
def test_a_folder_that_was_copied_badly_is_named(
    tmp_path: Path, break_it: Callable[[Path], None], fault: str, hint: str
) -> None:
    folder = save(tmp_path / "t", PLAIN, shards=2, tie_word_embeddings=False)
    break_it(folder)
    with pytest.raises(ConfigError, match=fault) as caught:
        read_target(str(folder))
    assert hint in caught.value.next and str(folder) in caught.value.where and caught.value.exit_code == 2


def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = save(tmp_path, PLAIN)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"there is pytorch_model\.bin, a pickled format") as caught:
        read_target(str(folder))
    assert "save_pretrained" in caught.value.next
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"weights are missing: model\.safetensors"):
        read_target(str(folder))


def test_no_embedding_and_no_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hold no embed_tokens\.weight"):
        read_target(str(save(tmp_path / "a", {"transformer.h.weight": [V, H]})))
    names = {"model.embed_tokens.weight": [V, H]}
    with pytest.raises(ConfigError, match=r"no lm_head\.weight, and its config says it is not tied"):
        read_target(str(save(tmp_path / "b", names, tie_word_embeddings=False)))


def test_a_quantised_target_is_noted_and_a_packed_head_refused(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    folder = save(tmp_path, PLAIN, **quantised)
    assert "quantised (fp8)" in read_target(str(folder)).notes[0]
    packed = {n: torch.zeros(s, dtype=torch.uint8) for n, s in PLAIN.items()}
    save_file(packed, str(folder / "model.safetensors"))
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight is torch\.uint8, packed"):
        load_embed_and_head(folder, torch.float32, "cpu")


def test_where_only_the_small_files_are_the_index_is_believed(tmp_path: Path) -> None:
    folder = save(tmp_path, PLAIN, shards=2)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    facts = read_target(str(folder), weights=False)
    assert (facts.vocab_size, facts.tied, facts.weight_bytes) == (V, False, 4 * (2 * V * H + H))


def test_code_of_a_model_folder_is_never_run(tmp_path: Path) -> None:
    from trainer.target import load_target

    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    folder = save(tmp_path / "t", PLAIN, **config)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    with pytest.raises(ConfigError, match="target of type 'own' cannot be loaded"):
        load_target(folder, dtype=torch.float32, device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"drafter.taps": None, "drafter.layer_ids": [0, 4]}, "different layers from 0 to 3"),
        ({"drafter.taps": 5}, "taps"),
        ({"drafter.mask_token_id": 260}, "mask_token_id"),
        ({"drafter.block_size": 65}, "a block of 65 is longer than max_length = 64"),
        ({"target.path": "org/nowhere"}, "org/nowhere is not on this machine, and HF_HUB_OFFLINE"),
        ({"target.revision": "v1"}, "a revision belongs to a hub id"),
    ],
)
def test_a_drafter_that_does_not_fit_its_target_is_refused_by_check(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], fault: str
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    done = call("check", "--config", make_run(**changes).config)
    report = json.loads(done.stdout)
    assert done.returncode == 2 and not report["ok"]
    (error,) = report["errors"]
    assert fault in " ".join([error["what"], error["where"], error["next"]]), error
    assert error["next"]
