"""How fast triage reads: lines a second on one core, against `grep -F` of all literals and against reading alone.

    python benchmarks/triage.py [--lines 400000] [--repeat 3]

Prints one row for each text: clean training output in six dialects, the same with a crash at its end, output in which
no two lines are alike, and a text wrapped at 80. Each number is the best of the repeats. Then the time of a whole
command on a 5,000-line log, start of the interpreter included, and the peak memory for a text of ten times the size.
"""
# ruff: noqa: E402, E501 - runs from a checkout; lines of logs are as long as they are

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from parts import best

from dflash_ops.collect.files import Found, chunks
from dflash_ops.playbooks import load_documents
from dflash_ops.triage import Source, Triage

CRASH = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/root/work/train.py", line 88, in main
[rank3]:     loss.backward()
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB.
"""
WORDS = [
    f"{a}{b}{c}"
    for a in ("tar", "mel", "vo", "kin", "sur")
    for b in ("a", "o", "ine", "u")
    for c in ("t", "sk", "ren", "p")
]


def training(lines: int, seed: int = 1) -> str:
    """Clean output of six dialects, one after the other."""
    rnd = random.Random(seed)
    out = []
    for i in range(lines // 6):
        a, b = rnd.random(), rnd.random()
        out += [
            f"dflash step={i}/500000 epoch={i / 1000:.3f} loss={2 + a:.4f} acc={b:.4f} tau={2 + b:.2f} block_tok_s={9000 + int(a * 5000)} ring={i % 9}/8",
            f"{{'loss': {2 + a:.4f}, 'grad_norm': {b:.4f}, 'learning_rate': {a:.4e}, 'epoch': {i / 100:.2f}}}",
            f"train: {i % 100:3d}%|{'█' * (i % 50)}{' ' * (50 - i % 50)}| {i}/{lines} [01:12<01:30,  {9 * a:.2f}it/s, loss={2 + a:.3f}]",
            f"[rank{i % 8}]:2026-11-29 16:24:{i % 60:02d},123 - root - INFO - step: {i:5d}  loss: {2 + a:7.4f}  grad_norm: {b:.4f}  tps: 7,012",
            f"iter {i}: loss {2 + a:.4f}, time {300 * b:.2f}ms, mfu {50 * a:.2f}%",
            f" iteration {i:8d}/  500000 | consumed samples: {i * 8:12d} | lm loss: {2 + a:.6E} | grad norm: {b:.3f} |",
        ]
    return "\n".join(out) + "\n"


def prose(lines: int) -> str:
    """A log in which no two lines are alike (a model's samples)."""
    rnd = random.Random(2)
    return "\n".join(" ".join(rnd.choices(WORDS, k=14)) for _ in range(lines)) + "\n"


def wrapped(text: str, width: int = 80) -> str:
    return "\n".join(line[at : at + width] for line in text.split("\n") for at in range(0, max(1, len(line)), width))


def read_all(path: Path) -> int:
    return sum(len(piece) for piece in chunks(Found(str(path), path)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=400_000)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    triage = Triage(load_documents())
    clean = training(args.lines)
    texts = {
        "clean": clean,
        "crash at the end": clean + CRASH,
        "no two lines alike": prose(args.lines),
        "wrapped at 80": wrapped(clean),
    }
    with tempfile.TemporaryDirectory() as folder:
        literals = Path(folder) / "literals"
        literals.write_text(
            "\n".join(sorted({s.literal for s in triage.playbooks.signatures if "\n" not in s.literal})) + "\n"
        )
        ratios: dict[str, float] = {}
        print(f"{len(triage.playbooks.kinds)} kinds, {len(triage.playbooks.signatures)} texts")
        print(f"{'text':20} {'MB':>6} {'lines':>9} {'triage':>13} {'grep -F':>13} {'reading':>13}   lines/s")
        for name, text in texts.items():
            path = Path(folder) / "log"
            path.write_text(text, encoding="utf-8")
            lines = text.count("\n")
            ours = best(args.repeat, lambda p=path: triage.diagnose([Source("log", chunks(Found("log", p)))]))  # type: ignore[misc]
            grep = best(
                args.repeat,
                lambda p=path: subprocess.run(
                    ["grep", "-c", "-F", "-f", str(literals), str(p)], stdout=subprocess.DEVNULL, check=False
                ),  # type: ignore[misc]
            )
            reading = best(args.repeat, lambda p=path: read_all(p))  # type: ignore[misc]
            print(
                f"{name:20} {len(text) / 1e6:6.1f} {lines:9,} {lines / ours:13,.0f} {lines / grep:13,.0f} {lines / reading:13,.0f}"
            )
            ratios[name] = grep / ours
        for name, ratio in ratios.items():
            print(f"ratio  {name}, of grep's speed: {ratio:.2f}")
        small = Path(folder) / "small.log"
        small.write_text(training(5_000) + CRASH, encoding="utf-8")
        command = [sys.executable, "-m", "dflash_ops.cli.triage", "--json", str(small)]
        whole = best(
            max(3, args.repeat),
            lambda: subprocess.run(
                command, stdout=subprocess.DEVNULL, cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
            ),
        )
        print(f"a whole command on {small.read_text(encoding='utf-8').count(chr(10)):,} lines: {whole:.2f} s")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    piece = clean.encode()
    triage.diagnose([Source("large", (piece for _ in range(10)))])
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory grew by {(after - before) / 1024:.1f} MiB over a text of {10 * len(piece) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
