"""decide(evidence, playbooks, ledger, policy, now) -> Decision: pure and total (docs/supervise.md, Decision).

The order: gates (may anything be done at all?) -> the problem -> stacks, before anything that lives is ended -> the
first step of its ladder that is allowed, not used up and possible -> stop rule, budget, pause -> act, or say what
would be done.
Whatever the answer, it carries its reason in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dflash_ops.contracts import (
    GOES_BACK,
    LIVE_STATES,
    MOST_ATTEMPTS,
    RULES,
    Action,
    Decision,
    Expectation,
    Ledger,
    Outcome,
    Policy,
    Verdict,
)
from dflash_ops.supervise import budget
from dflash_ops.supervise.available import Ready, available
from dflash_ops.supervise.dryrun import dry_run
from dflash_ops.supervise.gates import closed
from dflash_ops.supervise.problem import Problem, Step, find, holds, key, ladder
from dflash_ops.supervise.remedies import NotAvailable, layer_of
from dflash_ops.supervise.situation import Situation
from dflash_ops.triage.playbook import Playbooks

#: Seconds after which an action that was announced and never heard of again is taken for lost.
PENDING_S = 900.0
#: Seconds within which a start has to show progress, as it is told to people.
PROOF_S = 3600.0


def decide(
    evidence: Situation,
    playbooks: Playbooks,
    ledger: Ledger,
    policy: Policy,
    now: float,
    rng: Callable[[], float] | None = None,
) -> Decision:
    """What to do now.

    Args:
        evidence: all that is known at one moment. ledger: what was tried (`supervise.ledger.rebuild`).
        now: seconds since the epoch. rng: gives a number from 0 to 1, for the pause before the next start.
    """
    if (reason := closed(evidence, ledger, now)) is not None:
        return Decision(Verdict.NONE, reason, attempt=evidence.attempt)
    problem = find(evidence, ledger)
    if problem is None:
        return _nothing(evidence, ledger)
    if problem.kind in policy.quiet or (problem.now and problem.now in policy.quiet):
        text = f"{problem.kind} is a quiet kind of this job: nothing is done or said"
        return Decision(Verdict.NONE, text, attempt=evidence.attempt, kind=problem.kind)
    jitter = min(1.0, max(0.0, rng())) if rng is not None else 0.0
    # An action that was announced is finished before another is begun; so it is looked at as if it were not there.
    pending = _pending(evidence, ledger, now)
    if pending is not None:
        decision = _choose(evidence, problem, playbooks, ledger, policy, now, jitter, pending)
        if decision.id == pending:
            return replace(decision, resumes=True)
    return _choose(evidence, problem, playbooks, ledger, policy, now, jitter, None)


def _nothing(evidence: Situation, ledger: Ledger) -> Decision:
    found = ledger.find(ledger.awaiting)
    if evidence.state not in LIVE_STATES:
        text = f"attempt {evidence.attempt} crashed and is not diagnosed yet"
    elif found is not None and found[1].started == evidence.attempt:
        past = found[1].past_step
        beyond = f"beyond {past}" if past is not None else "at all"
        text = f"{found[1].action} was done; a step {beyond} will show that it helped"
    else:
        text = f"attempt {evidence.attempt} is {evidence.state.value}: nothing to repair"
    return Decision(Verdict.NONE, text, attempt=evidence.attempt)


def _pending(evidence: Situation, ledger: Ledger, now: float) -> str | None:
    found = ledger.find(ledger.pending)
    if found is None or found[1].outcome is not Outcome.INTENDED:
        return None
    fresh = now - found[1].t <= PENDING_S and found[1].attempt == evidence.attempt
    return found[1].id if fresh else None


def _choose(
    s: Situation,
    problem: Problem,
    playbooks: Playbooks,
    ledger: Ledger,
    policy: Policy,
    now: float,
    jitter: float,
    besides: str | None,
) -> Decision:
    """The decision over one problem. `besides`: an announced action that is not counted, because it may be this one."""
    lives = s.state in LIVE_STATES
    if besides is not None:
        ledger = replace(ledger, layers=tuple(x for x in ledger.layers if x.id != besides))
    if lives and s.stacks is None and not s.stacks_failed:
        dump = _dump(s, problem, ledger, policy, besides)
        if dump is not None:
            return dump
    base = Decision(
        Verdict.HOLD,
        "",
        attempt=s.attempt,
        kind=problem.kind,
        fingerprint=problem.fingerprint,
        entity=problem.entity,
        title=problem.title,
        evidence=problem.evidence,
        drop=_useless(problem, ledger),
        jitter=jitter,
    )
    case = ledger.cases.get(problem.fingerprint)
    skipped: list[str] = []
    for step in _steps(problem, playbooks, policy):
        why = _refused(step, problem, s, ledger, policy, budget.used(case, step.action.value, besides))
        ready = NotAvailable(why) if why is not None else available(step, problem, s, ledger, base.drop)
        if isinstance(ready, Ready):
            if RULES[step.action].starts and (stop := _stop_rule(problem, ledger, besides)) is not None:
                skipped.append(f"{step.action.value}: {stop}")
                continue
            # The same try has the same id, however often it is decided; the next one has another.
            count = budget.used(case, step.action.value, besides)
            id = key(problem.fingerprint, step.action.value, s.attempt, count)
            order = _order(base, id, step, ready, problem, s, ledger, now)
            return _timed(replace(order, skipped=tuple(skipped)), s, ledger, policy, now, besides)
        if step.action not in (Action.TELL, Action.HOLD):
            skipped.append(f"{step.action.value}: {ready.reason}")
    return _hold(base, problem, ledger, tuple(skipped), s)


def _steps(problem: Problem, playbooks: Playbooks, policy: Policy) -> tuple[Step, ...]:
    steps = ladder(problem, playbooks, policy)
    if problem.blamed and all(step.action is not Action.UNDO_OVERLAY for step in steps):
        # What made things worse is taken back even where no other hypothesis is left.
        steps = (*steps, Step(Action.UNDO_OVERLAY, "A", 1, "take back what made it worse"))
    return steps


def _refused(step: Step, problem: Problem, s: Situation, ledger: Ledger, policy: Policy, used: int) -> str | None:
    """Why a step may not be done, by grade, allowance, condition or count; None: it may."""
    if step.grade not in ("A", "B"):
        return "it is never done by itself (grade N)"
    if step.action in (Action.TELL, Action.HOLD, Action.DUMP_STACKS):
        return "it is no repair"
    if step.grade == "B" and f"{problem.kind}:{step.action.value}" not in policy.allow:
        return f'it needs allow = ["{problem.kind}:{step.action.value}"]'
    if not holds(step, problem, s, ledger):
        return f"its condition does not hold: {step.when}"
    if used >= step.limit:
        return "it was tried and did not help" if used == 1 else f"it was tried {used} times and did not help"
    return None


def _stop_rule(problem: Problem, ledger: Ledger, besides: str | None) -> str | None:
    count = budget.starts(ledger.cases.get(problem.fingerprint), besides)
    if count >= budget.MOST_STARTS:
        return f"{count} starts for this failure brought no progress, and there is no third"
    return None


def _useless(problem: Problem, ledger: Ledger) -> tuple[str, ...]:
    """Layers taken back with the next start: blamed ones, and those that were for this very failure."""
    outcomes = {t.layer: t.outcome for case in ledger.cases.values() for t in case.tried if t.layer is not None}
    failed = (Outcome.USELESS, Outcome.WORSE, Outcome.FAILED, Outcome.INTERRUPTED)
    return tuple(
        x.id
        for x in ledger.layers
        if x.id in problem.blamed
        or outcomes.get(x.id) in failed
        or (x.fingerprint == problem.fingerprint and outcomes.get(x.id) in (Outcome.DONE, Outcome.CHANGED))
    )


def _dump(s: Situation, problem: Problem, ledger: Ledger, policy: Policy, besides: str | None) -> Decision | None:
    """Where every worker stands, before anything of it is ended; None where it was asked for and did not come."""
    id = key(problem.kind, Action.DUMP_STACKS.value, s.attempt)
    if s.attempt in ledger.dumped and id != besides:
        return None
    act = policy.mode == "act"
    order = Decision(
        Verdict.ACT if act else Verdict.PROPOSE,
        f"{problem.title or problem.kind}: before anything is ended, it is written down where every worker stands",
        id=id,
        action=Action.DUMP_STACKS.value,
        grade="A",
        attempt=s.attempt,
        kind=problem.kind,
        fingerprint=problem.fingerprint,
        title=problem.title,
        evidence=problem.evidence,
        command=dry_run(Action.DUMP_STACKS, s, ledger, params={}, layer=None, drop=(), ends_first=False, starts=False),
        undo="nothing to take back: it only looks",
    )
    return order if act else _told_once(order, ledger)


def _order(
    base: Decision, id: str, step: Step, ready: Ready, problem: Problem, s: Situation, ledger: Ledger, now: float
) -> Decision:
    """The whole order for one step."""
    action, rule = step.action, RULES[step.action]
    at = f"at step {problem.step}" if problem.step is not None else "before the first step"
    came = f", which brought {problem.now}" if problem.now else ""
    reason = f"{problem.kind} struck {at}{came}; {action.value} is the first step of its ladder that may be done"
    layer = layer_of(
        ready.change,
        id=id,
        action=action.value,
        kind=problem.kind,
        fingerprint=problem.fingerprint,
        t=now,
        reason=step.text or rule.text,
    )
    ends_first = rule.starts and s.state in LIVE_STATES
    case = ledger.cases.get(problem.fingerprint)
    # Beyond the last step that was ever reached: what only came back as far as before has proven nothing.
    known = (problem.step, case.step if case is not None else None, s.resumed_step, ledger.mark)
    past = max((x for x in known if x is not None), default=None)
    return replace(
        base,
        verdict=Verdict.ACT,
        reason=reason,
        id=id,
        action=action.value,
        params=ready.params,
        grade=step.grade,
        command=dry_run(
            action,
            s,
            ledger,
            params=ready.params,
            layer=layer,
            drop=ready.drop,
            ends_first=ends_first,
            starts=rule.starts,
        ),
        ends_first=ends_first,
        starts=rule.starts,
        drop=ready.drop,
        layer=layer,
        verify=Expectation(past, PROOF_S, f"a step beyond {past}" if past is not None else "a first step")
        if rule.starts
        else None,
        undo=_undo_text(layer is not None, ready.drop, action),
        notify=True,
    )


def _undo_text(layer: bool, drop: tuple[str, ...], action: Action) -> str:
    if layer:
        return "take its layer off run/overlay.json and start again (undo_overlay)"
    if action in GOES_BACK or action is Action.FRESH_START_ASIDE:
        return "dflash-ops checkpoints restore: what was set aside is moved back whole"
    if drop:
        return "none needed: it takes back changes of our own"
    return "nothing to take back: the config stays as it is"


def _timed(order: Decision, s: Situation, ledger: Ledger, policy: Policy, now: float, besides: str | None) -> Decision:
    """The order, as far as budget, pause and mode allow it now."""
    if order.starts:
        times = budget.idle_starts(ledger, besides)
        until = budget.spent_until(times, policy, now)
        if until is not None:
            most = min(policy.budgets.attempts_per_hour, MOST_ATTEMPTS)
            text = f"the budget of {most} attempts without progress an hour is spent; next would be {order.action}"
            later = until if until != float("inf") else None
            return _told_once(replace(order, verdict=Verdict.HOLD, reason=text, not_before=later), ledger)
        known = [t for t in (s.since, *times[-1:]) if t <= now]
        begin = max(known, default=now) + budget.pause(len(times), policy, ledger.jitter)
        if now < begin and besides != order.id:
            text = f"{order.reason}; it waits {begin - now:.0f} s, because {len(times)} starts brought no progress"
            return replace(order, verdict=Verdict.WAIT, reason=text, not_before=begin, notify=False)
    if policy.mode != "act":
        order = replace(order, verdict=Verdict.PROPOSE, reason=f"{order.reason}; the policy only observes")
        return _told_once(order, ledger)
    return order


def told_key(decision: Decision) -> str:
    """What a person is told once: that nothing is left for a failure, that the budget is spent, what would be done."""
    if decision.verdict is Verdict.PROPOSE:
        return f"proposed:{decision.id}"
    return f"budget:{decision.fingerprint}" if decision.action else decision.fingerprint


def _told_once(decision: Decision, ledger: Ledger) -> Decision:
    return replace(decision, notify=told_key(decision) not in ledger.held)


def _hold(base: Decision, problem: Problem, ledger: Ledger, skipped: tuple[str, ...], s: Situation) -> Decision:
    """Nothing is left: a person has to look."""
    at = f"at step {problem.step}" if problem.step is not None else "before the first step"
    why = f"nothing that may be done is left ({'; '.join(skipped)})" if skipped else "its playbook has no repair for it"
    hold = replace(
        base,
        reason=f"{problem.now or problem.kind} struck {at}, and {why}",
        command=f"look yourself: dflash-ops triage --job {s.job or 'JOB'} --explain",
        skipped=skipped,
        jitter=0.0,
    )
    return _told_once(hold, ledger)
