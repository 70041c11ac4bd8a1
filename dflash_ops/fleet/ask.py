"""One question to many, all at one time: answers as they come, and who is still waited for. No transport here.

The rules here: what does not answer holds up nothing but itself. Each one's own time begins when it is asked, not when
the pass began; what keeps its deadline not even after its deadline is given up, its place goes to the next, and it is
not asked again before its thread has come back.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_ops.errors import DeadlineExceeded
from dflash_ops.parallel import Ended, tried

T = TypeVar("T")
V = TypeVar("V")

#: Questions at one time over all machines: a pass over so many hosts takes as long as its slowest answer.
MOST = 256

#: Questions at one time to one machine (a Proxmox host with all its containers): three connections of eight sessions,
#: which is what hosts/pool.py opens where sshd has its defaults.
LANES = 24

#: Seconds between two words about who is waited for.
TICK_S = 0.5


@dataclass(frozen=True)
class Answer(Generic[V]):
    """What came of item `index`, `took_s` seconds after it was asked."""

    index: int
    ended: Ended[V]
    took_s: float


@dataclass(frozen=True)
class Waiting:
    """Nothing came for a moment: items that were asked, and for how many seconds they have been silent; maybe none."""

    items: tuple[tuple[int, float], ...]


class Asking(Generic[T, V]):
    """A pass (or, with `every`, one after the other without an end); iterate over it.

    Args:
        items: what is asked about. work: asks one, in a thread of its own; a DflashError is an answer.
        machine: name of the machine whose way an item takes; at most `lanes` of one are asked at one time.
        name: what an item is called, for errors.
        every: seconds between the beginnings of two questions about the same item; None: each is asked once.
        give_up_s: seconds after which one that should have ended by itself is given up; None: never.
        most: questions at one time. clock: seconds, never backwards.
    """

    def __init__(
        self,
        items: Sequence[T],
        work: Callable[[T], V],
        *,
        machine: Callable[[T], str],
        name: Callable[[T], str],
        every: float | None = None,
        give_up_s: float | None = None,
        most: int = MOST,
        lanes: int = LANES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._items, self._work, self._name = items, work, name
        self._machines = [machine(item) for item in items]
        self._every, self._give_up_s = every, give_up_s
        self._most, self._lanes, self._clock = most, lanes, clock
        self._back: queue.SimpleQueue[tuple[int, Ended[V] | None]] = queue.SimpleQueue()
        self._due = [(clock(), index) for index in range(len(items))]  # a heap
        self._ready: dict[str, deque[int]] = {machine: deque() for machine in self._machines}
        self._began: dict[int, float] = {}  # asked, and not answered yet
        self._lost: set[int] = set()  # given up, their threads not back yet
        self._busy = dict.fromkeys(self._machines, 0)
        self._stopped = False

    def stop(self) -> None:
        """End the iteration at its next turn; callable from any thread."""
        self._stopped = True
        self._back.put((-1, None))

    def __iter__(self) -> Iterator[Answer[V] | Waiting]:
        while not self._stopped:
            self._begin()
            yield from self._overdue()
            if not self._more():
                return
            try:
                index, end = self._back.get(timeout=self._pause())
            except queue.Empty:
                now = self._clock()
                yield Waiting(tuple((i, now - t) for i, t in sorted(self._began.items())))
                continue
            if end is None:
                continue
            if index in self._lost:  # too late: it counts as given up; it may be asked again
                self._lost.discard(index)
                self._again(index, self._clock())
                continue
            yield self._take(index, end)

    def _more(self) -> bool:
        """Whether anything is still to come: with `every` also of those that were given up, once they are back."""
        coming = self._began or self._due or any(self._ready.values())
        return bool(coming or (self._every is not None and self._lost))

    def _begin(self) -> None:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            index = heapq.heappop(self._due)[1]
            self._ready[self._machines[index]].append(index)
        for machine, waiting in self._ready.items():
            while waiting and self._busy[machine] < self._lanes and len(self._began) < self._most:
                index = waiting.popleft()
                self._busy[machine] += 1
                self._began[index] = now
                threading.Thread(target=self._ask, args=(index,), daemon=True, name=f"ask {index}").start()

    def _ask(self, index: int) -> None:
        self._back.put((index, tried(self._items[index], self._work, self._name)))

    def _pause(self) -> float:
        now = self._clock()
        until = [now + TICK_S]
        if self._due:
            until.append(self._due[0][0])
        if self._began and self._give_up_s is not None:
            until.append(min(self._began.values()) + self._give_up_s)
        return max(0.0, min(until) - now)

    def _overdue(self) -> Iterator[Answer[V]]:
        if self._give_up_s is None:
            return
        now = self._clock()
        for index, began in sorted(self._began.items()):
            if now - began >= self._give_up_s:
                late = DeadlineExceeded(
                    f"no answer within {self._give_up_s:g} s", self._name(self._items[index]), "see what holds it up"
                )
                self._lost.add(index)
                yield self._take(index, Ended(error=late))

    def _take(self, index: int, end: Ended[V]) -> Answer[V]:
        now, began = self._clock(), self._began.pop(index)
        self._busy[self._machines[index]] -= 1
        if index not in self._lost:
            self._again(index, began)
        return Answer(index, end, now - began)

    def _again(self, index: int, began: float) -> None:
        if self._every is not None:
            heapq.heappush(self._due, (max(self._clock(), began + self._every), index))
