"""Limits of loading and compiling, learned from this job's earlier attempts (run/learned.json, supervise/learned.py).

The rule here: a file that cannot be read or written only costs what was learned; the configured limits stand.
"""

from __future__ import annotations

import contextlib
import hashlib
import json

from dflash_ops.contracts import JobSpec, Layout, Limits, dumps
from dflash_ops.errors import DflashError
from dflash_ops.resident.files import load, write_atomic
from dflash_ops.supervise.learned import Learned, learn, limits

#: Stages whose silences are learned.
STAGES = ("loading", "compiling")


class Silences:
    """How long one attempt is silent in each stage before its first step, and what that teaches.

    Args:
        layout: the job's folders. job: what runs; None: nothing is learned and nothing applied.
    """

    def __init__(self, layout: Layout, job: JobSpec | None) -> None:
        self._file = layout.learned
        self._key = key(job) if job is not None else ""
        self._configured = job.limits if job is not None else Limits()
        self._seen: dict[str, float] = {}
        self.limits = limits(self._configured, self._read(), self._key) if self._key else self._configured

    def saw(self, stage: str, silence_s: float) -> None:
        """The attempt is in `stage` and has been silent for so long; a stage that is neither ends the learning."""
        if stage in STAGES:
            self._seen[stage] = max(silence_s, self._seen.get(stage, 0.0))
        elif self._seen:
            self._keep()

    def _keep(self) -> None:
        seen, self._seen = self._seen, {}
        if not self._key:
            return
        learned = self._read()
        for stage, silence in seen.items():
            learned = learn(learned, self._key, stage, silence)
        with contextlib.suppress(OSError):
            write_atomic(self._file, dumps(learned).encode() + b"\n", sync=False)

    def _read(self) -> Learned:
        try:
            return load(Learned, self._file) or Learned()
        except (OSError, DflashError):
            return Learned()  # damaged: the configured limits stand, and it is written anew


def key(job: JobSpec) -> str:
    """Of what a silence was learned: the same code with the same command and config."""
    text = json.dumps([job.release, job.argv, sorted(job.files.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
