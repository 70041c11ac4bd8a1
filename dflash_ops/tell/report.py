"""A run as data: what a report shows, and what `report --json` prints (docs/schemas/report.schema.json). Pure.

The rule here: nothing that could be a secret is in it. Of a command its program only, of variables their names only, of
config no value whose key speaks of a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tomllib

from dflash_ops.client import History, Seen
from dflash_ops.contracts import Event, State, from_dict, to_dict
from dflash_ops.errors import ContractError
from dflash_ops.tell.incidents import incidents

#: Words of a key whose value is left out, and what stands in its place.
_SECRET = re.compile(r"(?i)token(?!iz|s\b|s_|_)|secret|passw|passphrase|credential|api_?key|private_?key|auth(?!or)")
HIDDEN = "(not shown)"

#: The same in a text: a word that speaks of a secret and what follows it (`--hub-token X`, `API_KEY=X`), and values
#: that show by themselves what they are (tokens of hubs, keys of clouds).
_SAID = re.compile(
    r"(?i)(?P<key>(?:token(?!iz|s\b|s_|_i)|secret|passw(?:or)?d|passphrase|credential|api[_-]?key|private[_-]?key)"
    r"[\w.-]{0,40}\"?(?:\s{0,8}[=:]\s{0,8}|\s{1,8}(?=[^\s-])))(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;]+)"
)
_SHAPED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|xox[bap]-[\w-]{10,})"
)

#: Checkpoints of a report; of more every other one is left out, again and again.
_CHECKPOINTS = 300


def build(history: History, seen: Seen | None, *, host: str, root: str, job: str, made: float) -> dict[str, Any]:
    """Everything that a report shows.

    Args:
        seen: the job now; None where that could not be asked. made: seconds since the epoch, by our clock.

    Raises:
        ContractError: the history is not in the agreed form.
    """
    head = history.head
    try:
        events = [from_dict(Event, e, "journal") for e in head["events"]]
        attempts = [_attempt(one, float(head["now"])) for one in history.attempts]
        there, now = int(head["attempts_there"]), float(head["now"])
        spec = head["job"] if isinstance(head["job"], dict) else {}
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(
            f"the course of job {job} is not in the agreed form: {error!r}", host, "deploy again"
        ) from None
    numbers = {one["attempt"] for one in attempts}
    snapshot = seen.snapshot if seen is not None else None
    struck = [one for one in incidents(events) if numbers & set(one.attempts)]
    return {
        "schema": 1,
        "kind": "report",
        "job": job,
        "host": host,
        "root": root,
        "made": made,
        "now": now,
        "state": None if snapshot is None else _state(snapshot.state, snapshot.detail),
        "attempts_there": there,
        "torn_lines": int(head.get("torn_lines") or 0),
        "attempts": attempts,
        "incidents": _cleared(to_dict(struck)),
        "checkpoints": _checkpoints(events, numbers),
        "config": config(spec),
        "gpus": [] if snapshot is None else to_dict(snapshot.gpus),
        "gpus_note": "" if snapshot is None else snapshot.gpus_note,
    }


def _state(state: State, detail: str) -> dict[str, str]:
    return {"state": state.value, "detail": cleared(detail)}


def _attempt(told: Mapping[str, Any], now: float) -> dict[str, Any]:
    course = dict(told["course"])
    points = course.pop("points")
    if not isinstance(points, list) or not all(isinstance(p, dict) for p in points):
        raise TypeError("points")
    exit = told["exit"] if isinstance(told.get("exit"), dict) else None
    started, ended = told["started"], exit["t"] if exit is not None else None
    until = ended if ended is not None else now if told["alive"] else None
    return {
        "attempt": int(told["attempt"]),
        "alive": bool(told["alive"]),
        "state": told["state"] if told["state"] is not None else "alive",
        "detail": cleared(str(told["detail"])),
        "release": told["release"],
        "reason": cleared(str(told["reason"])),
        "overrides": {str(k): cleared(str(shown(str(k), v))) for k, v in dict(told["overrides"]).items()},
        "started": started,
        "ended": ended,
        "duration_s": until - started if until is not None and started is not None else None,
        "damaged": list(told["damaged"]),
        "course": course,
        "points": points,
    }


def _checkpoints(events: list[Event], numbers: set[int]) -> list[dict[str, Any]]:
    found = [
        {"attempt": e.attempt, "step": e.data["step"], "t": e.t}
        for e in events
        if e.event == "checkpoint" and e.attempt in numbers and isinstance(e.data.get("step"), int)
    ]
    while len(found) > _CHECKPOINTS:
        found = found[1::2]
    return found


def shown(key: str, value: Any) -> Any:
    """A value of config, unless its key speaks of a secret."""
    return HIDDEN if _SECRET.search(key) else value


def cleared(text: str) -> str:
    """A text without what looks like a secret."""
    return _SHAPED.sub(HIDDEN, _SAID.sub(lambda found: f"{found['key']}{HIDDEN}", text))


def _cleared(value: Any) -> Any:
    """All texts in it `cleared`."""
    if isinstance(value, str):
        return cleared(value)
    if isinstance(value, dict):
        return {key: _cleared(one) for key, one in value.items()}
    return [_cleared(one) for one in value] if isinstance(value, list) else value


def config(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What the newest of the attempts ran with: `values` (`table.key`), and what is known of its command."""
    text, values, fault = str(spec.get("run_toml") or ""), {}, ""
    try:
        values = dict(_flat(tomllib.loads(text))) if text else {}
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        fault = f"run.toml cannot be understood: {error}"
    return {
        "program": str(spec.get("program") or ""),
        "words": spec.get("words") if isinstance(spec.get("words"), int) else None,
        "foreign": bool(spec.get("foreign")),
        "mode": str(spec.get("mode") or ""),
        "checkpoints": str(spec.get("checkpoints") or ""),
        "env": [str(name) for name in spec.get("env") or ()],
        "values": values,
        "fault": fault,
    }


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, cleared(str(shown(name, value)))
