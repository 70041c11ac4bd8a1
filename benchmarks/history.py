"""The run that this tool was born from, through the model of `dflash_ops.balance` (docs/rebalance.md).

    python benchmarks/history.py

Eight GPUs: 6 targets + 1 drafter made 6.5 block Ktok/s, 6+2 13.5; 5+3 was projected to make 19.5 and made 21.5. A batch
has 32,768 block tokens; averaging is every 50 steps. A drafter's seconds are taken from 6+1 alone. A target's were
never measured; what is known bounds them: 5 targets once fed 21.5 Ktok/s, so a batch takes one of them at most
`SLOWEST` seconds.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from dflash_ops.balance import Memory, Split, StageRates, Timing, plan, predict

BATCH = 32_768
MEASURED = {Split(6, 1): 6.5, Split(6, 2): 13.5, Split(5, 3): 21.5}
PROJECTED = {Split(5, 3): 19.5}
#: Seconds of a target for a batch: at most (5 of them fed 21.5 Ktok/s), and if it were twice as fast.
SLOWEST = 5 * BATCH / 21_500
FASTER = SLOWEST / 2


def rates(fill: float) -> StageRates:
    """As far as the history tells: a drafter's step from 6+1, no variance, and averaging that costs nothing."""
    return StageRates(
        split=Split(6, 1),
        target=Timing(fill, spread=0.3),
        drafter=Timing(BATCH / 6_500),
        average=Timing(0.0),
        block_tokens=BATCH,
        ctx_tokens=0.0,
        average_every=50,
    )


def main() -> int:
    print(f"a drafter's step: {BATCH / 6_500:.2f} s (from 6+1); a target's batch: at most {SLOWEST:.2f} s (from 5+3)")
    print(f"{'split':>5} {'measured':>9} {'projected':>9} {'model':>6} {'off':>7}  limited by")
    for split, seen in MEASURED.items():
        found = predict(rates(SLOWEST), split)
        model = found.block_tok_s / 1000
        projected = f"{PROJECTED[split]:.1f}" if split in PROJECTED else "-"
        print(f"{split!s:>5} {seen:9.1f} {projected:>9} {model:6.1f} {model / seen - 1:7.1%}  {found.limit}")
    for fill in (SLOWEST, FASTER):
        table = plan(rates(fill), 8, Split(6, 2), Memory(devices=8))
        best = table.row(table.best).prediction
        assert best is not None
        print(f"best of 8 with {fill:.2f} s a target's batch: {table.best}, {best.block_tok_s / 1000:.1f} Ktok/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
