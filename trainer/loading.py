"""How much of a model's weights is there while transformers loads it: told by its own progress bar, drawn by nobody.

A target of 54 GB takes minutes. transformers wraps its loop over weights (or over the files of them) in its bar; the
bar is replaced by one that counts. A version without the hook loads as well, and is silent meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: Called with (weights there, weights in all).
Progress = Callable[[int, int], None]

#: Seconds between two words of one load.
EVERY_S = 1.0


class _Counting:
    """What transformers takes for its bar: an iterable that tells how far it is."""

    def __init__(self, things: Iterable[Any] | None, total: int | None, tell: Progress) -> None:
        self._things = things
        self._total = total if total is not None else len(things) if hasattr(things, "__len__") else 0  # type: ignore[arg-type]
        self._tell, self._told, self._done = tell, float("-inf"), 0

    def __iter__(self) -> Iterator[Any]:
        for thing in self._things or ():
            yield thing
            self.update(1)

    def update(self, more: float | None = 1) -> None:
        self._done += int(more or 0)
        now = time.monotonic()
        if self._total and (now - self._told >= EVERY_S or self._done >= self._total):
            self._told = now
            self._tell(self._done, self._total)

    def __enter__(self) -> _Counting:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # close, set_description, ...: nothing is drawn


@contextmanager
def told(tell: Progress | None) -> Iterator[None]:
    """Within it what transformers loads is told; None: as ever."""
    from transformers.utils import logging

    set_hook = getattr(logging, "set_tqdm_hook", None)
    if tell is None or set_hook is None:
        yield
        return

    def counting(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> _Counting:
        return _Counting(args[0] if args else options.get("iterable"), options.get("total"), tell)

    before = set_hook(counting)
    try:
        yield
    finally:
        set_hook(before)
