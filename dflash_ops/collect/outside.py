"""One look at a job from outside: two questions that start nothing there, to its machine and to the layer below.

Unlike `status` it never has the resident look anew (which would start a dead one): that it is dead is the news.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from dflash_ops.collect import kernel
from dflash_ops.contracts import Finding, Process, Snapshot, from_dict
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
from dflash_ops.inventory import Job
from dflash_ops.supervise.detect import gpu
from dflash_ops.supervise.detect.history import History
from dflash_ops.supervise.outside import UNREACHABLE, Inside, Look

ASK_S = 20.0

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


def look(host: Host, job: Job, below: kernel.KernelHost, since: float | None) -> Look:
    """Where the job stands, and what the kernel below it said.

    Args:
        below: the machine whose kernel it runs on.
        since: time of the look before, by our clock; None: the first one, which tells no old lines of the kernel.

    Raises:
        ContractError: the machine answered, and not in the agreed form.
    """
    mark = f"dflash-{secrets.token_hex(8)}"
    try:
        done = host.run(["sh", "-c", PROBE, "sh", job.root, mark], deadline=ASK_S)
    except HostError as error:
        fault = next(word for kind, word in _FAULTS if isinstance(error, kind))
        detail = f"{error.what} ({error.where})" if error.where else error.what
        # Of a container that went away the kernel may know why.
        lines = _kernel(below, since) if fault != UNREACHABLE and below.container is not None else ()
        return Look(time.time(), fault, detail, kernel=lines)
    inside = _inside(done.text, mark, f"{host.name}: {job.root}")
    return Look(time.time(), inside=inside, kernel=_kernel(below, since))


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
    held = _object(parts["lease"], f"{where}/run/lease") if parts["lease"] else {}
    expires = held.get("expires")
    live = _lives(held, parts["lease.stat"]) and isinstance(expires, (int, float)) and expires > now
    resident = _object(parts["resident.json"], f"{where}/run/resident.json") if parts["resident.json"] else {}
    return Inside(
        time.time(),
        snapshot.state,
        snapshot.detail,
        snapshot.attempt,
        snapshot.progress.step if snapshot.progress is not None else None,
        snapshot.since,
        max(0.0, now - snapshot.t),
        _lives(resident, parts["resident.json.stat"]),
        str(held.get("owner") or "?") if live else "",
    )


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ContractError("it is no JSON object", where, "look at it; the next start writes it anew")
    return said


def _lives(record: dict[str, Any], stat: str) -> bool:
    """Whether the line of /proc is that of the process on record: same start time, no zombie."""
    fields = stat.rpartition(") ")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X") or not fields[19].isdigit():
        return False
    return Process(int(record.get("pid") or 0), int(record.get("start") or 0)).start == int(fields[19])


def _kernel(below: kernel.KernelHost, since: float | None) -> tuple[Finding, ...]:
    """Xid, ECC and OOM lines since then; none where the log may not be read, or at the first look."""
    if since is None:
        return ()
    now = time.time()
    try:
        part, _ = kernel.fetch(below, Evidence(0, True, now, (), started=since, ended=None))
    except DflashError:
        return ()  # it says nothing now; its lines are still there at the next look
    lines = tuple(part.data.decode("utf-8", "replace").splitlines())
    found = gpu.detect(History(now, kernel=lines))
    cards = found if isinstance(found, list) else []
    kills = [
        Finding("oom_kill", "the kernel killed a process for want of memory", now, severity="alarm", evidence=(line,))
        for line in lines
        if "Killed process" in line or "oom-kill:" in line
    ]
    return (*cards, *kills[:16])
