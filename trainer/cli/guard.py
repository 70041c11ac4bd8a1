"""How commands at a person's keyboard end: Ctrl-C and a full disk are told in a sentence, never as a traceback."""

from __future__ import annotations

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
