"""What has to be trained, from what a former demo left behind. Pure, so that every case is a test.

A demo's key names all that its training depends on: release, run.toml, target and data. It is the attempt's recorded
reason, so that what was trained and what it was trained from cannot come apart.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_ops.contracts import LIVE_STATES, Snapshot, State

_REASON = "demo "


@dataclass(frozen=True)
class Choice:
    """What to do, and why, in words.

    Attributes:
        action: `train` (deploy), `follow` (an attempt runs already), `reuse` (a finished one is what is wanted).
        begin: of a `train`: `fresh` sets checkpoints aside, `resume` goes on from the newest one.
        replace: of a `train`: an attempt that runs is stopped first.
    """

    action: str
    why: str
    begin: str = ""
    replace: bool = False


def key_of(parts: Mapping[str, str]) -> str:
    """16 hex digits over named parts (release id, run.toml, hashes of target and data)."""
    return hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:16]


def reason_of(key: str) -> str:
    """What a demo's attempt records as its reason."""
    return _REASON + key


def key_in(reason: str | None) -> str | None:
    """The key in a recorded reason; None if the attempt was started by someone else."""
    if reason is None or not re.fullmatch(_REASON + "[0-9a-f]{16}", reason):
        return None
    return reason.removeprefix(_REASON)


def choose(snapshot: Snapshot, reason: str | None, key: str, *, replace: bool, again: bool = False) -> Choice:
    """What a demo with this key has to do.

    Args:
        snapshot: the job now. reason: recorded by its newest attempt, None if there is none.
        replace: stop an attempt that runs. again: train even if a finished attempt could be reused.
    """
    same = key_in(reason) == key
    attempt = f"attempt {snapshot.attempt}"
    if snapshot.state in LIVE_STATES:
        if replace:
            return Choice("train", f"{attempt} runs and is stopped (--replace)", "fresh", replace=True)
        of = "it is this very demo" if same else "it was started from other code, config, target or data"
        return Choice("follow", f"{attempt} runs already ({of}): it is followed; --replace stops it and starts anew")
    if snapshot.attempt is None or reason is None:
        return Choice("train", "nothing was trained here yet", "fresh")
    if not same:
        return Choice("train", f"{attempt} was trained from other code, config, target or data", "fresh")
    if snapshot.state is State.FINISHED:
        if again:
            return Choice("train", f"{attempt} is finished; it is trained again (--again)", "fresh")
        return Choice("reuse", f"{attempt} finished with the same code, config, target and data")
    return Choice("train", f"{attempt} is {snapshot.state.value}: it goes on from its last checkpoint", "resume")
