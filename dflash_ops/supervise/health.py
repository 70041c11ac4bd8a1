"""What state a job is in, as a pure function of evidence (docs/contracts.md, States).

The rules, in the order in which they are asked:

1. An exit record decides alone: finished, stopped or crashed.
2. No exit record, but the launcher lives: its stage and its silence decide. Who else died (wrapper, tmux server) does
   not matter for the state; it is told as a warning.
3. No exit record and no launcher: stopped if a stop was recorded, else crashed with an unknown exit. It is never
   guessed to have ended well, unless the trainer itself said `event=finished`.
4. Evidence that is missing or contradicts itself is `unknown`, never one of the others. What may follow what inside
   one attempt is drawn (machine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_ops.contracts import ExitRecord, Limits, Progress, StageInfo, State
from dflash_ops.supervise.machine import follow

#: Intervals that a run must have before it can be called slow against its own median.
SLOW_NEEDS = 12

#: Newest intervals whose median is held against the run's.
SLOW_WINDOW = 4

#: A slow run counts as recovered only this much above the factor (share of the median's speed): no flapping.
SLOW_MARGIN = 0.1


@dataclass(frozen=True)
class Evidence:
    """What is known of one attempt at one moment. Times are seconds since the epoch, None where not known.

    Attributes:
        attempt: its number; None when nothing was ever started.
        started: time of start.json; None: there is none.
        exit: exit.json, None while there is none.
        launcher_alive, wrapper_alive: by recorded pid and start time.
        starting: `start` is at work at this moment.
        stop_requested: a stop of this attempt was recorded.
        rebooted: the machine's boot id is another than at the start.
        stage: the last stage said (a step line says `stepping`), and `said`: whether a progress line ever came.
        last_event: name of the trainer's last `event=` line.
        output_t: when anything at all was last written; `sign_t`: when the last step, stage or event line came.
        gaps: seconds between successive progress lines, oldest first.
        step_s: seconds a step, one for each gap, oldest first.
        p99_floor_s: p99 of the gaps as known before the observer was restarted, 0 when not known.
        finished_rc: exit codes that count as finished.
        damaged: files that could not be understood.
        previous: state at the last look at this attempt, with its `previous_since`.
    """

    attempt: int | None = None
    started: float | None = None
    exit: ExitRecord | None = None
    launcher_alive: bool = False
    wrapper_alive: bool = False
    starting: bool = False
    stop_requested: bool = False
    rebooted: bool = False
    stage: StageInfo | None = None
    progress: Progress | None = None
    last_event: str = ""
    output_t: float | None = None
    sign_t: float | None = None
    gaps: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    p99_floor_s: float = 0.0
    finished_rc: tuple[int, ...] = (0,)
    damaged: tuple[str, ...] = ()
    previous: State | None = None
    previous_since: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A state, when it began, and one line for people; `limit_s` is the silence at which it becomes hung."""

    state: State
    detail: str
    since: float
    limit_s: float | None = None


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least a share `q` of the values does not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(q * len(ordered) + 0.999999) - 1))]


def assess(evidence: Evidence, now: float, limits: Limits) -> Verdict:
    """The state of the attempt at time `now`. Pure; raises nothing."""
    verdict = _assess(evidence, now, limits)
    state, detail = follow(evidence.previous, verdict.state, verdict.detail)
    if state is not verdict.state:
        verdict = Verdict(state, detail, now)
    if evidence.previous is verdict.state and evidence.previous_since is not None:
        return Verdict(verdict.state, verdict.detail, evidence.previous_since, verdict.limit_s)
    return verdict


def _assess(e: Evidence, now: float, limits: Limits) -> Verdict:
    if e.attempt is None:
        return Verdict(State.UNKNOWN, "never started", now)
    if e.exit is not None:
        return _ended(e, e.exit)
    if e.launcher_alive:
        return _live(e, now, limits)
    if e.started is None:
        if e.starting:
            return Verdict(State.LOADING, f"attempt {e.attempt} is being started", now)
        if e.damaged:
            return Verdict(State.UNKNOWN, f"damaged: {', '.join(e.damaged)}", now)
        return Verdict(State.CRASHED, f"the start of attempt {e.attempt} was cut short; no trainer ever ran", now)
    return _gone(e, now)


def _ended(e: Evidence, record: ExitRecord) -> Verdict:
    state = record.state(e.finished_rc)
    detail = record.describe()
    if record.detail:
        detail += f": {record.detail}"
    if state is State.STOPPED:
        asked = {"stop": "on request", "INT": "after Ctrl-C", "TERM": "after TERM from outside", None: ""}
        detail = " ".join(filter(None, ["stopped", asked.get(record.requested, ""), f"({detail})"]))
    return Verdict(state, detail, record.t)


