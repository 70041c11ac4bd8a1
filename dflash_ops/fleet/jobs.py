"""Jobs as one asks about them: which ones, in which order, what was seen of each, and all of them in one sentence.

The rules here: a filter by name is used before anything is asked, one by state after; a job of several nodes is one,
and is known when its last node has answered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dflash_ops.client import ASK_S, Seen
from dflash_ops.contracts import Snapshot, State
from dflash_ops.errors import DflashError, HostError, UsageError, did_you_mean
from dflash_ops.fleet.ask import Answer, Asking, Waiting
from dflash_ops.inventory import Inventory, Job, LxcHost, SshHost
from dflash_ops.view.nodes import WORST, NodeSeen, joined

if TYPE_CHECKING:
    from dflash_ops.parallel import Ended

#: Orders of a table; `trouble` is the worst state first, in it whatever is in it for longest.
ORDERS = ("trouble", "name", "host", "since", "eta", "file")

#: Order of the states in a sentence: what is well first.
_TOLD = (
    State.STEPPING, State.SLOW, State.LOADING, State.COMPILING, State.FINISHED, State.STOPPED,
    State.HUNG, State.CRASHED, State.UNREACHABLE, State.UNKNOWN,
)  # fmt: skip

#: Seconds that one who is asked may take beyond its deadline (ending what it began) before it is given up.
GRACE_S = 3.0


@dataclass(frozen=True)
class JobSeen:
    """What was seen of one job: a NodeSeen for each node (of a job without nodes one), an error or None for each."""

    job: Job
    nodes: tuple[NodeSeen, ...]
    errors: tuple[DflashError | None, ...]

    @property
    def whole(self) -> NodeSeen:
        return joined(self.nodes) if self.job.nodes else self.nodes[0]

    @property
    def code(self) -> int:
        """Exit code of a status: 5 where a machine could not be asked, else its error's."""
        codes = [e.exit_code for e in self.errors if e is not None]
        away = any(n.snapshot.state is State.UNREACHABLE for n in self.nodes)
        return max([*codes, HostError.exit_code if away else 0])


@dataclass(frozen=True)
class Filters:
    """What a job must be to be shown: one of these states, a name and a host that fit one of the patterns each.

    Empty ones let everything through. Patterns are a shell's (`gpu*`); a host fits by its name in the inventory, its
    address, or those of the Proxmox host that it lies on. Of a job of several nodes one fitting host is enough.
    """

    states: frozenset[State] = frozenset()
    hosts: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: str | None = None, host: str | None = None, job: str | None = None) -> Filters:
        """From the words of the command line, each a list with commas.

        Raises:
            UsageError: no such state, or an empty list.
        """
        states = set()
        known = [s.value for s in State]
        for word in _words("--state", state):
            if word not in known:
                raise UsageError(
                    f"there is no state {word!r}{did_you_mean(word, known)}",
                    "--state",
                    f"use some of {', '.join(known)}",
                )
            states.add(State(word))
        return cls(frozenset(states), _words("--host", host), _words("--job", job))

    def __bool__(self) -> bool:
        return bool(self.states or self.hosts or self.jobs)

    def chosen(self, loaded: Inventory, jobs: Sequence[Job]) -> list[Job]:
        """Those of `jobs` that fit by name and host.

        Raises:
            UsageError: none does.
        """
        found = [
            job
            for job in jobs
            if _fits((job.name,), self.jobs) and _fits([n for p in job.parts for n in names_of(loaded, p)], self.hosts)
        ]
        if not found:
            words = [f"--{k} {','.join(v)}" for k, v in (("host", self.hosts), ("job", self.jobs)) if v]
            raise UsageError(
                f"no job fits {' and '.join(words)}",
                loaded.file,
                f"jobs: {_some([j.name for j in jobs])}; hosts: {_some({j.host for j in jobs})}",
            )
        return found

    def shown(self, seen: Sequence[JobSeen]) -> list[JobSeen]:
        """Those that are in one of the states."""
        return [one for one in seen if not self.states or one.whole.snapshot.state in self.states]

    def to_json(self) -> dict[str, Any]:
        states = [s.value for s in State if s in self.states]
        return {"state": states, "host": list(self.hosts), "job": list(self.jobs)}


