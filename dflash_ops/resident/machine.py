"""Facts of this machine that preflight judges: memory, disk, devices, what a subprocess says.

The rule here: reading a fact never hangs and never raises for an absent source: what is not known is None, and the
check that needed it says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.supervise import nvidia


@dataclass(frozen=True)
class Said:
    """What a subprocess said: `rc` None = it had to be ended at its deadline; `error` = it could not be started."""

    rc: int | None
    out: str
    err: str
    error: OSError | None = None


def ask(argv: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Said:
    """Run `argv` for at most `seconds`.

    A process in uninterruptible sleep (a wedged driver) cannot be waited for even after KILL, so it is left behind.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        return Said(None, "", str(error), error)
    try:
        out, err = process.communicate(timeout=seconds)
        return Said(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            out, err = b"", b""
        return Said(None, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def nearest_folder(path: Path) -> Path:
    """`path`, or the nearest one above it that exists (what a mkdir -p would start from)."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


@dataclass(frozen=True)
class Room:
    """Free room for this user: bytes, and inodes (None: the file system counts none)."""

    bytes: int
    inodes: int | None
    total: int


def room(path: Path) -> Room | None:
    try:
        info = os.statvfs(nearest_folder(path))
    except OSError:
        return None
    return Room(info.f_bavail * info.f_frsize, info.f_favail if info.f_files else None, info.f_blocks * info.f_frsize)


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, str]:
    """Bytes that new processes may use, and what bounds them: MemAvailable or the cgroup's limit, the smaller one."""
    found: list[tuple[int, str]] = []
    if (kib := meminfo(proc, "MemAvailable")) is not None:
        found.append((kib * 1024, "MemAvailable"))
    for limit, used in _cgroup_limits(proc, cgroup):
        found.append((max(0, limit - used), "the cgroup's memory limit"))
    return min(found) if found else (None, "")


def meminfo(proc: Path, key: str) -> int | None:
    """One line of /proc/meminfo, KiB."""
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0])
    return None


def _cgroup_limits(proc: Path, cgroup: Path) -> Iterable[tuple[int, int]]:
    """(limit, used without what the kernel can drop) of our cgroup and those above it, both versions."""
    for line in _read(proc / "self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base, names, drop = cgroup, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            base, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            drop = "total_inactive_file"
        else:
            continue
        folder = base / path.strip("/")
        while folder.is_relative_to(base):
            limit, used = (_read(folder / n).strip() for n in names)
            # "max", or v1's huge number, is no limit
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
                yield int(limit), int(used) - _stat(folder / "memory.stat", drop)
            folder = folder.parent


def _stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def tree_memory(pid: int, proc: Path = Path("/proc")) -> int:
    """Bytes of memory held by `pid` and all below it (anonymous and shared): what ending them gives back.

    Shared pages are counted once: the largest single share, since workers map the same ring.
    """
    anonymous, shared = 0, 0
    for one in _tree(pid, proc):
        fields = dict(line.partition(":")[::2] for line in _read(proc / str(one) / "status").splitlines())
        anonymous += _kib(fields.get("RssAnon", ""))
        shared = max(shared, _kib(fields.get("RssShmem", "")))
    return anonymous + shared


def _kib(text: str) -> int:
    words = text.split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else 0


def _tree(pid: int, proc: Path) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            # the name in parentheses may hold spaces and parentheses itself: the last ")" ends it
            after = _read(entry / "stat").rpartition(")")[2].split()
            if len(after) > 1 and after[1].isdigit():
                children.setdefault(int(after[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += children.get(one, [])
    return found


@dataclass(frozen=True)
class Gpu:
    index: int
    total: int
    used: int


def gpus(seconds: float = 20.0) -> tuple[list[Gpu] | None, str]:
    """GPUs as nvidia-smi sees them (bytes), or None and why not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "nvidia-smi is not there"
    said = ask([program, *nvidia.ask_cards("")], seconds=seconds)
    if said.error is not None:
        return None, f"nvidia-smi cannot be run: {said.error.strerror}"
    if said.rc is None:
        return None, f"nvidia-smi did not answer within {seconds:.0f} s"
    if said.rc != 0:
        text = (said.err.strip() or said.out.strip()).splitlines()
        return None, f"nvidia-smi failed with {said.rc}" + (f": {text[0]}" if text else "")
    cards = nvidia.read_cards(said.out).gpus
    return [Gpu(card.index, card.mem_total or 0, card.mem_used or 0) for card in cards], ""


def driver(seconds: float = 20.0) -> tuple[str | None, str]:
    """The GPU driver's version, or None and why not."""
    try:
        # `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri ...`: no program that could hang
        words = Path("/proc/driver/nvidia/version").read_text("ascii", "replace").split("\n", 1)[0].split()
        found = next((w for w in words if w[:1].isdigit() and "." in w), None)
        if found is not None:
            return found, ""
    except OSError:
        pass
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "nvidia-smi is not there"
    said = ask([program, "--query-gpu=driver_version", "--format=csv,noheader"], seconds=seconds)
    line = said.out.strip().splitlines()[0].strip() if said.rc == 0 and said.out.strip() else ""
    return (line, "") if line[:1].isdigit() else (None, "nvidia-smi does not tell")


def version(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0): the numbers before the first part that is none."""
    numbers = []
    for part in text.replace("+", ".").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def in_range(found: str, wanted: str) -> bool:
    """Whether a version meets `>=2.11,<2.15` (only these two comparisons)."""
    have = version(found)
    for clause in filter(None, (c.strip() for c in wanted.split(","))):
        bound = version(clause.lstrip("<>="))
        width = max(len(have), len(bound))
        left, right = have + (0,) * (width - len(have)), bound + (0,) * (width - len(bound))
        if clause.startswith(">=") and left < right:
            return False
        if clause.startswith("<") and not clause.startswith("<=") and left >= right:
            return False
    return True
