"""Trains the demo target and lays it down in Hugging Face's layout.

The whole folder appears by one rename: a reader sees the finished target or none. `.demo.json` in it holds the key of
what it was made from (model, steps, seed, text, this package's code); the same key again means that there is nothing
to do.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import sync
from trainer.demo import text as text_module
from trainer.demo.text import Text
from trainer.demo.tokenizer import BOS, EOS, PAD, VOCAB_SIZE, save_tokenizer
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3ForCausalLM

#: 6 layers of width 128: 1.2 M parameters, and room for three taps (layers 1, 2 and 3).
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

#: Called at the start and after each step with (steps done, all steps, loss in nats a byte; not a number at the start).
Report = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Recipe:
    """How the target is trained; all of it is part of the key.

    Attributes:
        steps: optimiser steps.
        batch: sequences a step.
        length: bytes a sequence.
        lr: peak learning rate of both optimisers; 5 % warm-up, cosine down to 5 % of it.
        seed: of weights and batches.
        train_prompts, held_out_prompts: how many prompts are cut from the text.
    """

    steps: int = 150
    batch: int = 16
    length: int = 192
    lr: float = 5e-3
    seed: int = 0
    train_prompts: int = 1024
    held_out_prompts: int = 48


@dataclass(frozen=True)
class Built:
    """The target folder, the two prompt files, whether anything had to be done, and the last loss (nats a byte)."""

    target: Path
    train_prompts: Path
    held_out_prompts: Path
    reused: bool
    loss: float | None


def key_of(recipe: Recipe, text: Text) -> str:
    """Content key of a demo target: 16 hex digits over model, recipe, text and the code of this package."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        code.update(file.name.encode() + b"\0" + file.read_bytes())
    parts = {"model": MODEL, "recipe": asdict(recipe), "text": text.digest(), "code": code.hexdigest()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def build(out: Path, recipe: Recipe, report: Report | None = None, *, threads: int | None = None) -> Built:
    """The demo target in `out` and its prompts in `out/../data`, trained now or found there already.

    Args:
        report: how far the training is; never called for a target that is found.
        threads: CPU threads of the training; torch's own choice if None.

    Raises:
        ConfigError: the recipe makes no sense, or `out` holds something that is no demo target.
        DataError: this Python has no help texts, or too few for the prompts.
        OSError: the disk.
    """
    if recipe.steps < 1:
        raise ConfigError(f"{recipe.steps} steps: at least 1 is needed", "--steps")
    _refuse_foreign(out)
    texts = text_module.split(text_module.python_topics())
    key = key_of(recipe, texts)
    data = out.parent / "data"
    train_file, held_file = data / "prompts.jsonl", data / "heldout.jsonl"
    stamp = read_stamp(out)
    reused = stamp is not None and stamp.get("key") == key
    loss = stamp.get("loss") if reused and stamp is not None else None
    out.parent.mkdir(parents=True, exist_ok=True)
    if not reused:
        if report:
            report(0, recipe.steps, math.nan)
        model, loss = _train(texts, recipe, report, threads)
        _lay_down(out, model, {"key": key, "loss": loss, "recipe": asdict(recipe), "text": texts.digest()})
    made, kept = text_module.prompts(texts, recipe.train_prompts, recipe.held_out_prompts, recipe.seed)
    data.mkdir(exist_ok=True)
    for file, lines in ((train_file, made), (held_file, kept)):
        _write_if_changed(file, "".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return Built(out, train_file, held_file, reused, loss)


def read_stamp(out: Path) -> dict[str, Any] | None:
    """What `.demo.json` of a finished demo target says; None where there is none (or a damaged one: built anew)."""
    try:
        stamp = json.loads((out / ".demo.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _refuse_foreign(out: Path) -> None:
    """Never overwrite a folder that this command did not make."""
    if out.exists() and not (out.is_dir() and ((out / ".demo.json").exists() or not any(out.iterdir()))):
        raise ConfigError(
            "the target's folder exists and is no demo target; it is left as it is",
            str(out),
            "name another folder with --out, or remove this one",
        )


def _train(texts: Text, recipe: Recipe, report: Report | None, threads: int | None) -> tuple[Qwen3ForCausalLM, float]:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL)).train()
    pick = torch.Generator().manual_seed(recipe.seed)
    raw = torch.frombuffer(bytearray(texts.train.encode()), dtype=torch.uint8)
    span = torch.arange(recipe.length + 1)
    # Muon for the matrices: after 150 steps the loss is where AdamW alone has it after 350, for half the CPU time.
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed_tokens" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, lr=recipe.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=recipe.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
    ]
    recent: list[float] = []
    for step in range(recipe.steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = recipe.lr * _schedule(step, recipe.steps)
        starts = torch.randint(len(raw) - recipe.length - 1, (recipe.batch, 1), generator=pick)
        ids = raw[starts + span].long()
        logits: torch.Tensor = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-19:], float(loss.detach())]
        if report:
            report(step + 1, recipe.steps, sum(recent) / len(recent))
    return model, sum(recent) / len(recent)


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear over the first 5 %, then a cosine down to 5 %."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _lay_down(out: Path, model: Qwen3ForCausalLM, stamp: dict[str, Any]) -> None:
    """Write the folder beside its place, flush it, rename it. Rests of killed builds are swept away first."""
    for rest in out.parent.glob(f".{out.name}.building-*"):
        shutil.rmtree(rest)
    beside = out.parent / f".{out.name}.building-{os.getpid()}"
    beside.mkdir()
    try:
        model.eval().save_pretrained(beside)
        save_tokenizer(beside)
        (beside / ".demo.json").write_text(json.dumps({"schema": 1, **stamp, "built": time.time()}, indent=1) + "\n")
        for file in beside.iterdir():
            sync(file)
        sync(beside)
        if out.exists():  # an older demo target, or an empty folder (_refuse_foreign has looked)
            shutil.rmtree(out)
        beside.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write_if_changed(file: Path, text: str) -> None:
    if file.exists() and file.read_text() == text:
        return
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text)
    sync(beside)
    beside.rename(file)
