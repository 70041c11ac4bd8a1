"""What only the layer below the job knows: the kernel's log and the container's memory events, in one exec.

A container seldom may read its host's kernel log, so the host is asked. The rule here: a log that may not be read is
missing with the kernel's own words, and never an empty one (journalctl says "No entries" to whom it hides them).
"""

from __future__ import annotations

import math
import re
import secrets
import time
from dataclasses import dataclass

from dflash_ops.contracts.evidence import Evidence, Part
from dflash_ops.errors import ContractError, DflashError
from dflash_ops.hosts.base import Host
from dflash_ops.hosts.factory import open_host
from dflash_ops.inventory import Inventory, Job, LxcHost

ASK_S = 30.0
#: Seconds around the attempt: the kernel writes a little before and after what a program notices.
BEFORE_S = 2.0
AFTER_S = 120.0
#: Seconds after which progress proves that the attempt outlived an OOM kill.
OUTLIVED_S = 300.0

#: `$1` mark of a section's end, `$2` container or empty, `$3` a process of the job or empty, `$4` start, epoch seconds.
#: Each section ends with a line `<mark> <name>`; the last one's end says that nothing was cut.
#: The kernel stamps with the monotonic clock; /proc/uptime is a container's own where lxcfs covers it.
ASK = r"""{
LC_ALL=C; export LC_ALL; m=$1
printf 'now %s\n' "$(date +%s)"
printf 'up %s\n' "$(python3 -Sc 'import time; print(time.monotonic())' 2>/dev/null || cut -d' ' -f1 /proc/uptime)"
printf '\n%s clock\n' "$m"
dmesg 2>&1; printf '\n%s dmesg\n' "$m"
journalctl -k -b -q --no-pager -o short-monotonic --since "@$4" 2>&1 | tail -c 8388608
printf '\n%s journal\n' "$m"
for f in ${2:+"/sys/fs/cgroup/lxc/$2/memory.events" "/sys/fs/cgroup/memory/lxc/$2/ns/memory.oom_control" \
"/sys/fs/cgroup/memory/lxc/$2/memory.oom_control"}; do
[ -r "$f" ] && { printf '%s\n' "$f"; cat "$f"; break; }; done
if [ -z "$2" ]; then
p=self; [ -n "$3" ] && [ -r "/proc/$3/cgroup" ] && p=$3
sed -n -e 's/^0::/u /p' -e 's/^[0-9]*:memory:/m /p' "/proc/$p/cgroup" 2>/dev/null | while read -r v d; do
[ "$v" = m ] && b=/sys/fs/cgroup/memory || b=/sys/fs/cgroup
while f="$b${d%/}/memory.events"; g="$b${d%/}/memory.oom_control"; [ ! -r "$f" ] && [ ! -r "$g" ] && [ -n "$d" ] &&
[ "$d" != / ]; do d=${d%/*}; done
[ -r "$f" ] || f=$g
[ -r "$f" ] && { printf '%s\n' "$f"; cat "$f"; break; }
done
fi; printf '\n%s memory\n' "$m"; exit 0
}
"""

_STAMP = re.compile(r"^(?:<\d+>)?\[\s*(\d+)\.(\d+)\] ?(.*)$")
_OOM = re.compile(r"oom-kill:|oom_reaper|oom-killer|Killed process|Out of memory|Memory cgroup out of memory")
_OTHERS = re.compile(r"oom-kill:.*?task_memcg=/lxc(?:\.payload\.|/)(\d+)\b")


@dataclass(frozen=True)
class KernelHost:
    """The machine whose kernel a job runs on, and the job's container on it (None: no container)."""

    host: Host
    container: int | None = None


def kernel_host(inventory: Inventory, job: Job) -> KernelHost:
    """Where a job's kernel log is read: of a container on the host that it goes through, else on its own machine.

    Raises:
        UsageError: that host is of a kind that this version does not reach.
    """
    host = inventory.host_of(job)
    if isinstance(host, LxcHost):
        return KernelHost(open_host(inventory, host.via), host.id)
    return KernelHost(open_host(inventory, host.name))


