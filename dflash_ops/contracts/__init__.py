"""The dataclasses that cross a border, with their versioned JSON forms (docs/contracts.md).

Standard library only, Python 3.10 syntax: the resident ships this package into the container.
"""

from dflash_ops.contracts.action import (
    ENV_PREFIXES,
    FORBIDDEN,
    GOES_BACK,
    RULES,
    Action,
    ActionRule,
    forbidden,
    worse_grade,
)
from dflash_ops.contracts.attempt import ExitRecord, Process, StartRecord, StopRecord
from dflash_ops.contracts.codec import dumps, from_dict, to_dict
from dflash_ops.contracts.decision import Decision, Expectation, Verdict
from dflash_ops.contracts.diagnosis import Diagnosis, EvidenceLine, Remedy
from dflash_ops.contracts.finding import Finding
from dflash_ops.contracts.incident import Deed, Incident, IncidentLine, IncidentState, Proof
from dflash_ops.contracts.job import JobSpec, Limits
from dflash_ops.contracts.journal import Event, decode_journal, encode_event
from dflash_ops.contracts.layout import AttemptLayout, Layout
from dflash_ops.contracts.ledger import Case, Ledger, Outcome, Tried
from dflash_ops.contracts.moment import clock
from dflash_ops.contracts.overlay import Layer, Overlay, RemedyTable, Way
from dflash_ops.contracts.policy import MOST_ATTEMPTS, Budgets, Policy
from dflash_ops.contracts.progress import ProgressLine, ProgressPattern, format_progress, parse_line
from dflash_ops.contracts.release import FileEntry, Release, release_id
from dflash_ops.contracts.snapshot import (
    CheckpointInfo,
    DiskInfo,
    ErrorInfo,
    GpuHolder,
    GpuInfo,
    Progress,
    ResidentInfo,
    SessionInfo,
    Snapshot,
    StageInfo,
    WorkerShares,
)
from dflash_ops.contracts.states import ENDED_STATES, LIVE_STATES, State, TrainerExit, signal_name

__all__ = [
    "ENDED_STATES",
    "ENV_PREFIXES",
    "FORBIDDEN",
    "GOES_BACK",
    "LIVE_STATES",
    "MOST_ATTEMPTS",
    "RULES",
    "Action",
    "ActionRule",
    "AttemptLayout",
    "Budgets",
    "Case",
    "CheckpointInfo",
    "Decision",
    "Deed",
    "Diagnosis",
    "DiskInfo",
    "ErrorInfo",
    "Event",
    "EvidenceLine",
    "ExitRecord",
    "Expectation",
    "FileEntry",
    "Finding",
    "GpuHolder",
    "GpuInfo",
    "Incident",
    "IncidentLine",
    "IncidentState",
    "JobSpec",
    "Layer",
    "Layout",
    "Ledger",
    "Limits",
    "Outcome",
    "Overlay",
    "Policy",
    "Process",
    "Progress",
    "ProgressLine",
    "ProgressPattern",
    "Proof",
    "Release",
    "Remedy",
    "RemedyTable",
    "ResidentInfo",
    "SessionInfo",
    "Snapshot",
    "StageInfo",
    "StartRecord",
    "State",
    "StopRecord",
    "TrainerExit",
    "Tried",
    "Verdict",
    "Way",
    "WorkerShares",
    "clock",
    "decode_journal",
    "dumps",
    "encode_event",
    "forbidden",
    "format_progress",
    "from_dict",
    "parse_line",
    "release_id",
    "signal_name",
    "to_dict",
    "worse_grade",
]