def _words(option: str, text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise UsageError(f"{option} needs a value", option, "leave it out to see all")
    return found


def _fits(names: Collection[str], patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:20]
    return ", ".join(first) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def names_of(loaded: Inventory, job: Job) -> list[str]:
    """Names and addresses of the host of one job (or node), and of what it lies on."""
    found, at = [], loaded.hosts[job.host]
    while True:
        found.append(at.name)
        if isinstance(at, SshHost):
            found.append(at.address)
        if not isinstance(at, LxcHost):
            return found
        at = loaded.hosts[at.via]


def machine_of(loaded: Inventory, job: Job) -> str:
    """The host whose connection all questions to it take: of a container its Proxmox host."""
    at = loaded.hosts[job.host]
    while isinstance(at, LxcHost):
        at = loaded.hosts[at.via]
    return at.name


def look(
    loaded: Inventory,
    jobs: Sequence[Job],
    ask: Callable[[Job, float], Seen],
    *,
    deadline: float = ASK_S,
    asking: Callable[..., Asking[Job, Seen]] = Asking,
) -> Iterator[JobSeen | list[tuple[Job, float]]]:
    """All jobs at one time: each as it becomes known; between them, now and then, who is waited for and how long.

    Args:
        ask: looks at one job or node within so many seconds. asking: the engine, for tests.
    """
    parts = [part for job in jobs for part in job.parts]
    whose = [n for n, job in enumerate(jobs) for _ in job.parts]
    got: list[dict[int, Ended[Seen]]] = [{} for _ in jobs]
    first = {n: at for at, n in reversed(list(enumerate(whose)))}
    events = asking(
        parts,
        lambda part: ask(part, deadline),
        machine=lambda part: machine_of(loaded, part),
        name=lambda part: f"host {part.host}",
        give_up_s=deadline + GRACE_S,
    )
    for event in events:
        if isinstance(event, Waiting):
            yield [(parts[index], silent) for index, silent in event.items]
            continue
        assert isinstance(event, Answer)
        n = whose[event.index]
        got[n][event.index - first[n]] = event.ended
        if len(got[n]) == len(jobs[n].parts):
            yield seen_of(jobs[n], [got[n][rank] for rank in range(len(jobs[n].parts))])


def seen_of(job: Job, ended: Sequence[Ended[Seen]]) -> JobSeen:
    """What was seen, or what is known where a machine answers with an error or not at all."""
    nodes, errors = [], []
    for part, end in zip(job.parts, ended, strict=True):
        rank = part.node.rank if part.node is not None else 0
        seen, error = end.value, end.error
        if seen is None:
            assert error is not None
            now = time.time()
            away = isinstance(error, HostError)
            state = State.UNREACHABLE if away else State.UNKNOWN
            seen = Seen(Snapshot(part.name, now, state, now, error.what.splitlines()[0]), now)
            error = None if away else error
        nodes.append(NodeSeen(rank, part.host, part.root, seen.snapshot, seen.now, seen.deployed))
        errors.append(error)
    return JobSeen(job, tuple(nodes), tuple(errors))


def ordered(seen: Sequence[JobSeen], order: str, jobs: Sequence[Job]) -> list[JobSeen]:
    """In one of ORDERS; `jobs` is the order of the file (or of the names as they were given).

    Raises:
        UsageError: no such order.
    """
    if order not in ORDERS:
        raise UsageError(
            f"there is no order {order!r}{did_you_mean(order, ORDERS)}", "--sort", f"use one of {', '.join(ORDERS)}"
        )
    place = {job.name: n for n, job in enumerate(jobs)}

    def key(one: JobSeen) -> tuple[Any, ...]:
        whole, at = one.whole, place[one.job.name]
        s = whole.snapshot
        eta = s.progress.eta_s if s.progress is not None and s.exit is None else None
        return {
            "trouble": (WORST.index(s.state), s.since - whole.now, at),
            "name": (one.job.name,),
            "host": (whole.host, one.job.name),
            "since": (whole.now - s.since, at),
            "eta": (eta if eta is not None else float("inf"), at),
            "file": (at,),
        }[order]

    return sorted(seen, key=key)


def counts(seen: Sequence[JobSeen]) -> dict[str, int]:
    """Jobs in each state, only states that occur, what is well first."""
    found = Counter(one.whole.snapshot.state for one in seen)
    return {state.value: found[state] for state in _TOLD if found[state]}


def summary(shown: Sequence[JobSeen], asked: int) -> str:
    """`12 jobs: 9 stepping, 1 crashed, 2 unreachable`; of a part of them `3 of 12 jobs: ...`."""
    noun = "job" if asked == 1 else "jobs"
    head = f"{asked} {noun}" if len(shown) == asked else f"{len(shown)} of {asked} {noun}"
    return f"{head}: {tally}" if (tally := told(counts(shown))) else head


def told(found: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {state}" for state, n in found.items())
