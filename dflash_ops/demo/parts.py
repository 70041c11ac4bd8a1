"""The trainer's own commands, run on this machine: their progress goes to the terminal, their answer comes back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_ops.bundle import bundled
from dflash_ops.errors import CommandFailed, DeadlineExceeded, DflashError

#: Longest time for one part, seconds; each takes minutes at most on two cores.
LIMIT_S = 3600.0
#: Seconds that an interrupted part has to end by itself.
PATIENCE_S = 10.0

IMPORTS = ("torch", "transformers", "safetensors", "tokenizers", "numpy")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which `python -m trainer` finds the bundled trainer."""
    own = environ.get("PYTHONPATH")
    place = str(bundled("trainer").parent)
    return {**environ, "PYTHONPATH": f"{place}:{own}" if own else place}


def check_interpreter(interpreter: str, environ: Mapping[str, str]) -> None:
    """Raises CommandFailed unless `interpreter` runs here and has what the trainer imports (nothing is imported)."""
    code = f"import importlib.util as u; print(*[m for m in {IMPORTS!r} if u.find_spec(m) is None])"
    try:
        done = subprocess.run(
            [interpreter, "-c", code], capture_output=True, text=True, timeout=60.0, env=dict(environ), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(
            f"the demo's Python does not run: {error}", interpreter, "correct `interpreter` of the job in the inventory"
        ) from error
    missing = done.stdout.split()
    if done.returncode != 0 or missing:
        what = f"lacks {', '.join(missing)}" if missing else f"ended with code {done.returncode}: {done.stderr[-300:]}"
        raise CommandFailed(
            f"the demo's Python {what}",
            interpreter,
            "pip install 'dflash-ops[trainer]' there (README: how large is torch?), or name another `interpreter`",
        )


def call(interpreter: str, arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """`python -m trainer ARGUMENTS --json` to its end: the object on the last line of its output.

    Standard error is this process's own. After Ctrl-C the part, which got it too, is given time to end.

    Raises:
        CommandFailed: it ended with another code than 0 (its own words are on standard error already).
        DeadlineExceeded: it took longer than LIMIT_S.
        KeyboardInterrupt: Ctrl-C.
    """
    name = arguments[0]
    argv = [interpreter, "-m", "trainer", *arguments, "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment(environ)) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DeadlineExceeded(
                f"`trainer {name}` took longer than {LIMIT_S:.0f} s",
                " ".join(argv),
                "look at what the machine is doing",
            ) from None
        except KeyboardInterrupt:
            try:
                process.wait(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode != 0:
        raise CommandFailed(
            f"`trainer {name}` ended with code {process.returncode}; what it said stands above",
            " ".join(argv),
            "mend that, and call dflash-ops demo again: it goes on where it stood",
            rc=process.returncode,
        )
    try:
        answer = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise DflashError(
            f"`trainer {name}` gave no answer that can be read", " ".join(argv), f"it said: {output[-300:]}"
        )
    return answer


def threads() -> int:
    """CPU threads for a part that has the machine to itself."""
    return min(8, len(os.sched_getaffinity(0)))
