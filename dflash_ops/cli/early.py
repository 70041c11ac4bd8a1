"""Ctrl-C while the program is still being loaded: its exit code, one word, and no traceback.

The rule here: nothing that takes time is imported, and whoever only imports our modules keeps the handler that was
there.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    # Nothing was begun, so that there is nothing to end; an exception would pass through half an import.
    os.write(2, b"interrupted\n")
    os._exit(130)


def begin() -> None:
    """From now on Ctrl-C ends the process, unless somebody else has said what it does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, _leave)
        except ValueError:  # not the main thread
            return


def over() -> None:
    """All is loaded: Ctrl-C is an exception again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


begin()
