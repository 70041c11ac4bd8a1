"""The end of what a test started under one root: no supervisor may start it again behind the test's back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

#: A wrapper sees to it that somebody watches when its trainer has ended.
_SUPERVISORS = (b"loop", b"repair", b"wrap", b"start", b"switch")


def end_supervisors(root: Path) -> None:
    """Kills the resident's loop, its guard, its passes and wrappers, until none is left; to be called first."""
    for _ in range(100):
        found = [pid for pid, words in _processes() if _below(root, words) and set(words) & set(_SUPERVISORS)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    raise AssertionError(f"supervisors below {root} outlived SIGKILL: {found}")


def kill_recorded(root: Path) -> None:
    """Kills what the records of the job in `root` name: launchers, wrappers, the loop; behind `end_supervisors`."""
    run = root / "run"
    for path in [*run.glob("attempts/*/start.json"), run / "resident.json"]:
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(path.read_text("utf-8"))
            for one in (said.get("launcher"), said.get("wrapper"), said):
                if isinstance(one, dict) and "pid" in one:
                    _kill(one["pid"], one["start"])


def _kill(pid: int, start: int) -> None:
    with contextlib.suppress(OSError):
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) == start:
            os.kill(pid, signal.SIGKILL)


def _below(root: Path, words: list[bytes]) -> bool:
    """Whether a word is this folder, or one below it."""
    own = str(root).encode()
    return any(word == own or word.startswith(own + b"/") for word in words)


def _processes() -> list[tuple[int, list[bytes]]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words != [b""]:  # a zombie has none
                    found.append((int(entry.name), words))
    return found
