"""The same work for several things at one time: what came of each, in their order. No transport here.

The rule here: a fault of one never hides or ends the others, and Ctrl-C leaves at once: the workers are daemons, and
what they began on a machine is left in a state that the next command understands.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_ops.errors import DflashError

T = TypeVar("T")
V = TypeVar("V")

#: Machines that are worked on at one time, where nothing says that it must be all of them.
SIDE_BY_SIDE = 8


@dataclass
class Ended(Generic[V]):
    """What came of one: its value, or its error."""

    value: V | None = None
    error: DflashError | None = None


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

    def one(index: int) -> None:
        try:
            found[index].value = work(items[index])
        except DflashError as error:
            found[index].error = error
        except Exception as error:  # noqa: BLE001  # a fault in one's thread must not be lost with it
            found[index].error = DflashError(
                f"unexpected {type(error).__name__}: {error}",
                name(items[index]),
                "this is a fault of dflash-ops; do it for this one alone with --debug to see the traceback",
            )

    def worker() -> None:
        try:
            while True:
                one(todo.get_nowait())
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
