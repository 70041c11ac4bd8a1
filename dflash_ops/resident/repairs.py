"""The loop's part of repairing: when to start a pass (`repair`), and what it is given.

The rules here: a pass is a process of its own, one at a time; the same thing is not judged every second but when it
changed, when its time has come, or now and then while nothing could be decided; a pass that failed is tried again with
growing pauses. The values of secret variables are read from the launcher's own environment while it lives: they are in
no file, and a loop that was killed finds them there again.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_ops.contracts import LIVE_STATES, Finding, JobSpec, Layout, Process, Snapshot, State, to_dict
from dflash_ops.errors import DflashError
from dflash_ops.resident import itself, proc
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import read_json
from dflash_ops.supervise.ledger import by_supervisor
from dflash_ops.supervise.notice import FINDING_S

#: Seconds until a pass that decided nothing is made again, while the job is down; later, more seldom.
AGAIN_S = 60.0
SELDOM_S = 600.0
#: Seconds of the first pause after a pass that failed, and of the longest.
RETRY_S = (5.0, 600.0)
#: Seconds that a deploy has for its own way back, after a crash in its watch window.
DEPLOY_S = 20.0
#: Seconds after which a pass is taken for stuck: longer than all its waits together.
STUCK_S = 3 * 3600.0


def wanted(layout: Layout, snapshot: Snapshot, attempt: Attempt | None) -> bool:
    """Whether an ended job still needs its loop: it is to be repaired, and that has not come to its end."""
    if attempt is None or attempt.spec is None or attempt.spec.policy.mode != "act":
        return False
    if not (snapshot.state is State.CRASHED or _halfway(snapshot, attempt)):
        return False
    said = _said(layout)
    judged = (said.get("attempt"), said.get("state")) == (snapshot.attempt, snapshot.state.value)
    return not (judged and (said.get("final") or said.get("verdict") == "hold"))


def _deploys(snapshot: Snapshot, attempt: Attempt, now: float) -> bool:
    """Whether the deploy that started this attempt may be going back at this moment: two must not do it at once."""
    if snapshot.state is not State.CRASHED or attempt.spec is None or attempt.start is None:
        return False
    in_window = snapshot.since - attempt.start.t < attempt.spec.watch_s
    return in_window and not by_supervisor(attempt.spec.actor) and now - snapshot.since < DEPLOY_S


def _halfway(snapshot: Snapshot, attempt: Attempt) -> bool:
    """Ended by a supervisor that did not come to start it again."""
    return snapshot.state is State.STOPPED and attempt.stop is not None and by_supervisor(attempt.stop.actor)


def _said(layout: Layout) -> dict[str, Any]:
    try:
        said = read_json(layout.run / "repair.json")
    except (OSError, DflashError):
        return {}  # then the next pass is made at once, and writes it anew
    return said if isinstance(said, dict) else {}


class Repairs:
    """
    Args:
        layout: the job's folders. tell: one line into resident.log.
    """

    def __init__(self, layout: Layout, tell: Callable[[str], None]) -> None:
        self._layout = layout
        self._tell = tell
        self._child: subprocess.Popen[bytes] | None = None
        self._begun = 0.0
        self._secrets: dict[str, str] = {}
        self._secrets_of: Process | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._said: dict[str, Any] = {}
        self._written = -1
        self._told: set[str] = set()
        self._noted: dict[str, float] = {}  # finding -> when a pass got it last
        self._read()

    @property
    def busy(self) -> bool:
        """Whether the loop is needed although the job has ended."""
        later = self._said.get("not_before")
        return self._child is not None or (isinstance(later, (int, float)) and later > time.time())

    def step(self, snapshot: Snapshot, attempt: Attempt | None, findings: Sequence[Finding] = ()) -> None:
        """Called at every look of the loop; returns at once."""
        if attempt is None or attempt.spec is None:
            return
        self._keep_secrets(attempt.spec, attempt)
        self._reap()
        self._read()
        if self._child is None and self._due(snapshot, attempt, findings):
            self._spawn(snapshot, findings)

    def _read(self) -> None:
        """What the last pass wrote, also one of a loop before this one, which may still be acting."""
        try:
            written = (self._layout.run / "repair.json").stat().st_mtime_ns
        except OSError:
            written = -1
        if written != self._written:
            self._said, self._written = _said(self._layout), written

    def _due(self, snapshot: Snapshot, attempt: Attempt, findings: Sequence[Finding]) -> bool:
        now = time.time()
        if now < self._retry_at or snapshot.attempt != attempt.number or _deploys(snapshot, attempt, now):
            return False
        if snapshot.state in (State.CRASHED, State.HUNG) or _halfway(snapshot, attempt):
            if (self._said.get("attempt"), self._said.get("state")) != (snapshot.attempt, snapshot.state.value):
                return True
            later = self._said.get("not_before")
            if isinstance(later, (int, float)):
                return now >= later
            age = now - float(self._said.get("t") or 0.0)
            again = AGAIN_S if now - snapshot.since < SELDOM_S else SELDOM_S
            return self._said.get("verdict") == "none" and not self._said.get("final") and age >= again
        if snapshot.state not in LIVE_STATES:
            return False
        waits = self._said.get("awaiting")
        step = snapshot.progress.step if snapshot.progress is not None else None
        if isinstance(waits, dict) and waits.get("attempt") == snapshot.attempt and step is not None:
            past = waits.get("past_step")
            if past is None or step > past:
                return True
        return any(self._is_news(finding, now) for finding in findings)

    def _is_news(self, finding: Finding, now: float) -> bool:
        """One that comes and goes (now this target is the slower one, now that) is noted once an hour by a pass, which
        takes half a second of CPU; an alarm is looked into whenever it is there again."""
        if finding.key in self._told:
            return False
        return finding.severity == "alarm" or now - self._noted.get(finding.key, float("-inf")) > FINDING_S

    def _spawn(self, snapshot: Snapshot, findings: Sequence[Finding]) -> None:
        given = {"secrets": self._secrets, "findings": [to_dict(f) for f in findings], "state": snapshot.state.value}
        self._told = {f.key for f in findings}
        self._noted |= dict.fromkeys(self._told, time.time())
        try:
            self._child = subprocess.Popen(
                itself.argv("repair", "--root", str(self._layout.root)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=None,  # resident.log
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._failed(f"a pass cannot be started: {error}")
            return
        self._begun = time.monotonic()
        pipe = self._child.stdin
        assert pipe is not None
        with contextlib.suppress(OSError), pipe:  # it died at once: its exit code is looked at below
            pipe.write(json.dumps(given).encode())

    def _reap(self) -> None:
        child = self._child
        if child is None:
            return
        if child.poll() is None:
            if time.monotonic() - self._begun > STUCK_S:
                child.kill()
            return
        self._child = None
        if child.returncode == 0:
            self._failures = 0
        else:
            self._failed(f"a pass of the supervisor ended with {child.returncode}")

    def _failed(self, why: str) -> None:
        self._failures += 1
        pause = min(RETRY_S[1], RETRY_S[0] * 2 ** (self._failures - 1))
        self._retry_at = time.time() + pause
        self._tell(f"{why}; again in {pause:.0f} s")

    def _keep_secrets(self, spec: JobSpec, attempt: Attempt) -> None:
        if not spec.secret_env or attempt.start is None or self._secrets_of == attempt.start.launcher:
            return
        launcher = attempt.start.launcher
        try:
            raw = Path(f"/proc/{launcher.pid}/environ").read_bytes()
        except OSError:
            return
        if not proc.alive(launcher):
            return
        found = dict(entry.partition("=")[::2] for entry in raw.decode("utf-8", "surrogateescape").split("\0") if entry)
        secrets = {name: found[name] for name in spec.secret_env if name in found}
        if len(secrets) == len(spec.secret_env):  # before exec the launcher still has the wrapper's environment
            self._secrets, self._secrets_of = secrets, launcher
