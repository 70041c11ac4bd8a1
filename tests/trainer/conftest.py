"""A tiny random target and a data set, made on the spot; and a launcher under test that leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_support import Run, write_samples

VOCAB, HIDDEN, LAYERS, MASK = 260, 64, 4, 259


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of 4 layers, H 64, 260 tokens, float32, in Hugging Face's layout; written without transformers."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("target")
    heads, kv, dim, inner = 4, 2, 16, 128
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, 0.1, generator=generator)

    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for i in range(LAYERS):
        name = f"model.layers.{i}."
        weights |= {
            name + "input_layernorm.weight": torch.ones(HIDDEN),
            name + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            name + "self_attn.q_proj.weight": drawn(heads * dim, HIDDEN),
            name + "self_attn.k_proj.weight": drawn(kv * dim, HIDDEN),
            name + "self_attn.v_proj.weight": drawn(kv * dim, HIDDEN),
            name + "self_attn.o_proj.weight": drawn(HIDDEN, heads * dim),
            name + "self_attn.q_norm.weight": torch.ones(dim),
            name + "self_attn.k_norm.weight": torch.ones(dim),
            name + "mlp.gate_proj.weight": drawn(inner, HIDDEN),
            name + "mlp.up_proj.weight": drawn(inner, HIDDEN),
            name + "mlp.down_proj.weight": drawn(HIDDEN, inner),
        }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def make_run(tiny_target: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a job: `make_run(samples=64, **{"train.steps": 3})`."""
    made: list[Run] = []

    def make(name: str = "job", *, samples: int = 48, data: Path | None = None, **changes: Any) -> Run:
        root = tmp_path / name
        root.mkdir()
        raw: dict[str, dict[str, Any]] = {
            "target": {"path": str(tiny_target)},
            "drafter": {"layers": 1, "block_size": 4, "taps": 1, "mask_token_id": MASK},
            "data": {
                "path": str(data or write_samples(root / "data.jsonl", samples)),
                "max_length": 64,
                "buckets": [32, 64],
                "batch_size": 4,
            },
            "train": {"epochs": 1, "anchors": 8, "average_every": 3, "log_every": 1},
            "checkpoint": {"every": 3},
        }
        for key, value in changes.items():
            table, _, entry = key.partition(".")
            raw.setdefault(table, {})[entry] = value
        config = root / "run.json"
        config.write_text(json.dumps(raw), encoding="utf-8")
        run = Run(root, config)
        made.append(run)
        return run

    yield make
    for run in made:
        run.kill()