def fetch(place: KernelHost, evidence: Evidence) -> tuple[Part, Part]:
    """The kernel's log of the attempt's time, and the memory events of its container (or cgroup).

    Raises:
        HostError: the host cannot be asked. ContractError: it answered in part only.
    """
    mark = f"dflash-{secrets.token_hex(8)}"
    container = "" if place.container is None else str(place.container)
    launcher = "" if evidence.launcher is None else str(evidence.launcher)
    since = evidence.started if evidence.started is not None else evidence.now
    argv = ["sh", "-s", "--", mark, container, launcher, str(math.floor(since - BEFORE_S))]
    done = place.host.run(argv, deadline=ASK_S, stdin=ASK.encode())
    found = _sections(done.text, mark)
    if {"clock", "dmesg", "journal", "memory"} - set(found):
        said = (done.error_text or done.text).strip()[-300:] or f"exit code {done.rc}"
        raise ContractError(f"the host answered in part only: {said}", place.host.name, "ask again")
    return _kernel(found, evidence, place.container), _memory(found["memory"])


def asked(inventory: Inventory, job: Job, evidence: Evidence) -> tuple[Part, Part]:
    """`fetch` at the job's kernel host; where that fails, two parts that say why."""
    try:
        place = kernel_host(inventory, job)
        try:
            return fetch(place, evidence)
        finally:
            place.host.close()
    except DflashError as error:
        return (
            Part("kernel log", "kernel", status="missing", note=error.what),
            Part("memory events", "facts", status="missing", note=error.what),
        )


def _sections(text: str, mark: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    for match in re.finditer(rf"^{re.escape(mark)} (\w+)$", text, re.MULTILINE):
        found[match[1]] = text[at : match.start()].strip("\n")
        at = match.end()
    return found


def _kernel(found: dict[str, str], evidence: Evidence, container: int | None) -> Part:
    """From dmesg, else from the journal; the reason of both where neither may be read."""
    name = "kernel log"
    clock = dict(line.split(" ", 1) for line in found["clock"].splitlines() if " " in line)
    try:
        boot = float(clock["now"]) - float(clock["up"])
    except (KeyError, ValueError):
        return Part(name, "kernel", status="missing", note="the host's clock could not be read (date, /proc/uptime)")
    dmesg = found["dmesg"]
    rows = _rows(dmesg, boot) or _rows(found["journal"], boot)
    if not rows:
        why = dmesg.strip().splitlines()[-1:] or ["dmesg shows nothing"]
        return Part(name, "kernel", status="missing", note=f"{why[0][:200]}; the journal shows none of it either")
    oldest = rows[0][0]
    rows, outlived = _of_attempt(rows, evidence, container)
    # The day's time, and not seconds since boot, is what a person can lay beside a log.
    lines = [f"[{time.strftime('%a %b %e %H:%M:%S %Y', time.gmtime(at))}] {said}" for at, said in rows]
    notes = [f"{len(lines)} lines of the attempt's time, UTC"]
    if evidence.started is not None and oldest > max(evidence.started, boot + 60.0):
        notes.append("older ones are gone from its buffer")
    if outlived:
        notes.append(f"{outlived} lines left out: OOM kills of other containers, or that it outlived")
    return Part(name, "kernel", "".join(f"{line}\n" for line in lines).encode(), note="; ".join(notes))


def _rows(text: str, boot: float) -> list[tuple[float, str]]:
    """(seconds since the epoch, text) of each stamped line."""
    return [(boot + float(f"{m[1]}.{m[2]}"), m[3]) for line in text.splitlines() if (m := _STAMP.match(line))]


def _of_attempt(
    rows: list[tuple[float, str]], evidence: Evidence, container: int | None
) -> tuple[list[tuple[float, str]], int]:
    """Lines of the attempt's time, without OOM kills of others and such as it outlived; how many those are."""
    begin = (evidence.started if evidence.started is not None else evidence.now) - BEFORE_S
    end = (evidence.ended if evidence.ended is not None else evidence.now) + AFTER_S
    alive_at = (evidence.progressed or 0.0) - OUTLIVED_S
    kept: list[tuple[float, str]] = []
    left_out = 0
    foreign = False  # the last `oom-kill:` line was about another container: so is the `Killed process` after it
    for at, said in rows:
        if match := _OTHERS.search(said):
            foreign = container is not None and int(match[1]) != container
        if not begin <= at <= end:
            continue
        if _OOM.search(said) and (foreign or at < alive_at):
            left_out += 1
            continue
        kept.append((at, said))
    return kept, left_out


def _memory(text: str) -> Part:
    """Counters since the container (or cgroup) was made: they tell that something was killed, not when."""
    if not text:
        return Part("memory events", "facts", status="missing", note="no memory.events of its cgroup can be read")
    path, _, counters = text.partition("\n")
    return Part("memory events", "facts", counters.encode() + b"\n", note=f"{path}, since it was made")
