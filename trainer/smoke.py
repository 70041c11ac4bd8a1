"""A run that is tiny in every size and real in every part: what stands before a job is replaced by a new one.

As many targets and drafters as the job has, a random target of 6 layers and 40 samples made on the spot; a few steps,
two averagings and a checkpoint through the very launcher, ring, plan and workers. What the job's config says about how
it trains (loss, objective, schedule, attention, block) is kept; what it says about sizes and places is not.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import RunConfig

VOCAB, HIDDEN, LAYERS, HEADS, KV, DIM, INNER = 264, 64, 6, 2, 1, 32, 128
MASK = 263
STEPS = 4
LENGTH = 64

#: What a run on CPUs leaves untried.
NOT_ON_CPU = (
    "flex attention and its compilation",
    "NCCL between the drafters",
    "copies between GPU and host",
    "bfloat16",
)


def make(out: Path, config: RunConfig | None, targets: Sequence[str], drafters: Sequence[str]) -> Path:
    """Target, data and run.json under `out`; gives run.json.

    Args:
        config: the job's own, whose way of training is kept; None for the defaults.
        targets, drafters: devices, one process on each.

    Raises:
        OSError: the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_target(out / "target")
    batch = min(2, config.data.batch_size) if config is not None else 2
    write_samples(out / "data.jsonl", max(40, 2 * STEPS * len(drafters) * batch))
    raw = shrunk(config, out, list(targets), list(drafters), batch)
    file = out / "run.json"
    file.write_text(json.dumps(raw, indent=1) + "\n", "utf-8")
    return file


def shrunk(
    config: RunConfig | None, out: Path, targets: list[str], drafters: list[str], batch: int
) -> dict[str, dict[str, Any]]:
    """The job's config at tiny size, as run.json holds it."""
    tables: dict[str, dict[str, Any]] = {}
    if config is not None:
        tables = {
            name: {k: v for k, v in dataclasses.asdict(getattr(config, name)).items() if v is not None}
            for name in ("target", "drafter", "train", "loss", "workers", "ring")
        }
    cpu = "cpu" in drafters
    drafter = tables.get("drafter", {})
    small = {
        "mask_token_id": MASK,
        "layers": min(2, drafter.get("layers", 2)),
        "taps": min(2, drafter.get("taps") or 2),
        "block_size": min(16, drafter.get("block_size", 16)),
        "attention": "sdpa" if cpu else drafter.get("attention", "auto"),
    }
    if drafter.get("sliding_window"):
        small |= {"sliding_window": min(16, drafter["sliding_window"]), "full_layers": min(1, small["layers"])}
    train = {k: v for k, v in tables.get("train", {}).items() if k not in ("epochs", "steps")}
    return {
        "target": {"path": str(out / "target"), "dtype": tables.get("target", {}).get("dtype", "auto")},
        "drafter": small,
        "data": {"path": str(out / "data.jsonl"), "max_length": LENGTH, "buckets": [LENGTH], "batch_size": batch},
        "train": {
            **train,
            "steps": STEPS,
            "anchors": min(8, train.get("anchors", 8)),
            "average_every": STEPS // 2,
            "log_every": 1,
        },
        "loss": tables.get("loss", {}),
        "workers": {"target_devices": targets, "drafter_devices": drafters, "threads": 1, "restarts": 0},
        "ring": {k: v for k, v in tables.get("ring", {}).items() if k == "dir"},
        "checkpoint": {"every": STEPS // 2, "keep_last": 1},
    }


def write_samples(file: Path, count: int) -> None:
    """`count` samples of a small repetitive language; a third of each is prompt."""
    rng = random.Random(0)
    with file.open("w", encoding="utf-8") as opened:
        for _ in range(count):
            length, start, stride = rng.randint(40, LENGTH), rng.randrange(200), rng.choice((1, 2, 3))
            ids = [(start + stride * i) % 256 for i in range(length)]
            opened.write(json.dumps({"input_ids": ids, "prompt_length": length // 3}) + "\n")


def write_target(folder: Path) -> None:
    """A random Qwen3 in Hugging Face's layout, written without loading transformers."""
    import numpy
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(1)

    def drawn(*shape: int) -> Any:
        return draw.normal(0.0, 0.1, shape).astype(numpy.float32)

    def ones(size: int) -> Any:
        return numpy.ones(size, numpy.float32)

    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN), "model.norm.weight": ones(HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": ones(HIDDEN),
            name + "post_attention_layernorm.weight": ones(HIDDEN),
            name + "self_attn.q_proj.weight": drawn(HEADS * DIM, HIDDEN),
            name + "self_attn.k_proj.weight": drawn(KV * DIM, HIDDEN),
            name + "self_attn.v_proj.weight": drawn(KV * DIM, HIDDEN),
            name + "self_attn.o_proj.weight": drawn(HIDDEN, HEADS * DIM),
            name + "self_attn.q_norm.weight": ones(DIM),
            name + "self_attn.k_norm.weight": ones(DIM),
            name + "mlp.gate_proj.weight": drawn(INNER, HIDDEN),
            name + "mlp.up_proj.weight": drawn(INNER, HIDDEN),
            name + "mlp.down_proj.weight": drawn(HIDDEN, INNER),
        }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
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
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
