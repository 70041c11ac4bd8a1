"""The loss modes in time and memory, over vocabulary and rows: fused, gradient checkpointing, and full logits.

    .venv/bin/python benchmarks/loss_modes.py [--device cuda] [--vocabularies ...] [--rows ...]

Time: forward and backward, as a multiple of fused. Memory: peak beyond head, hidden states and their gradient, in units
of one chunk's logits ([chunk, V] float32). Goal: 1.0 for fused, whatever vocabulary and rows. Gradients must agree, or
this fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from memory import peak_bytes

from trainer.loss import row_losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None, help="bfloat16 on cuda")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--full-bytes", type=float, default=6e9, help="full logits are left out beyond this")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    dtype = getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    print(f"{device}, {dtype}, H {given.hidden}, chunks of {given.chunk} rows, torch {torch.__version__}")
    print(f"{'vocabulary':>10} {'rows':>6}  {'mode':22} {'time':>8}        {'memory':>8}")
    for vocabulary in given.vocabularies:
        for rows in given.rows:
            compare(vocabulary, rows, given, device, dtype)
    return 0


def compare(vocabulary: int, rows: int, given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    head = (0.1 * torch.randn(vocabulary, given.hidden, generator=generator)).to(device, dtype)
    hidden = torch.randn(rows, given.hidden, generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), generator=generator).to(device)
    index = torch.arange(rows, device=device)
    weights = torch.rand(rows, generator=generator).to(device)

    def chunked(mode: str, reentrant: bool) -> torch.Tensor:
        return row_losses(hidden, index, head, labels, mode=mode, reentrant=reentrant, chunk=given.chunk)[0]

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "fused": lambda: chunked("fused", False),
        "checkpoint": lambda: chunked("checkpoint", False),
        "checkpoint, reentrant": lambda: chunked("checkpoint", True),
    }
    if 4.0 * rows * vocabulary * 3 <= given.full_bytes:
        ways["full logits"] = lambda: F.cross_entropy((hidden @ head.T).float(), labels, reduction="none")

    def step(way: str) -> None:
        (ways[way]() * weights).sum().backward()

    unit, gradient = 4 * given.chunk * vocabulary, hidden.numel() * hidden.element_size()
    times, memory, reference = dict.fromkeys(ways, float("inf")), {}, None
    for _ in range(given.rounds):
        for way in ways:
            hidden.grad = None
            began = time.perf_counter()
            step(way)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[way] = min(times[way], time.perf_counter() - began)
            reference = hidden.grad if reference is None else reference
            close = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(hidden.grad, reference, rtol=close, atol=close * float(reference.abs().max()))
    for way in ways:
        hidden.grad = None
        memory[way] = (peak_bytes(lambda way=way: step(way), device) - gradient) / unit
    for way in ways:
        ratio = times[way] / times["fused"]
        print(f"{vocabulary:>10} {rows:>6}  {way:22} {times[way]:7.3f} s {ratio:5.2f} x {memory[way]:7.2f} chunks")


if __name__ == "__main__":
    sys.exit(main())
