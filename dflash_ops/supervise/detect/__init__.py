"""Health detectors: looks in a row -> findings beside the state. Pure; one small module a rule (its docstring).

The rule here: a detector whose source failed, or that has too little to judge by, is skipped, with its reason; what one
detector makes of its input never ends another.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_ops.contracts import Finding
from dflash_ops.supervise.detect import disk, gpu, hang, heartbeat, loss, nan, ring, straggler, throughput
from dflash_ops.supervise.detect.history import DiskSample, History, Report, Skipped

Detector = Callable[[History], "list[Finding] | Skipped"]

#: All of them, in the order in which they are told.
DETECTORS: tuple[Detector, ...] = (
    hang.detect,
    nan.detect,
    gpu.detect,
    disk.detect,
    heartbeat.detect,
    loss.detect,
    throughput.detect,
    straggler.detect,
    ring.detect,
)


def run(history: History, detectors: tuple[Detector, ...] = DETECTORS) -> Report:
    """All findings, and who could not look."""
    findings: list[Finding] = []
    skipped: list[Skipped] = []
    for detector in detectors:
        found = detector(history)
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            findings += found
    return Report(tuple(findings), tuple(skipped))


__all__ = ["DETECTORS", "DiskSample", "History", "Report", "Skipped", "run"]
