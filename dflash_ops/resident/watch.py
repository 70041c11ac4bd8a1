"""One look at a job: files and /proc in, a Snapshot out. Used by the loop (again and again) and by `snapshot` (once).

The rule here: a look reads only what is new since the last one, at most a fixed number of bytes, and what it could not
read is a warning, never a guess.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dflash_ops.contracts import (
    CheckpointInfo,
    Event,
    Layout,
    Limits,
    Process,
    Progress,
    ProgressPattern,
    ResidentInfo,
    SessionInfo,
    Snapshot,
    StageInfo,
    State,
    decode_journal,
)
from dflash_ops.errors import ContractError, DflashError
from dflash_ops.resident import attempts, proc
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.course import Course, Kept
from dflash_ops.resident.files import load, lock_held, read_tail
from dflash_ops.resident.growing import Errors, Tail
from dflash_ops.resident.scan import LogScanner, MetricsScanner, Said
from dflash_ops.resident.silences import Silences
from dflash_ops.resident.tmux import SessionProbe
from dflash_ops.supervise.health import Evidence, assess, quantile, warnings
from dflash_ops.supervise.words import Deeds

#: Bytes of the journal's end that are read: at first, for what the supervisor did long ago, and when it has grown.
JOURNAL_FIRST, JOURNAL = 1 << 20, 1 << 16
#: Intervals by whose spread the error of the remaining time is judged, and how many are needed.
RECENT, ENOUGH = 30, 5
#: Seconds between two looks for processes that an ended attempt left behind.
LEFT_EVERY = 10.0


class _One:
    """All that is followed of one attempt."""

    def __init__(self, attempt: Attempt, layout: Layout) -> None:
        self.number = attempt.number
        self.blind = attempt.spec is None  # looked at before its job was written: what it needs of it is not known
        self.bad_pattern = ""
        pattern = None
        if attempt.spec is not None and attempt.spec.progress:
            try:
                pattern = ProgressPattern(attempt.spec.progress)
            except ContractError as error:
                self.bad_pattern = error.what
        self.log = Tail(attempt.layout.log)
        self.metrics = Tail(attempt.layout.metrics)
        self.scanner = LogScanner(pattern)
        self.numbers = MetricsScanner()
        self.errors = Errors(attempt.layout.errors)
        self.checkpoint: CheckpointInfo | None = None
        self.probe: SessionProbe | None = None
        if attempt.spec is not None:
            self.probe = SessionProbe(attempt.spec.socket, attempt.spec.session)
        self.previous: State | None = None
        self.since: float | None = None
        self.p99_floor = 0.0
        self.silences = Silences(layout, attempt.spec)
        self.left: set[Process] = set()
        self.left_at = float("-inf")

    @property
    def course(self) -> Course:
        """By metrics.jsonl where there is one, since its times are exact."""
        return self.numbers.course if self.numbers.progress is not None else self.scanner.course


class Watcher:
    """Looks at the newest attempt under a root.

    Args:
        layout: the job's folders.
        seed: the last snapshot of whoever watched before; it knows since when, and the pace.
        on_event: called with each event line of the trainer, and its attempt.
    """

    def __init__(
        self, layout: Layout, seed: Snapshot | None = None, on_event: Callable[[int, Said], None] | None = None
    ) -> None:
        self._layout = layout
        self._seed = seed
        self._on_event = on_event
        self._seq = seed.seq if seed is not None else 0
        self._one: _One | None = None
        self._attempt: Attempt | None = None
        self._stamp: object = None
        self._journal_size = -1
        self._last_event: Event | None = None
        self._journal_checkpoints: list[CheckpointInfo] = []
        self._deeds = Deeds()
        self._aside_t = 0.0

    @property
    def attempt(self) -> Attempt | None:
        """The attempt last looked at."""
        return self._attempt

    @property
    def launcher(self) -> Process | None:
        """The launcher of the attempt last looked at, as recorded."""
        return self._attempt.start.launcher if self._attempt is not None and self._attempt.start is not None else None

    @property
    def course(self) -> tuple[int, Course] | None:
        """The attempt last looked at, and its course."""
        return (self._one.number, self._one.course) if self._one is not None else None

    def look(self, resident: ResidentInfo | None) -> Snapshot:
        """The job now."""
        self._seq += 1
        self._read_journal()
        attempt = self._read_attempt()
        now = time.time()
        if attempt is None:
            verdict = assess(Evidence(), now, Limits())
            return Snapshot(
                "", now, verdict.state, verdict.since, verdict.detail, self._seq, resident=resident,
                last_event=self._last_event, deeds=self._deeds.lines,
            )  # fmt: skip
        one = self._one
        assert one is not None
        self._read_new(one)
        evidence = self._evidence(attempt, one)
        if not evidence.launcher_alive:
            # It may have ended behind the first reading: its last lines say how far it came, and that decides.
            self._read_new(one)
            evidence = self._evidence(self._attempt or attempt, one)
        now = time.time()
        verdict = assess(evidence, now, one.silences.limits)
        if evidence.launcher_alive:
            heard = max(filter(None, (evidence.output_t, evidence.sign_t, evidence.started)), default=now)
            one.silences.saw(evidence.stage.name if evidence.stage is not None else "loading", now - heard)
        one.previous, one.since = verdict.state, verdict.since
        session, session_alive = self._session(attempt, one)
        told = list(warnings(evidence, session_alive))
        if one.bad_pattern:
            told.append(one.bad_pattern)
        if one.numbers.bad_lines:
            told.append(f"metrics.jsonl: {one.numbers.bad_lines} lines were not understood")
        if left := self._left(self._attempt or attempt, one):
            # `stop` ends just these: it finds them by the same rule (proc.family).
            name = shlex.quote(attempt.spec.job if attempt.spec else attempt.start.job if attempt.start else "")
            pids = ", ".join(map(str, left))
            told.append(f"processes of this attempt still live: {pids}; `dflash-ops stop {name}` ends them")
        return Snapshot(
            job=attempt.spec.job if attempt.spec else attempt.start.job if attempt.start else "",
            t=now,
            state=verdict.state,
            since=verdict.since,
            detail=verdict.detail,
            seq=self._seq,
            stage=evidence.stage,
            attempt=attempt.number,
            life=max(filter(None, (one.scanner.life, one.numbers.life)), default=one.scanner.life),
            release=attempt.start.release if attempt.start else attempt.spec.release if attempt.spec else None,
            started=attempt.start.t if attempt.start else None,
            progress=evidence.progress,
            rates={**_rates(evidence), **one.course.rates()},
            workers=one.numbers.workers,
            exit=evidence.exit,
            error=one.errors.first(),
            last_event=self._last_event,
            checkpoint=self._checkpoint(one),
            session=session,
            resident=resident,
            warnings=tuple(told),
            deeds=self._deeds.lines,
        )

    def _read_journal(self) -> None:
        try:
            size = self._layout.journal.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return
        if size == self._journal_size:
            return
        raw, _ = read_tail(self._layout.journal, JOURNAL if self._journal_size >= 0 else JOURNAL_FIRST)
        self._journal_size = size
        for event in decode_journal(raw)[0]:
            self._last_event = event
            self._deeds.add(event)
            if event.event == "checkpoint" and isinstance(event.data.get("step"), int):
                saved = CheckpointInfo(event.data["step"], str(event.data.get("path", "")), event.t)
                self._journal_checkpoints = [*self._journal_checkpoints[-99:], saved]
            elif event.event == "checkpoints_aside" and isinstance(event.data.get("names"), list):
                gone = set(map(str, event.data["names"]))  # single ones: the older ones are still there
                self._journal_checkpoints = [c for c in self._journal_checkpoints if Path(c.path).name not in gone]
            elif event.event == "checkpoints_aside":
                self._aside_t = event.t

    def _checkpoint(self, one: _One) -> CheckpointInfo | None:
        """The newest one that was told of and not set aside since: a fresh start has none to go back to."""
        newest = one.checkpoint or (self._journal_checkpoints[-1] if self._journal_checkpoints else None)
        return newest if newest is not None and newest.t > self._aside_t else None

    def _read_attempt(self) -> Attempt | None:
        found = attempts.numbers(self._layout)
        if not found:
            return None
        at = self._layout.attempt(found[-1])
        stamp = (found[-1], *(_stamp(p) for p in (at.job, at.start, at.stop, at.exit)))
        if stamp != self._stamp or self._attempt is None:
            self._attempt = attempts.read(self._layout, found[-1])
            self._stamp = stamp
        known = self._one is not None and self._one.number == found[-1]
        if self._one is None or not known or (self._one.blind and self._attempt.spec is not None):
            self._one = _One(self._attempt, self._layout)
            self._recall(self._one)
            seed = self._seed
            if seed is not None and seed.attempt == found[-1]:
                self._one.previous, self._one.since = seed.state, seed.since
                self._one.p99_floor = seed.rates.get("gap_p99_s") or 0.0
                self._one.checkpoint = seed.checkpoint
                self._one.scanner.recall(seed.stage, seed.progress, seed.life)
        return self._attempt

    def _recall(self, one: _One) -> None:
        """The curves as an earlier loop left them; what it could not keep, or is damaged, begins anew."""
        try:
            kept = load(Kept, self._layout.curves)
        except (OSError, DflashError):
            return
        if kept is not None and kept.attempt == one.number:
            one.numbers.course.recall(kept)
            one.scanner.course.recall(kept)

    def _read_new(self, one: _One) -> None:
        one.numbers.feed(one.metrics.read())
        data = one.log.read()
        for said in one.scanner.feed(data, min(time.time(), one.log.mtime)):
            if said.name == "checkpoint" and (step := said.line.integer("step")) is not None:
                one.checkpoint = CheckpointInfo(step, said.line.path, said.t)
            if self._on_event is not None:
                self._on_event(one.number, said)

    def _evidence(self, attempt: Attempt, one: _One) -> Evidence:
        # Who lives is asked first, how it ended after: what ends in between is then seen with its record.
        launcher, wrapper = attempt.launcher_alive, attempt.wrapper_alive
        end = time.monotonic() + 0.3
        while attempt.exit is None and not launcher and wrapper and time.monotonic() < end:
            if attempt.layout.exit.exists():
                attempt = self._attempt = attempts.read(self._layout, attempt.number)
                break
            time.sleep(0.01)
            wrapper = attempt.wrapper_alive
        if attempt.exit is None and not launcher and attempt.layout.exit.exists():
            attempt = self._attempt = attempts.read(self._layout, attempt.number)
        progress, sign_t = self._progress(one)
        stage = one.scanner.stage
        # A log that ends (no wrapper) or begins late (skipped) must not hide that steps come.
        if one.numbers.progress is not None and (one.scanner.sign_t or 0.0) + 2.0 < one.numbers.progress.t:
            stage = StageInfo("stepping")
        beats = one.numbers.beats if len(one.numbers.beats) >= len(one.scanner.beats) else one.scanner.beats
        return Evidence(
            attempt=attempt.number,
            started=attempt.start.t if attempt.start else None,
            exit=attempt.exit,
            launcher_alive=launcher,
            wrapper_alive=wrapper,
            starting=attempt.start is None and attempt.exit is None and lock_held(self._layout.lock),
            stop_requested=attempt.stop is not None,
            rebooted=attempt.rebooted,
            stage=stage,
            progress=progress,
            last_event=one.scanner.last_event,
            output_t=one.scanner.output_t,
            sign_t=sign_t,
            gaps=tuple(beats.gaps),
            step_s=tuple(beats.step_s),
            p99_floor_s=one.p99_floor,
            finished_rc=attempt.spec.finished_rc if attempt.spec else (0,),
            damaged=attempt.damaged,
            previous=one.previous,
            previous_since=one.since,
        )

    def _progress(self, one: _One) -> tuple[Progress | None, float | None]:
        """The newest of log and metrics, and when the last sign of life came."""
        said, metered = one.scanner.progress, one.numbers.progress
        times = [t for t in (one.scanner.sign_t, metered.t if metered else None) if t is not None]
        # A worker's clock may be ahead of ours, and a sign from the future would hide a hang.
        sign_t = min(max(times), time.time()) if times else None
        if metered is None or (said is not None and said.t > metered.t and said.step != metered.step):
            return said, sign_t
        if said is not None and said.step == metered.step:
            return replace(said, t=metered.t), sign_t
        return metered, sign_t

    def _session(self, attempt: Attempt, one: _One) -> tuple[SessionInfo | None, bool | None]:
        if attempt.spec is None or one.probe is None:
            return None, None
        alive = one.probe.alive()
        return SessionInfo(attempt.spec.session, attempt.spec.socket, bool(alive)), alive

    def _left(self, attempt: Attempt, one: _One) -> tuple[int, ...]:
        if attempt.exit is None or attempt.start is None or attempt.rebooted:
            return ()
        if time.monotonic() - one.left_at > LEFT_EVERY:
            one.left_at = time.monotonic()
            one.left = proc.family(attempt.start.launcher)
        # Who was ended since is not named again until the next look.
        return tuple(sorted(p.pid for p in one.left if proc.alive(p)))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return info.st_mtime_ns, info.st_size, info.st_ino


def _rates(evidence: Evidence) -> dict[str, float | None]:
    progress = evidence.progress
    return {
        "block_tok_s": progress.block_tok_s if progress else None,
        "ctx_tok_s": progress.ctx_tok_s if progress else None,
        "step_s": evidence.step_s[-1] if evidence.step_s else None,
        "step_s_median": quantile(evidence.step_s, 0.5),
        "gap_p99_s": max(quantile(evidence.gaps, 0.99) or 0.0, evidence.p99_floor_s) or None,
        "eta_error_s": _eta_error(evidence),
    }


def _eta_error(evidence: Evidence) -> float | None:
    """Seconds by which `eta_s` may be off: it is told at one interval's pace, and these differ (one sigma, by the
    16th and 84th percentiles of the newest ones, which a pause for a checkpoint does not move)."""
    progress, recent = evidence.progress, evidence.step_s[-RECENT:]
    if progress is None or progress.step is None or progress.total is None or len(recent) < ENOUGH:
        return None
    slow, fast = quantile(recent, 0.84), quantile(recent, 0.16)
    assert slow is not None
    assert fast is not None
    return max(0, progress.total - progress.step) * (slow - fast) / 2


def here(process: Process, version: str) -> ResidentInfo:
    return ResidentInfo(True, process.pid, process.start, version)
