"""A drafter at the 27B geometry on one CUDA GPU, synthetic features: block tokens/s, share of the GPU's peak, memory.

    .venv/bin/python benchmarks/gpu_drafter.py [--sequences 4] [--lengths 3072 4096] [--steps 8] [--chunk 2048]

The step is the trainer's own: autocast over float32 masters, flex attention, fused loss, fused AdamW. Left out are the
copy of the features (51 KB a token over PCIe, which a run overlaps with other workers' time, not with this one's) and
averaging. The peak is what a large bf16 product reaches on this GPU in the same run. Operations are counted, not
measured: products of matrices forward and backward, attention over the keys that a row sees, the head for rows that
count; nothing for what is only moved or recomputed.

Goals on an H200: 35,000 block tokens/s and 0.55 of the peak.

`--tiny --device cpu` runs the same code at a toy geometry, to see that it works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from trainer.anchors import pick_anchors
from trainer.attention import build_masks
from trainer.batch import Batch, block_input_ids
from trainer.drafter import Drafter
from trainer.drafter_config import FULL, SLIDING, DrafterConfig
from trainer.flex import freeze_shapes
from trainer.loss import block_loss
from trainer.optimizer import Masters

GOAL_TOKENS, GOAL_SHARE = 35_000, 0.55
REAL = DrafterConfig(
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=248320,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    max_position_embeddings=262144,
    block_size=16,
    mask_token_id=248070,
    target_layer_ids=(1, 16, 31, 46, 61),
    num_target_layers=64,
    layer_types=(SLIDING,) * 4 + (FULL,),
    sliding_window=2048,
    causal=True,
)
TINY = replace(
    REAL,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    mask_token_id=511,
    sliding_window=64,
)


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int, seconds: float = 2.0) -> float:
    """The best rate of a product of two square matrices, in operations a second."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds:
        wait_for(device)
        start = time.perf_counter()
        for _ in range(4):
            a @ b
        wait_for(device)
        best = min(best, (time.perf_counter() - start) / 4)
    return 2.0 * size**3 / best


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def a_batch(config: DrafterConfig, sequences: int, length: int, anchors: int, device: torch.device) -> Batch:
    """Full sequences whose first eighth is the prompt, with random features in the dtype of the ring."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, config.vocab_size - 1, (sequences, length), generator=generator)
    mask = torch.zeros(sequences, length)
    mask[:, length // 8 :] = 1.0
    lengths = torch.full((sequences,), length)
    picked, valid = pick_anchors(mask, lengths, anchors, [(0, 0, i) for i in range(sequences)])
    batch = Batch(ids, mask, lengths, picked, valid, torch.empty(0), list(range(sequences))).to(device)
    width = config.hidden_size * len(config.target_layer_ids)
    return replace(batch, features=torch.randn(sequences, length, width, device=device, dtype=torch.bfloat16))


def operations(config: DrafterConfig, batch: Batch, counted: int) -> float:
    """Of one step. A product forward costs 2 a weight and row, its two gradients 4; the frozen head has only one."""
    hidden, head_dim, kv = config.hidden_size, config.head_dim, config.num_key_value_heads * config.head_dim
    wide = config.num_attention_heads * head_dim
    rows, context = batch.anchors.numel() * config.block_size, batch.input_ids.numel()
    layer = 2 * hidden * wide + 2 * hidden * kv + 3 * hidden * config.intermediate_size
    linear = 6.0 * rows * layer * config.num_hidden_layers
    fused = 6.0 * context * hidden * (len(config.target_layer_ids) * hidden + 2 * kv * config.num_hidden_layers)
    pairs = 0.0
    for kind in config.layer_types:
        seen = batch.anchors.double()
        own = float(config.block_size)
        if kind == SLIDING and config.sliding_window is not None:
            seen = seen.clamp(max=config.sliding_window - (config.block_size + 1) / 2)
            own = (config.block_size + 1) / 2 if config.causal else own
        pairs += float((seen + own).sum()) * config.block_size
    attention = 12.0 * wide * pairs
    head = 4.0 * counted * hidden * config.vocab_size
    return linear + fused + attention + head


class Step:
    """The drafter with its optimiser and a random frozen head."""

    def __init__(self, config: DrafterConfig, device: torch.device, given: argparse.Namespace) -> None:
        self.config, self.device, self.given = config, device, given
        self.dtype = torch.bfloat16
        self.backend = "flex" if device.type == "cuda" else "structured"
        self.drafter = Drafter(config, seed=0).to(device)
        self.masters = Masters(self.drafter, 0.01, fused=device.type == "cuda")
        shape = (config.vocab_size, config.hidden_size)
        self.embed, self.head = (torch.randn(shape, device=device, dtype=self.dtype).mul_(0.02) for _ in range(2))
        self.seconds: dict[str, float] = {}

    def __call__(self, batch: Batch, parts: bool = False) -> tuple[float, int]:
        """Loss and rows that count. `parts`: waits after each part and adds its time to `seconds`."""
        config = self.config
        mark = time.perf_counter()

        def ends(part: str) -> None:
            nonlocal mark
            if parts:
                wait_for(self.device)
                now = time.perf_counter()
                self.seconds[part] = self.seconds.get(part, 0.0) + now - mark
                mark = now

        masks = build_masks(
            config, batch.anchors, batch.anchor_valid, batch.lengths, batch.input_ids.shape[1], self.backend
        )
        ends("masks")
        block_ids = block_input_ids(batch, config.block_size, config.mask_token_id)
        with torch.autocast(self.device.type, dtype=self.dtype):
            hidden = self.drafter(F.embedding(block_ids, self.embed), batch.features, batch.anchors, masks)
            ends("drafter forward")
            out = block_loss(hidden, self.head, batch, config, chunk=self.given.chunk)
        ends("loss")
        # As the worker does: nothing is changed by a loss that is not finite.
        loss, counted = torch.stack([out.loss.detach().double(), out.positions.double()]).tolist()
        torch.autograd.backward([out.loss])
        ends("backward")
        self.masters.step(6e-4, 1.0)
        ends("optimiser")
        return loss, int(counted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy geometry")
    parser.add_argument("--sequences", type=int, default=None, help="of a batch (4; tiny: 2)")
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="(3072 4096; tiny: 96 128)")
    parser.add_argument("--anchors", type=int, default=None, help="of a sequence (512; tiny: 8)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each length")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each length before that; the first compiles")
    parser.add_argument("--chunk", type=int, default=2048, help="rows whose logits exist at one time")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no CUDA GPU, and this benchmark measures one.\n"
            "Run it on a machine with a GPU, or with --tiny --device cpu to see that its code works.",
            file=sys.stderr,
        )
        return 2
    if device.type != "cuda" and not given.tiny:
        print(f"the 27B geometry on {device} would take hours: add --tiny, or use a GPU", file=sys.stderr)
        return 2
    if min(given.steps, given.warmup, given.chunk) < 1:
        parser.error("--steps, --warmup and --chunk are at least 1")
    config = TINY if given.tiny else REAL
    sequences = given.sequences or (2 if given.tiny else 4)
    lengths = given.lengths or ([96, 128] if given.tiny else [3072, 4096])
    anchors = given.anchors or (8 if given.tiny else 512)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {sequences} sequences of {lengths} tokens, {anchors} anchors each")
    peak = matmul_peak(device, torch.bfloat16, 512 if given.tiny else 8192, 0.2 if given.tiny else 2.0)
    print(f"bf16 matmul peak, measured: {peak / 1e12:.1f} TFLOP/s")
    step = Step(config, device, given)
    print(f"drafter of {sum(p.numel() for p in step.drafter.parameters()) / 1e9:.2f} B parameters")
    batches = [a_batch(config, sequences, length, anchors, device) for length in lengths]
    for batch in batches:
        began = time.perf_counter()
        for _ in range(given.warmup):
            loss, _ = step(batch)
        wait_for(device)
        print(f"  warm-up at {batch.input_ids.shape[1]}: {time.perf_counter() - began:.1f} s, loss {loss:.3f}")
    freeze_shapes()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    work = tokens = seconds = 0.0
    for batch in batches:
        wait_for(device)
        began = time.perf_counter()
        for _ in range(given.steps):
            loss, counted = step(batch)
        wait_for(device)
        took = time.perf_counter() - began
        done = given.steps * float(batch.anchor_valid.sum()) * config.block_size
        flop = given.steps * operations(config, batch, counted)
        print(
            f"  {batch.input_ids.shape[1]} tokens: {took / given.steps:.3f} s a step, {done / took:,.0f} block "
            f"tokens/s, {flop / done / 1e9:.2f} GFLOP a block token, {flop / took / peak:.3f} of the peak"
        )
        work, tokens, seconds = work + flop, tokens + done, seconds + took
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    for batch in batches:
        step(batch, parts=True)
    whole = sum(step.seconds.values())
    print("  shares of a step: " + ", ".join(f"{part} {s / whole:.2f}" for part, s in step.seconds.items()))
    print(f"peak memory: {memory / 2**30:.1f} GiB")
    print(f"block tokens/s: {tokens / seconds:,.0f}, of {GOAL_TOKENS:,}: {tokens / seconds / GOAL_TOKENS:.3f} (goal 1)")
    print(f"of the measured bf16 matmul peak: {work / seconds / peak:.3f} (goal {GOAL_SHARE})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
