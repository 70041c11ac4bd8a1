"""How often and how soon: the stop rule, the hour's budget, the pause between attempts (laws 4 and 5).

Counted are announcements, not successes: an action that was announced and then lost with its supervisor counts too.
"""

from __future__ import annotations

from dflash_ops.contracts import MOST_ATTEMPTS, Case, Ledger, Policy

HOUR_S = 3600.0
#: Starts for one fingerprint without progress; there is no third, whatever its ladder says.
MOST_STARTS = 2
#: Largest part of a pause that chance adds.
JITTER = 0.25


def used(case: Case | None, action: str, besides: str | None = None) -> int:
    """How often an action was announced for this fingerprint since a step beyond it was last reached."""
    return sum(1 for t in case.tried if t.action == action and t.id != besides) if case is not None else 0


def starts(case: Case | None, besides: str | None = None) -> int:
    """New attempts announced for this fingerprint since a step beyond it was last reached."""
    return sum(1 for t in case.tried if t.starts and t.id != besides) if case is not None else 0


def idle_starts(ledger: Ledger, besides: str | None = None) -> tuple[float, ...]:
    """Times of automatic starts without progress, without one that is only to be finished."""
    found = ledger.find(besides)
    if found is None or not found[1].starts:
        return ledger.idle_starts
    times = list(ledger.idle_starts)
    if found[1].t in times:
        times.remove(found[1].t)
    return tuple(times)


def spent_until(times: tuple[float, ...], policy: Policy, now: float) -> float | None:
    """When the hour's budget allows the next start; None: it does now. A time from the future counts as of now."""
    most = min(policy.budgets.attempts_per_hour, MOST_ATTEMPTS)
    recent = sorted(t for t in times if t > now - HOUR_S)
    if len(recent) < most:
        return None
    if most <= 0:
        return float("inf")
    return min(recent[-most], now) + HOUR_S


def pause(number: int, policy: Policy, jitter: float) -> float:
    """Seconds before the start of this number (0 = the first since progress: none), with chance added, capped."""
    if number <= 0:
        return 0.0
    base = policy.budgets.backoff_s * 2.0 ** min(number - 1, 30)
    return min(policy.budgets.backoff_cap_s, base * (1.0 + JITTER * min(max(jitter, 0.0), 1.0)))
