"""Which worker stands elsewhere: the text of a stack dump -> the odd one out.

The rule here: in a hang most workers wait for the one that does not come. Stacks are compared by their innermost
frames (function and file name; line numbers and addresses differ between equal waits); where exactly one worker of a
role, or of all, stands elsewhere, it is named. No majority, no name: nothing is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

#: Innermost frames that are compared.
DEPTH = 3

#: `==== target0 pid 411 state S (sleeping) by py-spy ====`, as resident/stacks.py writes it.
_HEAD = re.compile(r"^==== (?P<name>\S+) pid (?P<pid>\d+) state (?P<state>\S+) .*====$")
#: faulthandler: `  File "/x/y.py", line 3 in f`; traceback: `  File "/x/y.py", line 3, in f`.
_FILE = re.compile(r'^\s*File "(?P<path>[^"]+)", line \d+,? in (?P<function>\S+)')
#: py-spy: `    wait (threading.py:320)`.
_SPY = re.compile(r"^\s+(?P<function>[\w.<>]+) \((?P<path>[^():]+)(?::\d+)?\)\s*$")
_THREAD = re.compile(r"^(?:Thread |Current thread )(?P<rest>.*)$")
_MAIN = re.compile(r'MainThread|^Current thread|"MainThread"')
#: Threads that only serve: where they stand says nothing of the worker.
_SERVING = frozenset({"_bootstrap", "_bootstrap_inner", "pin_memory_loop", "_pin_memory_loop"})


@dataclass(frozen=True)
class WorkerStack:
    """One worker: its name, the state letter of its process, and its innermost frames, innermost first."""

    name: str
    state: str
    frames: tuple[str, ...]

    @property
    def where(self) -> str:
        """What people read: the innermost frame, or the process state where no frame could be had."""
        return self.frames[0] if self.frames else {"T": "stopped", "D": "inside the kernel"}.get(self.state, "unknown")

    @property
    def key(self) -> tuple[str, ...]:
        return self.frames[:DEPTH] or (f"state {self.state}",)


@dataclass(frozen=True)
class Odd:
    """The worker that differs, where it stands, and where the others do."""

    worker: str
    where: str
    others: str

    def __str__(self) -> str:
        return f"{self.worker} stands in {self.where}, the others in {self.others}"


def parse(text: str) -> tuple[WorkerStack, ...]:
    """Workers of a dump, in its order. Text before the first head line belongs to nobody."""
    found: list[WorkerStack] = []
    head: Mapping[str, str] | None = None
    lines: list[str] = []
    for line in [*text.splitlines(), None]:
        match = _HEAD.match(line) if line is not None else None
        if match is None and line is not None:
            lines.append(line)
            continue
        if head is not None:
            found.append(WorkerStack(head["name"], head["state"], _frames(lines)))
        head, lines = (match.groupdict() if match is not None else None), []
    return tuple(found)


def _frames(lines: list[str]) -> tuple[str, ...]:
    """The main thread's innermost frames; of a dump that names no thread, the last one's (faulthandler's order)."""
    threads: list[tuple[bool, list[str]]] = []
    for line in lines:
        if _THREAD.match(line):
            threads.append((bool(_MAIN.search(line)), []))
            continue
        match = _FILE.match(line) or _SPY.match(line)
        if match is None:
            continue
        if not threads:
            threads.append((False, []))
        threads[-1][1].append(f"{match['function']} ({match['path'].replace(chr(92), '/').rsplit('/', 1)[-1]})")
    named = [frames for main, frames in threads if main and frames]
    plain = [frames for _, frames in threads if frames and frames[-1].split(" ")[0] not in _SERVING]
    chosen = named or plain[-1:] or [frames for _, frames in threads if frames][-1:]
    return tuple(chosen[0]) if chosen else ()


def odd(text: str) -> Odd | None:
    """The one worker whose stack differs from the others, first among its own role, then among all workers."""
    workers = [w for w in parse(text) if w.name != "launcher"]
    stopped = [w for w in workers if w.state == "T"]
    if len(stopped) == 1 and len(workers) > 1:
        return Odd(stopped[0].name, stopped[0].where, _common([w for w in workers if w is not stopped[0]]))
    roles: dict[str, list[WorkerStack]] = {}
    for worker in workers:
        roles.setdefault(worker.name.rstrip("0123456789"), []).append(worker)
    for group in (*roles.values(), workers):
        if (found := _one_of(group)) is not None:
            return found
    return None


def _one_of(group: list[WorkerStack]) -> Odd | None:
    counts = Counter(w.key for w in group)
    alone = [w for w in group if counts[w.key] == 1]
    if len(group) < 3 or len(alone) != 1 or len(counts) != 2:
        return None
    others = next(w for w in group if w is not alone[0])
    return Odd(alone[0].name, alone[0].where, others.where)


def _common(group: list[WorkerStack]) -> str:
    return Counter(w.where for w in group).most_common(1)[0][0]
