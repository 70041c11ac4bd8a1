"""Where every process of an attempt stands, asked before any of them is ended: a hang that was killed explains nothing.

The rules here: looking must not harm. py-spy only reads, where it is installed. Else SIGUSR2 asks faulthandler,
but only a process that catches that signal is sent it (the kernel says so in SigCgt): the others would die of it. What
neither can tell (a stopped process, one inside a driver) is told by the kernel: state and wait channel. Every question
has a deadline, and one that gets no answer is a line that says so.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.contracts import Process
from dflash_ops.resident import proc
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import write_atomic

#: Seconds for py-spy, and for a process to answer the signal.
SPY_S = 10.0
SIGNAL_S = 2.0
#: Processes that are asked at most, and bytes of one answer.
MOST = 64
BYTES = 1 << 18
_STATES = {"R": "running", "S": "sleeping", "D": "inside the kernel", "T": "stopped", "t": "traced", "Z": "ended"}


@dataclass(frozen=True)
class Stack:
    """One process: its worker's name, its state letter, who told (`py-spy`, `faulthandler`, `kernel`), and what."""

    pid: int
    name: str
    state: str
    how: str
    text: str


def dump(attempt: Attempt, deadline_s: float = 60.0) -> list[Stack]:
    """The stacks of the launcher and of every living descendant, launcher first. Ends within about `deadline_s`.

    The bundled trainer's spares are left out: they have no part in the run, and would hide the odd one.
    """
    if attempt.start is None:
        return []
    launcher = attempt.start.launcher
    family = sorted(proc.family(launcher), key=lambda p: (p.start, p.pid))
    wanted = [p for p in (launcher, *family) if proc.alive(p) and _is_python(p.pid) and not _is_spare(p.pid)]
    end = time.monotonic() + deadline_s
    spy = shutil.which("py-spy")
    return [_one(process, attempt, spy, end) for process in wanted[:MOST]]


def save(attempt: Attempt, stacks: list[Stack]) -> Path:
    """evidence/stacks-<n>.txt of the attempt; triage reads it.

    Raises:
        OSError: it cannot be written.
    """
    folder = attempt.layout.path / "evidence"
    folder.mkdir(exist_ok=True)
    number = 1 + sum(1 for _ in folder.glob("stacks-*.txt"))
    path = folder / f"stacks-{number}.txt"
    write_atomic(path, render(stacks).encode())
    return path


def render(stacks: list[Stack]) -> str:
    return "".join(
        f"==== {s.name} pid {s.pid} state {s.state} ({_STATES.get(s.state, 'unknown')}) by {s.how} ====\n"
        f"{s.text.rstrip()}\n\n"
        for s in stacks
    )


def _one(process: Process, attempt: Attempt, spy: str | None, end: float) -> Stack:
    found = proc.stat(process.pid)
    state = found.state if found is not None else "?"
    name = _name(process, attempt)
    left = end - time.monotonic()
    if left <= 0:
        return Stack(process.pid, name, state, "kernel", "not asked: too little time was left")
    why = []
    if spy is not None:
        text, fault = _py_spy(spy, process.pid, min(SPY_S, left))
        if text:
            return Stack(process.pid, name, state, "py-spy", text)
        why.append(f"py-spy: {fault}")
    if state == "T":
        why.append("it is stopped (SIGSTOP or a debugger), so it cannot answer a signal")
    elif not _catches(process.pid, signal.SIGUSR2):
        why.append("it does not catch SIGUSR2, which faulthandler.register(signal.SIGUSR2) would change")
    else:
        text = _by_signal(process, attempt, min(SIGNAL_S, left))
        if text:
            return Stack(process.pid, name, state, "faulthandler", text)
        why.append(f"no answer to SIGUSR2 within {SIGNAL_S:g} s: it does not come back from where it is")
    return Stack(process.pid, name, state, "kernel", "\n".join([*_kernel(process.pid), *why]))


def _py_spy(spy: str, pid: int, seconds: float) -> tuple[str, str]:
    """(what it said, why it said nothing)."""
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    text = done.stdout[:BYTES].decode("utf-8", "replace")
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return (text, "") if done.returncode == 0 and text.strip() else ("", "".join(last) or f"exit {done.returncode}")


def _by_signal(process: Process, attempt: Attempt, seconds: float) -> str:
    """What faulthandler wrote: into the file that is its stderr, or through the launcher's pipe into the log."""
    path = _stderr(process.pid) or attempt.layout.log
    try:
        before = path.stat().st_size
    except OSError:
        return ""
    if not proc.send(process, signal.SIGUSR2):
        return ""
    end, text, quiet = time.monotonic() + seconds, "", 0
    while time.monotonic() < end and quiet < 3:
        time.sleep(0.05)
        try:
            with path.open("rb") as file:
                file.seek(before)
                new = file.read(BYTES).decode("utf-8", "replace")
        except OSError:
            return text
        begun = "most recent call first" in new
        quiet = quiet + 1 if begun and new == text else 0
        text = new
    return text if "most recent call first" in text else ""


def _stderr(pid: int) -> Path | None:
    try:
        path = Path(f"/proc/{pid}/fd/2").readlink()
    except OSError:
        return None
    return path if path.is_absolute() and path.is_file() else None


def _catches(pid: int, number: int) -> bool:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _kernel(pid: int) -> list[str]:
    lines = [f"waits in: {channel}" for channel in [_read(f"/proc/{pid}/wchan").strip("0\n ")] if channel]
    stack = _read(f"/proc/{pid}/stack").strip()
    return [*lines, *stack.splitlines()[:20]] or ["the kernel says nothing more"]


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return True  # not ours to look at, or just gone: what is asked then says so


def _is_spare(pid: int) -> bool:
    """Whether it waits for the place of a worker, whose name it gets with that place (docs/trainer-design.md)."""
    words = _read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
    if "trainer.worker_main" not in words or words[-1] != "spare":
        return False
    return _read(f"/proc/{pid}/comm").strip() not in words


def _name(process: Process, attempt: Attempt) -> str:
    """target0, drafter1, launcher; a foreign worker by its rank, else by its pid."""
    if attempt.start is not None and process == attempt.start.launcher:
        return "launcher"
    words = _read(f"/proc/{process.pid}/cmdline").split("\0")
    if "trainer.worker_main" in words:
        at = words.index("trainer.worker_main")
        if len(words) > at + 2:
            return words[at + 2]
    for entry in _read(f"/proc/{process.pid}/environ").split("\0"):
        if entry.startswith("RANK="):
            return f"rank{entry[5:]}"
    return f"pid{process.pid}"


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""