def _gone(e: Evidence, now: float) -> Verdict:
    """The launcher is gone and left no exit record."""
    since = max(filter(None, (e.output_t, e.sign_t, e.started)), default=now)
    if e.wrapper_alive:
        return Verdict(State.UNKNOWN, "the launcher has ended; its wrapper could not write exit.json yet", now)
    if e.last_event == "finished":
        return Verdict(State.FINISHED, "the trainer said finished; its exit code was not recorded", since)
    if e.stop_requested or e.last_event == "stopped":
        return Verdict(State.STOPPED, "stopped; the exit code was not recorded", since)
    if e.rebooted:
        return Verdict(State.CRASHED, "the host rebooted while it ran; exit unknown", since)
    return Verdict(State.CRASHED, "launcher and wrapper are gone without an exit record; exit unknown", since)


def _live(e: Evidence, now: float, limits: Limits) -> Verdict:
    started = e.started if e.started is not None else now
    stage = e.stage.name if e.stage is not None else "loading"
    if stage in ("stepping", "saving"):
        return _stepping(e, now, limits, started, stage)
    state = State.COMPILING if stage == "compiling" else State.LOADING
    limit = limits.compiling_s if state is State.COMPILING else limits.loading_s
    # Before the first step any output is a sign of life: a foreign trainer says nothing that we could read.
    heard = max(filter(None, (e.output_t, e.sign_t)), default=started)
    silent = now - heard
    if silent > limit:
        return Verdict(
            State.HUNG, f"no output for {silent:.0f} s while {stage} (limit {limit:g} s)", heard + limit, limit
        )
    if e.stage is None:
        detail = "running, no progress lines seen yet"
    else:
        count = f" {e.stage.k} of {e.stage.n}" if e.stage.k is not None and e.stage.n is not None else ""
        what = f" ({e.stage.what})" if e.stage.what else ""
        detail = f"{stage}{count}{what}"
    since = e.sign_t if e.stage is not None and e.sign_t is not None else started
    return Verdict(state, detail, since, limit)


def _stepping(e: Evidence, now: float, limits: Limits, started: float, stage: str) -> Verdict:
    limit = max(limits.step_s, 3.0 * max(quantile(e.gaps, 0.99) or 0.0, e.p99_floor_s))
    if stage == "saving":
        limit = max(limit, limits.loading_s)  # a checkpoint moves the same bytes as loading does
    heard = e.sign_t if e.sign_t is not None else started
    silent = now - heard
    at = _at(e.progress)
    if silent > limit:
        return Verdict(State.HUNG, f"nothing for {silent:.0f} s at {at} (limit {limit:.0f} s)", heard + limit, limit)
    if (share := _speed(e)) is not None:
        factor = limits.slow_factor + (SLOW_MARGIN if e.previous is State.SLOW else 0.0)
        if share < factor:
            return Verdict(State.SLOW, f"{at}, at {share:.0%} of this run's median speed", now, limit)
    return Verdict(State.STEPPING, f"saving at {at}" if stage == "saving" else at, heard, limit)


def _at(progress: Progress | None) -> str:
    if progress is None or progress.step is None:
        return "the first step"
    return f"step {progress.step}" + (f" of {progress.total}" if progress.total is not None else "")


def _speed(e: Evidence) -> float | None:
    """Newest speed as a share of the run's median speed; None while too little is known."""
    if len(e.step_s) < SLOW_NEEDS:
        return None
    usual = quantile(e.step_s, 0.5)
    recent = quantile(e.step_s[-SLOW_WINDOW:], 0.5)
    if not usual or not recent:
        return None
    return usual / recent


def warnings(evidence: Evidence, session_alive: bool | None) -> tuple[str, ...]:
    """What is wrong beside the state. `session_alive` None: tmux could not be asked."""
    found = [f"damaged: {name}" for name in evidence.damaged]
    if evidence.exit is None and evidence.launcher_alive:
        if not evidence.wrapper_alive:
            found.append("the wrapper is gone: the log ends here and the exit code will not be known")
        if session_alive is False:
            found.append("the tmux session is gone; the trainer goes on without it")
        elif session_alive is None:
            found.append("tmux does not answer")
    if evidence.exit is not None and evidence.exit.log_lost_bytes:
        found.append(f"{evidence.exit.log_lost_bytes} bytes of the log were lost (disk full)")
    return tuple(found)
