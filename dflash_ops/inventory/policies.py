"""`[jobs.NAME.policy]`: what the supervisor may do for a job (contracts.Policy).

The rule here: a policy can forbid more than the laws of supervision, never less. Grade B needs its own line in `allow`,
also where an own ladder names the action.
"""

from __future__ import annotations

import re

from dflash_ops.contracts import MOST_ATTEMPTS, RULES, Action, Budgets, Policy
from dflash_ops.errors import did_you_mean
from dflash_ops.inventory.reader import Table

_KIND = re.compile(r"[a-z][a-z0-9_]*")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_MODES = ("observe", "act")


def read_policy(table: Table, adopted: bool) -> Policy:
    """The policy; without one `act` for a job of ours, `observe` for an adopted one."""
    usual = "observe" if adopted else "act"
    below = table.table("policy")
    if below is None:
        return Policy(usual)
    mode = below.text("mode", usual) or usual
    if mode not in _MODES:
        below.fault(f"unknown mode {mode!r}{did_you_mean(mode, _MODES)}", "mode", 'write "observe" or "act"')
        mode = "observe"
    notify = below.text("notify") or ""
    if notify and not notify.startswith("/"):
        below.fault(
            f"{notify!r} is no whole path",
            "notify",
            "write the path of apprise's config file on the job's machine, from / on",
        )
    cooldown = below.number("cooldown_s", 600.0, most=86_400)
    policy = Policy(mode, _allow(below), _budgets(below), _quiet(below), _ladders(below), notify, cooldown)
    below.close()
    return policy


def _allow(table: Table) -> tuple[str, ...]:
    words = table.texts("allow", example='allow = ["kind:action"]') or ()
    for index, word in enumerate(words):
        kind, _, action = word.partition(":")
        at = (*table.path, "allow", index)
        if not _KIND.fullmatch(kind) or not action:
            table.faults.add(
                f"{word!r} is no kind:action", at, 'write "kind:action", for example "cuda_oom:smaller_anchors"'
            )
        elif not _known(action):
            near = did_you_mean(action, [a.value for a in Action])
            table.faults.add(f"there is no action {action!r}{near}", at, "docs/supervise.md lists the actions")
    return words


def _budgets(table: Table) -> Budgets:
    costs = table.table("budgets")
    if costs is None:
        return Budgets()
    budgets = Budgets(
        attempts_per_hour=costs.integer("attempts_per_hour", MOST_ATTEMPTS, least=0, most=MOST_ATTEMPTS),
        backoff_s=costs.number("backoff_s", 5.0, most=3600),
        backoff_cap_s=costs.number("backoff_cap_s", 600.0, most=86_400),
    )
    if budgets.backoff_cap_s < budgets.backoff_s:
        costs.fault("backoff_cap_s is below backoff_s", "backoff_cap_s", f"write {budgets.backoff_s:g} or more")
    costs.close()
    return budgets


def _quiet(table: Table) -> tuple[str, ...]:
    kinds = table.texts("quiet", example='quiet = ["loss_spike"]') or ()
    for index, kind in enumerate(kinds):
        if not _KIND.fullmatch(kind):
            table.faults.add(
                f"{kind!r} is no kind",
                (*table.path, "quiet", index),
                "write the id of a kind: dflash-ops playbooks list",
            )
    return kinds


def _ladders(table: Table) -> dict[str, tuple[str, ...]]:
    below = table.table("ladders", example='ladders = { cuda_oom = ["wait_memory", "smaller_anchors"] }')
    found: dict[str, tuple[str, ...]] = {}
    for key in below.values if below is not None else ():
        assert below is not None
        if not (_KIND.fullmatch(key) or _FINGERPRINT.fullmatch(key)):
            below.fault(f"{key!r} is no kind and no fingerprint", key, "write a kind's id, or 16 hex digits")
        steps = below.texts(key, example=f'{key} = ["restart"]') or ()
        for index, step in enumerate(steps):
            at = (*below.path, key, index)
            if not _known(step):
                near = did_you_mean(step, [a.value for a in Action])
                below.faults.add(f"there is no action {step!r}{near}", at, "docs/supervise.md lists the actions")
            elif RULES[Action(step)].floor == "B" and _KIND.fullmatch(key) and not _allowed(table, key, step):
                below.faults.add(
                    f"{step} is of grade B and not allowed for {key}: it would never run",
                    at,
                    f'add "{key}:{step}" to allow',
                )
        found[key] = steps
    return found


def _allowed(table: Table, kind: str, action: str) -> bool:
    said = table.values.get("allow")
    return isinstance(said, list) and f"{kind}:{action}" in said


def _known(action: str) -> bool:
    return action in Action._value2member_map_
