"""A drafter's step on the CPU (masks, forward, loss, backward, optimiser): structured attention with the fused head
against the dense mask with SDPA and the checkpointed head, by turns in the same process, on the same batch.

    .venv/bin/python benchmarks/drafter_step.py [--threads 1 2] [--rounds 3]

Goal: at least 1.5 times as fast. The two ways also must give the same loss and gradient norm, or this fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from memory import peak_bytes

from trainer.anchors import pick_anchors
from trainer.attention import build_masks
from trainer.batch import Batch, block_input_ids
from trainer.drafter import Drafter
from trainer.drafter_config import FULL, SLIDING, DrafterConfig
from trainer.loss import block_loss
from trainer.optimizer import Masters

CONFIG = DrafterConfig(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=8192,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=4096,
    block_size=16,
    mask_token_id=8191,
    target_layer_ids=(1, 5, 9),
    num_target_layers=12,
    layer_types=(FULL,) * 3,
    sliding_window=None,
    causal=True,
)
GEOMETRIES = {
    "3 full layers": CONFIG,
    "2 sliding (256) + 1 full": replace(CONFIG, layer_types=(SLIDING, SLIDING, FULL), sliding_window=256),
}
WAYS = {
    "dense mask, checkpointed head": ("sdpa", "checkpoint"),
    "dense mask, fused head": ("sdpa", "fused"),
    "structured, fused head": ("structured", "fused"),
}


def a_batch(config: DrafterConfig, sequences: int, length: int, anchors: int) -> Batch:
    """Full sequences, all supervised but the first eighth."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size - 1, (sequences, length), generator=generator)
    mask = torch.zeros(sequences, length)
    mask[:, length // 8 :] = 1.0
    lengths = torch.full((sequences,), length)
    picked, valid = pick_anchors(mask, lengths, anchors, [(0, 0, i) for i in range(sequences)])
    width = config.hidden_size * len(config.target_layer_ids)
    features = torch.randn(sequences, length, width, generator=generator)
    return Batch(ids, mask, lengths, picked, valid, features, list(range(sequences)))


class Bench:
    """One drafter with its optimiser, stepping in one way."""

    def __init__(self, config: DrafterConfig, batch: Batch, attention: str, mode: str) -> None:
        self.config, self.batch, self.attention, self.mode = config, batch, attention, mode
        generator = torch.Generator().manual_seed(1)
        self.table = 0.05 * torch.randn(config.vocab_size, config.hidden_size, generator=generator)
        self.drafter = Drafter(config, seed=0)
        self.masters = Masters(self.drafter, 0.01, fused=False)

    def step(self) -> tuple[float, float]:
        """Loss, and norm of the gradient."""
        config, batch = self.config, self.batch
        masks = build_masks(
            config, batch.anchors, batch.anchor_valid, batch.lengths, batch.input_ids.shape[1], self.attention
        )
        embeds = F.embedding(block_input_ids(batch, config.block_size, config.mask_token_id), self.table)
        hidden = self.drafter(embeds, batch.features, batch.anchors, masks)
        out = block_loss(hidden, self.table, batch, config, mode=self.mode)
        out.loss.backward()
        return float(out.loss.detach()), self.masters.step(6e-4, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each way; the fastest counts")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=128)
    given = parser.parse_args()
    print(f"{given.sequences} x {given.length} tokens, {given.anchors} anchors x {CONFIG.block_size}, ", end="")
    print(f"H {CONFIG.hidden_size}, vocabulary {CONFIG.vocab_size}, torch {torch.__version__}")
    slowest = float("inf")
    for threads in given.threads:
        torch.set_num_threads(threads)
        for name, config in GEOMETRIES.items():
            batch = a_batch(config, given.sequences, given.length, given.anchors)
            benches = {way: Bench(config, batch, *settings) for way, settings in WAYS.items()}
            best = dict.fromkeys(benches, float("inf"))
            for _ in range(given.rounds):
                results = {}
                for way, bench in benches.items():
                    began = time.perf_counter()
                    results[way] = bench.step()
                    best[way] = min(best[way], time.perf_counter() - began)
                reference, *others = results.values()
                for other in others:
                    torch.testing.assert_close(other, reference, rtol=1e-3, atol=1e-5)
            reference_time, *_, ours = best.values()
            slowest, memory = min(slowest, reference_time / ours), 0
            print(f"  {threads} thread(s), {name}")
            for way, seconds in best.items():
                peak = peak_bytes(benches[way].step)
                memory = memory or peak
                print(
                    f"    {way:30} {seconds:6.3f} s, {reference_time / seconds:.2f} x the speed, "
                    f"{peak / 2**20:4.0f} MiB at most, {peak / memory:.2f} x the memory"
                )
    print(f"structured with fused head: at least {slowest:.2f} x the speed of the reference (goal 1.5)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
