"""The same release once more, to a job that has crashed because its files were damaged there (docs/supervise.md).

The rule here: only what ran is sent, byte for byte: the release made from the source on this machine must have the id
of the one that crashed. How it is started is not decided here: the job is the one that a person last started.
"""

from __future__ import annotations

import contextlib

from dflash_ops.client import JobClient
from dflash_ops.contracts import from_dict
from dflash_ops.deploy.decide import busy, decide
from dflash_ops.deploy.prepare import PROBE_S, Preparation
from dflash_ops.errors import CommandFailed, PreflightError
from dflash_ops.resident.probe import Probe

START_S = 300.0


class Again(Preparation):
    """See `Preparation` for the arguments."""

    def inspect(self) -> tuple[str, str]:
        """What is not there as it was sent ("" where all is), and why it cannot be sent again as it was.

        Raises:
            HostError, DflashError: it could not be asked.
        """
        resident = self._resident_fault()
        built = self._build()
        with self.question(built, deadline=PROBE_S) as upload:
            probe = from_dict(Probe, upload.said, "probe")
            upload.end()
        ran = probe.snapshot.release if probe.snapshot is not None else None
        mine = built.release.id if built is not None else None
        if resident:
            other = f"the release that ran ({ran}): the source on this machine makes {mine} now" if mine != ran else ""
            return resident, other
        if mine is None or mine != ran or probe.release not in ("missing", "damaged"):
            return "", ""
        return f"release {mine} is not there as it was sent: {', '.join(probe.damaged) or 'all of it'}", ""

    def _resident_fault(self) -> str:
        """Why `resident/current.pyz` does not answer."""
        try:
            JobClient(self.host, self.job, self.python).ask("attempts")
        except CommandFailed as failed:
            why = "it is missing" if failed.rc == 2 else (failed.stderr.strip().splitlines() or [failed.what])[-1]
            return f"the resident is not there as it was sent: {why}"
        return ""

    def send(self, attempt: int, decision: str, reason: str) -> int:
        """Send what lacks, and have the job started again; the attempt.

        Raises:
            JobBusy: it lives, or somebody acts there. PreflightError: the source has changed. HostError, DflashError.
        """
        mended = bool(self._resident_fault())
        self.secrets = self.job.secrets(self.environ)
        built = self._build()
        self.result.release = built.release.id if built is not None else None
        with contextlib.ExitStack() as stack:
            upload = stack.enter_context(self.question(built, deadline=PROBE_S))
            probe = from_dict(Probe, upload.said, "probe")
            ran = probe.snapshot.release if probe.snapshot is not None else None
            if error := busy(probe, self.options, self.job.name, self.where):
                raise error
            if self.result.release != ran:
                raise PreflightError("the source has changed since", self.where, f"dflash-ops deploy {self.job.name}")
            self._send(built, probe, decide(probe, self.options), upload)
        request = {
            "root": self.job.root,
            "attempt": attempt,
            "decision": decision,
            "reason": reason,
            "use": self.pack.id if mended else "",
            "secrets": dict(self.secrets),
        }
        return int(self.ask("again", request, deadline=START_S)["attempt"])
