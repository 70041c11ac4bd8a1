"""From an abstract action to what this job's trainer must be told, and from an overlay to a job that can be started.

The rule here: a change that cannot be made, or that is in force already, is NotAvailable with its reason; nothing is
guessed, and nothing on the forbidden list gets through.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_ops.contracts import ENV_PREFIXES, RULES, Action, JobSpec, Layer, Overlay, RemedyTable, Way, forbidden

_ASSIGNMENT = re.compile(r"^([A-Z][A-Z0-9_]*)=([^\s;|&<>$`]*)$")
#: Ways that hold for any trainer, because they are told in the environment.
_ANY_TRAINER: Mapping[Action, Way] = {
    Action.FRESH_COMPILE_CACHE: Way(
        env={"TORCHINDUCTOR_CACHE_DIR": "{attempt}/inductor", "TRITON_CACHE_DIR": "{attempt}/triton"}
    ),
    Action.NEW_PORT: Way(env={"MASTER_PORT": "{free_port}"}),
    Action.DISABLE_TRACKER: Way(env={"WANDB_MODE": "offline"}),
}
_DEVICE_KEYS = ("workers.target_devices", "workers.drafter_devices")


@dataclass(frozen=True)
class NotAvailable:
    """Why an action cannot be done for this job."""

    reason: str


@dataclass(frozen=True)
class Change:
    """What a layer of the overlay holds."""

    set: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    nofile: int | None = None


def concrete(
    action: Action, table: RemedyTable, overlay: Overlay, params: Mapping[str, Any] | None = None
) -> Change | NotAvailable:
    """What must be changed for an action that changes config; an empty Change for one that changes nothing.

    Args:
        table: the job's remedies. overlay: what is in force.
        params: `env`, `nofile`, `device`, where the action needs it.
    """
    params = params or {}
    rule = RULES[action]
    if not rule.changes:
        return Change()
    change = _change(action, table, overlay, params)
    if isinstance(change, NotAvailable):
        return change
    texts = [*change.args, *(f"{k}={v}" for k, v in change.env.items()), *(f"{k}={v}" for k, v in change.set.items())]
    for text in texts:
        if (bad := forbidden(text)) is not None:
            return NotAvailable(f"it asks for {bad!r}, which is never done by itself")
    if _in_force(change, table, overlay):
        return NotAvailable("it is in force already")
    return change


def _change(action: Action, table: RemedyTable, overlay: Overlay, params: Mapping[str, Any]) -> Change | NotAvailable:
    if action is Action.RAISE_NOFILE:
        limit = params.get("nofile")
        if not isinstance(limit, int):
            return NotAvailable("the limit of open files stands at its hard limit, or is not known")
        return Change(nofile=limit)
    if action is Action.ENV_CHANGE and params.get("env"):
        return _env(params["env"])
    way = table.ways.get(action.value) or _ANY_TRAINER.get(action)
    if way is None:
        return NotAvailable(table.reasons.get(action.value) or "this trainer's remedies table does not say how")
    values = {**table.values, **overlay.set}
    settings = dict(way.set)
    for key, factor in way.scale.items():
        now = values.get(key)
        if isinstance(now, bool) or not isinstance(now, (int, float)) or not math.isfinite(now * factor):
            return NotAvailable(f"the value of {key} is not known")
        scaled = max(1, int(now * factor)) if isinstance(now, int) else now * factor
        if scaled == now:
            return NotAvailable(f"{key} is {now} and cannot be less")
        settings[key] = scaled
    if action is Action.EXCLUDE_DEVICE:
        divided = without_device(str(params.get("device") or ""), values)
        if isinstance(divided, NotAvailable):
            return divided
        names = {"{target_devices}": divided[0], "{drafter_devices}": divided[1]}
        settings = {k: names.get(v, v) if isinstance(v, str) else v for k, v in settings.items()}
    return Change(settings, dict(way.env), way.args)


def _env(said: Any) -> Change | NotAvailable:
    if not isinstance(said, Mapping):
        return NotAvailable("no environment variable is named")
    for name in said:
        if not str(name).startswith(ENV_PREFIXES):
            return NotAvailable(f"{name} is none of the variables that may be changed")
    return Change(env={str(k): str(v) for k, v in said.items()})


def env_of(command: str) -> dict[str, str]:
    """`NAME=VALUE` words of a playbook's command; empty where it is no list of plain assignments."""
    words = command.split()
    found = [_ASSIGNMENT.match(word) for word in words]
    if not words or not all(found) or any("{" in word for word in words):
        return {}
    return {m[1]: m[2] for m in found if m is not None}


def without_device(device: str, values: Mapping[str, Any]) -> tuple[list[str], list[str]] | NotAvailable:
    """Targets and drafters without one device: where a role would be left with none, the other role gives one."""
    roles = []
    for key in _DEVICE_KEYS:
        devices = values.get(key)
        if not isinstance(devices, (list, tuple)) or not devices:
            return NotAvailable(f"the devices of the job are not known ({key})")
        roles.append([str(d) for d in devices])
    target, drafter = roles
    if not device or device == "cpu" or device not in (*target, *drafter):
        return NotAvailable(
            f"the device to leave out is not known{f' ({device} is none of the job)' if device else ''}"
        )
    target, drafter = ([d for d in role if d != device] for role in roles)
    for short, other in ((target, drafter), (drafter, target)):
        if not short:
            if len(other) < 2:
                return NotAvailable("no device would be left for one of the two roles")
            short.append(other.pop())
    return target, drafter


def _in_force(change: Change, table: RemedyTable, overlay: Overlay) -> bool:
    values = {**table.values, **overlay.set}
    same_set = all(k in values and values[k] == v for k, v in change.set.items())
    same_env = all(overlay.env.get(k) == v for k, v in change.env.items() if "{" not in v)
    dynamic = any("{" in v for v in change.env.values())
    same_args = not change.args or any(x.args == change.args for x in overlay.layers)
    same_limit = change.nofile is None or (overlay.nofile or 0) >= change.nofile
    return same_set and same_env and same_args and same_limit and not dynamic


def layer_of(
    change: Change, *, id: str, action: str, kind: str, fingerprint: str, t: float, reason: str
) -> Layer | None:
    """The change as a layer; None where it changes nothing."""
    if change == Change():
        return None
    return Layer(id, action, kind, fingerprint, t, reason, change.set, change.env, change.args, change.nofile)


def apply(spec: JobSpec, overlay: Overlay, *, fresh: bool = False, port: int | None = None) -> JobSpec:
    """The job with the overlay on it. `fresh`: from the beginning; `port` stands for `{free_port}`.

    The limit of open files is not part of a JobSpec: whoever starts it takes `overlay.nofile`.
    """
    resume = Way() if fresh else spec.remedies.ways.get(Action.RESTART.value, Way())
    settings = {**resume.set, **overlay.set}
    words: list[str] = []
    for key, value in settings.items():
        words += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    words += [w for w in resume.args if w not in spec.argv]
    words += overlay.args
    env = {**spec.env, **resume.env, **overlay.env}
    place = str(port) if port is not None else "{free_port}"
    return replace(
        spec,
        argv=(*spec.argv, *(w.replace("{free_port}", place) for w in words)),
        env={k: v.replace("{free_port}", place) for k, v in env.items()},
        overrides={**spec.overrides, **{f"overlay.{k}": json.dumps(v) for k, v in overlay.set.items()}},
    )
