"""The trainer's exceptions. Each carries the exit code that the launcher leaves with.

TrainerError                 1   anything else that the trainer understands
|- ConfigError               2   arguments, run.toml, a target or drafter folder that does not fit
|  '- ConfigErrors           2   several of them, found in one reading
|- NonFiniteError            4   the loss or its gradient is not finite
|- CheckpointError           5   a checkpoint (or drafter folder) that cannot be restored whole
'- DataError                 6   data refused
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

#: The launcher's exit codes that are not errors.
FINISHED, STOPPED = 0, 3


class TrainerError(Exception):
    """An error that says what is wrong, where, and what to do next.

    Args:
        what: one sentence, the fault itself.
        where: file, key or tensor it was found in; may be empty.
        next: what the reader can do about it; may be empty.
    """

    exit_code = 1

    def __init__(self, what: str, where: str = "", next: str = "") -> None:
        self.what = what
        self.where = where
        self.next = next
        super().__init__(what + (f" [{where}]" if where else "") + (f" -> {next}" if next else ""))


class ConfigError(TrainerError):
    """Bad arguments or configuration."""

    exit_code = 2


class ConfigErrors(ConfigError):
    """All faults of one configuration, so that a reader need not find them one run at a time."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.what, first.where, first.next)


class NonFiniteError(TrainerError):
    """The loss or its gradient is not a finite number; nothing was stepped or saved with it."""

    exit_code = 4


class CheckpointError(TrainerError):
    """A checkpoint that cannot be restored whole."""

    exit_code = 5


class DataError(TrainerError):
    """Training data that is refused."""

    exit_code = 6


#: What a worker's exit code means, when it could name the fault itself.
BY_EXIT_CODE: dict[int, type[TrainerError]] = {
    error.exit_code: error for error in (TrainerError, ConfigError, NonFiniteError, CheckpointError, DataError)
}


def each_error(error: TrainerError) -> tuple[TrainerError, ...]:
    """The single faults of an error, at least one."""
    return tuple(error.errors) if isinstance(error, ConfigErrors) else (error,)


def tell(error: TrainerError) -> str:
    """The error for a terminal: what, where and what next, a line each."""
    lines = []
    for single in each_error(error):
        lines.append(f"error: {single.what}")
        if single.where:
            lines.append(f"  where: {single.where}")
        if single.next:
            lines.append(f"  next:  {single.next}")
    return "\n".join(lines)


def say(error: TrainerError) -> None:
    """Tells it on standard error, if anybody is there to read it; a broken pipe must not change the exit code."""
    try:
        print(tell(error), file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what is still buffered would fail again at the end


def write_error_file(path: str | Path, error: BaseException) -> None:
    """Writes `error.json` in torch's own format (docs/contracts.md), so that one reader does for all processes.

    Beside and renamed: a reader never sees half of it. An existing file stays: the first error is the cause.
    """
    file = Path(path)
    if file.exists():
        return
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    text = json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
