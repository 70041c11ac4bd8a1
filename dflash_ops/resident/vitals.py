"""The loop's senses beyond the state: findings of the health detectors, the disk, the GPUs.

The rules here: detectors run every ten seconds over what the looks of every second gathered, so that a job of weeks
costs no more than one of minutes; what could not be asked stands in the report as skipped, which nobody is told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dflash_ops.contracts import LIVE_STATES, DiskInfo, Finding, JobSpec, Layout, Process, Snapshot
from dflash_ops.resident import spec
from dflash_ops.resident.cards import Cards
from dflash_ops.resident.disks import Disks
from dflash_ops.supervise.detect import DiskSample, History, Report, disk, run

#: Progress lines and disk samples that are kept: half an hour of lines 10 s apart, an hour of samples.
KEPT = 200
DISK_EVERY_S = 60.0
DETECT_EVERY_S = 10.0
#: Seconds for which one word of a `follow` counts.
WATCHED_S = 15.0


class Vitals:
    """Findings of one job.

    Args:
        layout: its folders. checkpoints: where it saves, if that is another disk.
        clock: seconds since the epoch. cards: who asks nvidia-smi.
    """

    def __init__(
        self,
        layout: Layout,
        checkpoints: Path | None = None,
        clock: Callable[[], float] = time.time,
        cards: Cards | None = None,
    ) -> None:
        self._asked = Disks([layout.root, *([checkpoints] if checkpoints is not None else [])])
        self._watch = layout.watched
        self._clock = clock
        self._looks: deque[Snapshot] = deque(maxlen=KEPT)
        self._disks: deque[DiskSample] = deque(maxlen=KEPT)
        self._disks_failed = False
        self._disk_t = self._detect_t = float("-inf")
        self._disk: DiskInfo | None = None
        self._cards = cards or Cards()
        self.report = Report()

    def look(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        """Take one look more; what the detectors found last."""
        now = self._clock()
        if self._looks and self._looks[-1].attempt != snapshot.attempt:
            self._looks.clear()
        last = self._looks[-1] if self._looks else None
        if last is not None and _progress_t(last) == _progress_t(snapshot):
            self._looks[-1] = snapshot  # the same line, a newer state
        else:
            self._looks.append(snapshot)
        self._look_at_disks(now)
        if not 0 <= now - self._detect_t < DETECT_EVERY_S:
            self._detect_t = now
            disks = None if self._disks_failed else tuple(self._disks)
            self.report = run(History(now, tuple(self._looks), disks))
        return self.report.findings

    def add(self, snapshot: Snapshot, launcher: Process | None) -> Snapshot:
        """The snapshot with the disk and the cards in it, as they are known now; waits for nobody."""
        gpus, note = self._cards.look(launcher, often=snapshot.state in LIVE_STATES and self._watched())
        return replace(snapshot, gpus=gpus, gpus_note=note, disk=self._disk)

    def _watched(self) -> bool:
        """Whether a `follow` is there, which says so by this file's time."""
        try:
            return 0 <= self._clock() - self._watch.stat().st_mtime < WATCHED_S
        except OSError:
            return False

    def close(self) -> None:
        self._cards.close()
        self._asked.close()

    def _look_at_disks(self, now: float) -> None:
        if not 0 <= now - self._disk_t < DISK_EVERY_S:
            self._disk_t = now
            rooms = self._asked.ask()
        else:
            rooms = self._asked.look()
        if self._asked.silent:
            self._disks_failed, self._disk = True, None
        if rooms is None:
            return
        seen: dict[int, DiskSample] = {}
        self._disks_failed = any(room.device is None for room in rooms)
        self._disk = None
        for room in rooms:
            if room.device is None:
                continue
            if room.device not in seen:
                seen[room.device] = DiskSample(now, room.path, room.free, room.total)
                self._disks.append(seen[room.device])
            # The last place that is there is where checkpoints go.
            found = seen[room.device]
            left = disk.time_to_full(disk.of_path(self._disks, found.path, now))
            self._disk = DiskInfo(room.path, found.free, found.total, left)


def _progress_t(snapshot: Snapshot) -> float | None:
    return snapshot.progress.t if snapshot.progress is not None else None


def checkpoints_of(job: JobSpec | None, layout: Layout) -> Path | None:
    return spec.checkpoints_folder(job, layout.root) if job is not None else None
