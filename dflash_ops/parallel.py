"""The same work for several things at one time: what came of each, in their order. No transport here.

The rule here: a fault of one never hides or ends the others, and Ctrl-C leaves at once: the workers are daemons, and
what they began on a machine is left in a state that the next command understands.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_ops.errors import DflashError

T = TypeVar("T")
V = TypeVar("V")

#: Machines that are worked on at one time, where nothing says that it must be all of them.
SIDE_BY_SIDE = 8

#: Values that may wait for who reads them: what comes fast is slowed down with its reader, not kept in memory.
WAITING = 1000


@dataclass
class Ended(Generic[V]):
    """What came of one: its value, or its error."""

    value: V | None = None
    error: DflashError | None = None


def tried(item: T, work: Callable[[T], V], name: Callable[[T], str]) -> Ended[V]:
    """`work` for one item, here and now; `name` as in `side_by_side`."""
    try:
        return Ended(work(item))
    except Exception as error:  # noqa: BLE001  # see _told
        return Ended(error=_told(error, name(item)))


def _told(error: Exception, name: str) -> DflashError:
    """The error; a fault of ours with its words, since it must not be lost with the thread in which it was found."""
    if isinstance(error, DflashError):
        return error
    return DflashError(
        f"unexpected {type(error).__name__}: {error}",
        name,
        "this is a fault of dflash-ops; do it for this one alone with --debug to see the traceback",
    )


def side_by_side(
    items: Sequence[T], work: Callable[[T], V], name: Callable[[T], str], *, most: int = SIDE_BY_SIDE
) -> list[Ended[V]]:
    """`work` for each item, at most `most` at one time; in the order of `items`.

    Args:
        name: what an item is called, for the text of a fault of ours.
    """
    found: list[Ended[V]] = [Ended() for _ in items]
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(items)):
        todo.put(index)
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def worker() -> None:
        try:
            while True:
                index = todo.get_nowait()
                found[index] = tried(items[index], work, name)
        except queue.Empty:
            pass
        finally:
            ended.put(None)

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(min(most, len(items)))]
    for thread in threads:
        thread.start()
    for _ in threads:
        ended.get()
    return found


def values(item: T, read: Callable[[T], Iterable[V]], name: Callable[[T], str]) -> Iterator[V | DflashError]:
    """What `read` gives of one item, and behind it the error that ended it, if one did."""
    try:
        yield from read(item)
    except Exception as error:  # noqa: BLE001  # see _told
        yield _told(error, name(item))


def merged(
    items: Sequence[T], read: Callable[[T], Iterable[V]], name: Callable[[T], str]
) -> Iterator[list[tuple[int, V | DflashError]]]:
    """`values` of all items, all read at one time, as they come: all that waits now, each with its item's index."""
    waiting: queue.Queue[tuple[int, V | DflashError] | None] = queue.Queue(WAITING)

    def forward(index: int) -> None:
        try:
            for value in values(items[index], read, name):
                waiting.put((index, value))
        finally:
            waiting.put(None)

    for index in range(len(items)):
        threading.Thread(target=forward, args=(index,), daemon=True).start()
    left = len(items)
    while left:
        came = [waiting.get()]
        with contextlib.suppress(queue.Empty):
            while len(came) < WAITING:
                came.append(waiting.get_nowait())
        left -= came.count(None)
        if found := [one for one in came if one is not None]:
            yield found
