"""States of a job and exit codes of a trainer (docs/contracts.md, States, Exit codes)."""

from __future__ import annotations

import signal
from enum import Enum, IntEnum


class State(str, Enum):
    LOADING = "loading"
    COMPILING = "compiling"
    STEPPING = "stepping"
    SLOW = "slow"
    HUNG = "hung"
    CRASHED = "crashed"
    FINISHED = "finished"
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


#: States in which the launcher lives.
LIVE_STATES = frozenset({State.LOADING, State.COMPILING, State.STEPPING, State.SLOW, State.HUNG})

#: States after which nothing more comes of an attempt.
ENDED_STATES = frozenset({State.FINISHED, State.STOPPED, State.CRASHED})


class TrainerExit(IntEnum):
    FINISHED = 0
    BAD_CONFIG = 2
    STOPPED = 3
    NOT_FINITE = 4
    BAD_CHECKPOINT = 5
    BAD_DATA = 6

    @property
    def meaning(self) -> str:
        return {
            TrainerExit.FINISHED: "finished",
            TrainerExit.BAD_CONFIG: "bad arguments or config",
            TrainerExit.STOPPED: "stopped on request, state saved",
            TrainerExit.NOT_FINITE: "the loss was not finite",
            TrainerExit.BAD_CHECKPOINT: "a checkpoint cannot be restored whole",
            TrainerExit.BAD_DATA: "the data was refused",
        }[self]


def signal_name(number: int) -> str:
    """`9` -> `SIGKILL`; a number without a name -> `SIG<number>`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
