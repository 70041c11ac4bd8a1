"""What a redraw of `status --watch` writes, of what changed, and of what rich's Live writes for the same screens.

    python benchmarks/watch.py [--redraws 60]

A job that steps: each redraw has another step, loss, tau, rates, shares and cards. Both write the same lines to a
terminal that counts cells (tests/view/vt.py; for Live a line that is written anew counts with its width).
"""

from __future__ import annotations

import argparse
import io
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests/view")]

from rich.color import ColorSystem  # noqa: E402
from rich.console import Console, Group  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.text import Text  # noqa: E402
from screens import STEPPING, one  # noqa: E402
from vt import Screen  # noqa: E402

from dflash_ops.contracts import Snapshot  # noqa: E402
from dflash_ops.view.paint import Painter  # noqa: E402
from dflash_ops.view.watch import UNICODE, Choice, Place, frame  # noqa: E402


def later(n: int, rng: random.Random) -> Snapshot:
    """The job after `n` more steps."""
    assert STEPPING.progress is not None
    progress = replace(
        STEPPING.progress, step=320 + n, loss=2.1 + rng.gauss(0, 0.02), tau=3.2 + rng.gauss(0, 0.05),
        block_tok_s=13_500 + rng.gauss(0, 150), ctx_tok_s=20_100 + rng.gauss(0, 200), ring_ready=rng.randint(0, 8),
        eta_s=412.0 - n, epoch=1.28 + n / 250,
    )  # fmt: skip
    workers = {
        name: replace(w, wait=(w.wait or 0) + rng.gauss(0, 0.02), compute=(w.compute or 0) + rng.gauss(0, 0.02))
        for name, w in STEPPING.workers.items()
    }
    gpus = tuple(
        replace(g, util=min(1.0, 0.95 + rng.gauss(0, 0.02)), power_w=640 + rng.gauss(0, 10)) for g in STEPPING.gpus
    )
    curves = {key: (*values[1:], values[-1] * (1 + math.sin(n) / 100)) for key, values in STEPPING.curves.items()}
    return replace(STEPPING, progress=progress, workers=workers, gpus=gpus, curves=curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraws", type=int, default=60)
    count = parser.parse_args().redraws
    print("   size   cells changed  written  ratio  rich's Live   bytes    Live's bytes   ms a redraw")
    worst = 0.0
    for width, height in ((80, 24), (120, 40), (200, 60)):
        rng = random.Random(7)
        screens = [frame([one(later(n, rng))], Choice(Place.JOB), width, height, UNICODE) for n in range(count + 1)]
        painter, vt = Painter(width, height, ColorSystem.STANDARD), Screen(width, height)
        vt.feed(painter.paint(screens[0]))
        began, written = time.perf_counter(), 0
        said = [painter.paint(lines) for lines in screens[1:]]
        spent = (time.perf_counter() - began) / count
        for text in said:
            vt.feed(text)
            written += len(text.encode())
        redraws = vt.redraws[1:]
        changed, cells = sum(r.changed for r in redraws), sum(r.written for r in redraws)
        live_cells, live_bytes = live(screens, width, height)
        ratio = cells / changed
        worst = max(worst, ratio)
        print(
            f"{width:>4}x{height:<4} {changed / count:>10.0f} {cells / count:>10.0f} {ratio:>6.2f} "
            f"{live_cells / count:>12.0f} {written / count:>8.0f} {live_bytes / count:>12.0f} {1000 * spent:>11.1f}"
        )
    print(f"cells written, of those that changed: {worst:.2f}")


def live(screens: list[list[Text]], width: int, height: int) -> tuple[int, int]:
    """Cells and bytes that rich's Live writes for the same screens, without the first."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=height, force_terminal=True, color_system="standard", highlight=False
    )
    total = 0
    with Live(console=console, auto_refresh=False, screen=True) as shown:
        for n, lines in enumerate(screens):
            if n == 1:
                out.seek(0)
                out.truncate()
            shown.update(Group(*lines), refresh=True)
            total += width * height if n else 0
        text = out.getvalue()
    return total, len(text.encode())


if __name__ == "__main__":
    main()
