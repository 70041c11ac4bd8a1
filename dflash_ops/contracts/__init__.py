"""The dataclasses that cross a border, with their versioned JSON forms (docs/contracts.md).

Standard library only, Python 3.10 syntax: the resident ships this package into the container.
"""

from dflash_ops.contracts.attempt import ExitRecord, Process, StartRecord, StopRecord
from dflash_ops.contracts.codec import dumps, from_dict, to_dict
from dflash_ops.contracts.job import JobSpec, Limits
from dflash_ops.contracts.journal import Event, decode_journal, encode_event
from dflash_ops.contracts.layout import AttemptLayout, Layout
from dflash_ops.contracts.progress import ProgressLine, ProgressPattern, format_progress, parse_line
from dflash_ops.contracts.release import FileEntry, Release, release_id
from dflash_ops.contracts.snapshot import (
    CheckpointInfo,
    ErrorInfo,
    Progress,
    ResidentInfo,
    SessionInfo,
    Snapshot,
    StageInfo,
    WorkerShares,
)
from dflash_ops.contracts.states import LIVE_STATES, State, TrainerExit, signal_name

__all__ = [
    "LIVE_STATES",
    "AttemptLayout",
    "CheckpointInfo",
    "ErrorInfo",
    "Event",
    "ExitRecord",
    "FileEntry",
    "JobSpec",
    "Layout",
    "Limits",
    "Process",
    "Progress",
    "ProgressLine",
    "ProgressPattern",
    "Release",
    "ResidentInfo",
    "SessionInfo",
    "Snapshot",
    "StageInfo",
    "StartRecord",
    "State",
    "StopRecord",
    "TrainerExit",
    "WorkerShares",
    "decode_journal",
    "dumps",
    "encode_event",
    "format_progress",
    "from_dict",
    "parse_line",
    "release_id",
    "signal_name",
    "to_dict",
]
