"""What the demo's tests share: the trainer's command line as a real process, and a very small demo target."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
#: Seconds that no call here comes near, even on a machine that is busy with other things.
LIMIT = 120.0
SMALL = ["--steps", "4", "--prompts", "40", "--held-out", "6", "--threads", "1"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m trainer ...` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "trainer", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
        cwd=REPO,
        check=False,
    )


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """`python -m trainer ...`, to be killed by the test."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=REPO,
    )
