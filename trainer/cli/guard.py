"""What the commands at a person's keyboard share: how they end, and how they share the machine's cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import TrainerError

INTERRUPTED = 130


@contextmanager
def told(doing: str, again: str) -> Iterator[None]:
    """Wraps a command's work.

    Args:
        doing: what may fail, such as "writing the responses". again: what the next call will do after Ctrl-C.

    Raises:
        TrainerError: for an OSError.
        SystemExit: with 130, after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted: {again}", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        where = str(error.filename) if error.filename else ""
        raise TrainerError(
            f"{doing} failed: {error.strerror or error}", where, "check space and permissions, and call it again"
        ) from error


def share_cores(asked: int, most: int) -> int:
    """CPU threads to use; call it before torch is imported.

    Threads that wait for each other spin by default. On a machine that does something else too, that makes training
    on all cores many times slower than on one (measured on two busy cores: 5 s a step, against 0.5 s with the short
    spin set here).
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return asked or min(most, len(os.sched_getaffinity(0)))


def own_progress_only() -> None:
    """No bars of transformers between this command's own; imports it, so call it after `share_cores`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
