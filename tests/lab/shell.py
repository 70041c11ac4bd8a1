"""Running programs for the lab: always with a limit, and with what they said in the error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from lab.needs import SBIN


def sh(argv: Sequence[str], *, ok: Sequence[int] | None = (0,), seconds: float = 20.0, stdin: bytes = b"") -> str:
    """Standard output of `argv`; another exit code than `ok` (None: any) is an error."""
    done = run(argv, seconds=seconds, stdin=stdin)
    if ok is not None and done.returncode not in ok:
        said = (done.stderr + done.stdout).decode("utf-8", "replace").strip()
        raise RuntimeError(f"exit code {done.returncode} from {' '.join(argv)}: {said}")
    return done.stdout.decode("utf-8", "replace")


def run(argv: Sequence[str], *, seconds: float = 20.0, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PATH": SBIN, "LC_ALL": "C.UTF-8"}
    return subprocess.run(list(argv), input=stdin, capture_output=True, timeout=seconds, env=env, check=False)
