"""What the demo's tests share: the trainer's command line as a real process, and a very small demo target."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

from trainer.cli import main
from trainer.demo.target import Recipe

REPO = Path(__file__).resolve().parents[2]
#: Seconds that no call here comes near, even on a machine that is busy with other things.
LIMIT = 120.0
#: A target that is built in a second.
TINY = Recipe(steps=4, batch=2, length=64, train_prompts=30, held_out_prompts=4)
SMALL = ["--steps", "4", "--prompts", "40", "--held-out", "6", "--threads", "1"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m trainer ...` to its end, in this process: a start of torch for each call would take minutes."""
    argv = [str(a) for a in arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def call_apart(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own."""
    with start(*arguments) as process:
        out, err = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(list(map(str, arguments)), process.returncode, out, err)


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
