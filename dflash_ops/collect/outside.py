"""One look at a job from outside: two questions that start nothing there, to its machine and to the layer below.

Unlike `status` it never has the resident look anew (which would start a dead one): that it is dead is the news.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from typing import Any, TypeVar

from dflash_ops.collect import kernel
from dflash_ops.contracts import Finding, Snapshot, from_dict
from dflash_ops.contracts.evidence import Evidence
from dflash_ops.errors import (
    ContainerLocked,
    ContainerMissing,
    ContainerStopped,
    ContractError,
    DflashError,
    HostError,
)
from dflash_ops.hosts.base import Host
from dflash_ops.hosts.lxc import CLEAN
from dflash_ops.inventory import Job
from dflash_ops.resident.daemon import LoopRecord
from dflash_ops.resident.lease import TTL_S, LeaseRecord
from dflash_ops.supervise.detect import gpu
from dflash_ops.supervise.detect.history import History
from dflash_ops.supervise.outside import LOCKED, STOPPED, UNREACHABLE, Inside, Look, Memory

ASK_S = 20.0
Record = TypeVar("Record", LeaseRecord, LoopRecord)

#: `$1` root, `$2` a mark. Each file after a line `<mark> <name>`; of who is named by pid, its line in /proc as well.
PROBE = r"""printf '%s now\n' "$2"; date +%s
for f in snapshot.json resident.json lease; do printf '\n%s %s\n' "$2" "$f"; cat -- "$1/run/$f" 2>/dev/null
case $f in snapshot.json) continue;; esac
p=$(sed -n 's/.*"pid": *\([0-9][0-9]*\).*/\1/p' "$1/run/$f" 2>/dev/null | head -n 1)
printf '\n%s %s.stat\n' "$2" "$f"; [ -n "$p" ] && cat "/proc/$p/stat" 2>/dev/null
done; printf '\n%s end\n' "$2"; exit 0
"""

_FAULTS: tuple[tuple[type[HostError], str], ...] = (
    (ContainerStopped, "container_stopped"),
    (ContainerLocked, "container_locked"),
    (ContainerMissing, "container_missing"),
    (HostError, UNREACHABLE),
)


def look(host: Host, job: Job, below: kernel.KernelHost, memory: Memory) -> Look:
    """Where the job stands, and what the kernel below it said.

    Args:
        below: the machine whose kernel it runs on.
        memory: of the looks before; without one no line of the kernel is told, for all are old.

    Raises:
        ContractError: the machine answered, and not in the agreed form.
    """
    mark = f"dflash-{secrets.token_hex(8)}"
    ahead_s = memory.seen.ahead_s if memory.seen is not None else 0.0
    try:
        done = host.run(["sh", "-c", PROBE, "sh", job.root, mark], deadline=ASK_S)
    except HostError as error:
        fault = next(word for kind, word in _FAULTS if isinstance(error, kind))
        detail = f"{error.what} ({error.where})" if error.where else error.what
        # Of a container that went away the kernel may know why.
        asked = fault != UNREACHABLE and below.container is not None
        lines, until = _kernel(below, memory.kernel_t, ahead_s) if asked else ((), None)
        now = time.time()
        if fault == STOPPED and LOCKED in memory.since and now < memory.lock_next:
            return Look(now, LOCKED, memory.texts.get(LOCKED, detail), kernel=lines, kernel_t=until, asked=False)
        if fault == STOPPED and (lock := _lock(below)):
            fault, detail = LOCKED, f"the container does not run, and is locked by: {lock}"
        return Look(time.time(), fault, detail, kernel=lines, kernel_t=until)
    inside = _inside(done.text, mark, f"{host.name}: {job.root}")
    if inside is not None:
        ahead_s = inside.ahead_s
    t = time.time()
    lines, until = _kernel(below, memory.kernel_t, ahead_s)
    return Look(t, inside=inside, kernel=lines, kernel_t=until)


def _lock(below: kernel.KernelHost) -> str:
    """Who holds a stopped container (pct's word, such as `backup`); "" where nobody does, or pct does not say."""
    if below.container is None:
        return ""
    try:
        done = below.host.run(["env", "-i", *CLEAN, "pct", "config", str(below.container)], deadline=ASK_S)
    except HostError:
        return ""  # then a start will be told
    found = re.search(r"(?m)^lock: ([\w-]+)$", done.text)
    return found[1] if done.rc == 0 and found is not None else ""


def _inside(text: str, mark: str, where: str) -> Inside | None:
    parts: dict[str, str] = {}
    for piece in text.split(f"{mark} ")[1:]:
        name, _, body = piece.partition("\n")
        parts[name.strip()] = body.strip()
    if "end" not in parts or not parts["now"].isdigit():
        raise ContractError("the machine answered in part only", where, "ask again")
    if not parts["snapshot.json"]:
        return None
    snapshot = from_dict(Snapshot, _object(parts["snapshot.json"], f"{where}/run/snapshot.json"), "snapshot.json")
    now = float(parts["now"])
    held = _record(LeaseRecord, parts, "lease", where)
    # As `resident.lease.holder` asks: what lies further ahead was written before a clock jumped back.
    live = held is not None and _lives(held, parts["lease.stat"]) and now < held.expires <= now + 2 * TTL_S
    resident = _record(LoopRecord, parts, "resident.json", where)
    return Inside(
        time.time(),
        snapshot.state,
        snapshot.detail,
        snapshot.attempt,
        snapshot.progress.step if snapshot.progress is not None else None,
        snapshot.since,
        max(0.0, now - snapshot.t),
        resident is not None and _lives(resident, parts["resident.json.stat"]),
        (held.owner or "?") if held is not None and live else "",
        now - time.time(),
    )


def _record(kind: type[Record], parts: dict[str, str], name: str, where: str) -> Record | None:
    """A file of the run folder; None where there is none."""
    if not parts[name]:
        return None
    return from_dict(kind, _object(parts[name], f"{where}/run/{name}"), f"{where}/run/{name}")


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ContractError("it is no JSON object", where, "look at it; the next start writes it anew")
    return said


def _lives(record: LeaseRecord | LoopRecord, stat: str) -> bool:
    """Whether the line of /proc is that of the process on record: same start time, no zombie."""
    fields = stat.rpartition(") ")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X") or not fields[19].isdigit():
        return False
    return record.start == int(fields[19])


def _kernel(below: kernel.KernelHost, since: float | None, ahead_s: float) -> tuple[tuple[Finding, ...], float | None]:
    """Xid, ECC and OOM lines since then (none at the first look), and up to when (our clock) they are known now: None
    where the log cannot be read; its lines are still there at the next look.

    Args:
        ahead_s: that machine's clock minus ours.
    """
    t = time.time()
    if since is None:
        return (), t
    now = t + ahead_s
    try:
        part, _ = kernel.fetch(below, Evidence(0, True, now, (), started=since + ahead_s, ended=None))
    except DflashError:
        return (), None
    if part.status == "missing":
        return (), None
    lines = tuple(part.data.decode("utf-8", "replace").splitlines())
    found = gpu.detect(History(now, kernel=lines))
    cards = found if isinstance(found, list) else []
    kills = [
        Finding("oom_kill", "the kernel killed a process for want of memory", now, severity="alarm", evidence=(line,))
        for line in lines
        if "Killed process" in line  # `oom-kill:`, some lines before it, is of the same kill
    ]
    return (*cards, *kills[:16]), t
