"""What a job's owner lets the supervisor do (inventory, `[jobs.NAME.policy]`); it travels in job.json."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The law's budget of automatic attempts without progress in an hour: a policy may ask for less, never for more.
MOST_ATTEMPTS = 5


@dataclass(frozen=True)
class Budgets:
    """What repairs may cost: attempts without progress an hour, and the pause before the second and later ones."""

    attempts_per_hour: int = MOST_ATTEMPTS
    backoff_s: float = 5.0
    backoff_cap_s: float = 600.0


@dataclass(frozen=True)
class Policy:
    """`observe` says what it would do, `act` does it.

    Attributes:
        allow: grade B actions permitted, each `kind:action`.
        quiet: kinds of which nothing is said and for which nothing is done.
        ladders: fingerprint or kind -> actions, first to last, instead of the playbook's.
        notify: apprise's config file on the job's machine, "" for none; the same thing again after `cooldown_s` only.
    """

    mode: str = "observe"
    allow: tuple[str, ...] = ()
    budgets: Budgets = field(default_factory=Budgets)
    quiet: tuple[str, ...] = ()
    ladders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notify: str = ""
    cooldown_s: float = 600.0
