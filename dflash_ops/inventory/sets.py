"""`--set key=value`: one run's changes to a job, read as TOML values."""

from __future__ import annotations

import datetime
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import tomllib

from dflash_ops.contracts import Limits
from dflash_ops.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from dflash_ops.inventory.model import Job

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.ASCII)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LIMITS = tuple(f.name for f in fields(Limits))


def parse_value(text: str) -> Any:
    """A TOML value, or the text itself where it is none (`--set target.path=/models/x` needs no quotes)."""
    try:
        document = tomllib.loads(f"value = {text}\n")
    except tomllib.TOMLDecodeError:
        return text
    value = document.pop("value", text)
    # A line break could smuggle in a second key, and a date is text to every reader of ours.
    if document or isinstance(value, (datetime.date, datetime.time)):
        return text
    return value


def split_set(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise UsageError(f"{text!r} has no equals sign", f"--set {text}", "write --set key=value")
    if not _KEY.fullmatch(key):
        raise UsageError(f"{key!r} is no key", f"--set {text}", "write a dotted key, for example --set train.lr=1e-3")
    return key, value.strip()


def apply_sets(job: Job, sets: Sequence[str], tables: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Changes of the job's fields, and the overrides as they are journaled (key -> text)."""
    changes: dict[str, Any] = {}
    said: dict[str, str] = {}
    for text in sets:
        key, value = split_set(text)
        head, _, rest = key.partition(".")
        if head == "env" and rest:
            _set_env(job, changes, rest, value, text)
        elif head == "limits" and rest:
            _set_limit(job, changes, rest, value, text)
        elif key == "grace_s":
            changes[key] = _positive(value, text)
        elif key == "history_limit":
            changes[key] = int(_positive(value, text))
        elif key in ("workers.target_devices", "workers.drafter_devices"):
            option = f"--{key[8:-8]}-gpus"
            raise UsageError("devices have an option of their own", f"--set {text}", f"write {option} 0,1,2")
        elif head in tables and rest:
            trainer = changes.get("trainer", job.trainer)
            if trainer is None:
                raise UsageError(
                    f"job {job.name} runs its own command, which has no table {head!r}",
                    f"--set {text}",
                    "only env.NAME, limits.KEY, grace_s and history_limit can be set for it",
                )
            merged = _put(trainer.tables, key.split("."), parse_value(value), text)
            changes["trainer"] = replace(trainer, tables=merged)
        else:
            raise UsageError(
                f"there is no key {key!r} to set{_near(key, head, tables)}", f"--set {text}", _known(tables)
            )
        # What enters the environment is journaled by name only: it may be somebody's key.
        said[key] = "(set)" if head == "env" else value
    return changes, said


def _known(tables: Sequence[str]) -> str:
    return "set one of: " + ", ".join(f"{t}.KEY" for t in tables) + ", env.NAME, limits.KEY, grace_s, history_limit"


def _near(key: str, head: str, tables: Sequence[str]) -> str:
    close = difflib.get_close_matches(head, [*tables, "env", "limits", "grace_s", "history_limit"], n=1)
    if not close or close[0] == head:
        return ""
    return f"; did you mean {key.replace(head, close[0], 1)!r}?"


def _is_secret(job: Job, key: str) -> bool:
    return key.startswith("env.") and any(s.name == key[4:] for s in job.secret_env)


def _set_env(job: Job, changes: dict[str, Any], name: str, value: str, text: str) -> None:
    if not _ENV_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a variable", f"--set {text}", "use letters, digits and _")
    if _is_secret(job, f"env.{name}"):
        raise UsageError(
            f"{name} is a secret: an override is journaled, so it cannot carry one",
            f"--set env.{name}=...",
            f"export {name} before you start",
        )
    # An environment holds text only; quotes around it are taken off, so that shells and TOML habits both work.
    parsed = parse_value(value)
    changes["env"] = {**changes.get("env", job.env), name: parsed if isinstance(parsed, str) else value}


def _set_limit(job: Job, changes: dict[str, Any], name: str, value: str, text: str) -> None:
    if name not in _LIMITS:
        raise UsageError(
            f"there is no limit {name!r}{did_you_mean(name, _LIMITS)}",
            f"--set {text}",
            f"set one of: {', '.join(_LIMITS)}",
        )
    changes["limits"] = replace(changes.get("limits", job.limits), **{name: _positive(value, text)})


def _positive(value: str, text: str) -> float:
    number = parse_value(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number <= 0:
        raise UsageError(f"{value!r} is no number above 0", f"--set {text}", "write a number, for example 120")
    return float(number)


def _put(tables: Mapping[str, Any], path: Sequence[str], value: Any, text: str) -> dict[str, Any]:
    """A copy of nested tables with one value replaced."""
    head, *rest = path
    copy = dict(tables)
    if not rest:
        copy[head] = value
        return copy
    below = copy.get(head, {})
    if not isinstance(below, Mapping):
        raise UsageError(f"{head!r} is a value, no table", f"--set {text}", "set the key itself")
    copy[head] = _put(below, rest, value, text)
    return copy
