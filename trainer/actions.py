"""What a scheduler decides, and the states of a round and of the ring's slots that it decides by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(str, Enum):
    """Where the round is."""

    RUN = "run"
    AVERAGING = "averaging"
    SAVING = "saving"
    ENDED = "ended"


class SlotState(str, Enum):
    """What a ring slot is used for."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    TRAINING = "training"


@dataclass
class SlotRecord:
    """One slot: its batch number and the worker that holds it, -1 and "" where none does."""

    state: SlotState = SlotState.FREE
    batch: int = -1
    owner: str = ""


@dataclass(frozen=True)
class Fill:
    """A target computes a batch into a slot."""

    worker: str
    slot: int
    batch: int


@dataclass(frozen=True)
class Train:
    """A drafter trains the batch in a slot."""

    worker: str
    slot: int
    batch: int


@dataclass(frozen=True)
class Join:
    """A drafter takes part in a step for which there is no batch left (sync "step"); `batch`: the step's first one."""

    worker: str
    batch: int


@dataclass(frozen=True)
class Average:
    """All drafters average; `step` counts the optimiser steps that their weights then stand for."""

    step: int


@dataclass(frozen=True)
class Commit:
    """All batches below `upto` are in everybody's weights."""

    upto: int
    step: int


@dataclass(frozen=True)
class Save:
    """A checkpoint is to be written from the last average, which stands for the batches below `upto`."""

    upto: int
    step: int


Action = Fill | Train | Join | Average | Commit | Save
