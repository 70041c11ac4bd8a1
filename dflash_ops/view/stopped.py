"""What a stop came to, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_ops.contracts import CheckpointInfo, ExitRecord, from_dict
from dflash_ops.view.text import clean, duration


def stopped_text(answer: Mapping[str, Any]) -> str:
    """`attempt 3 stopped: exit code 3 (stopped on request, state saved); saved at step 100`.

    Args:
        answer: what the resident's `stop` said.
    """
    attempt = answer.get("attempt")
    if attempt is None:
        return "nothing was ever started"
    ended = answer.get("exit")
    record = from_dict(ExitRecord, ended, "stop") if ended else None
    parts = [f"attempt {attempt} had ended before" if answer.get("already") else f"attempt {attempt} stopped"]
    if record is not None:
        parts[0] += f": {record.describe()}"
        if answer.get("already"):
            parts[0] += f", after {duration(record.duration_s)}"
    if answer.get("escalated"):
        parts.append("it did not end in its grace time and was ended by KILL; what came after its last save is lost")
    if answer.get("checkpoint"):
        checkpoint = from_dict(CheckpointInfo, answer["checkpoint"], "stop")
        # One of an earlier attempt is where a resume goes on from, not what this one saved.
        own = record is None or checkpoint.t >= record.t - record.duration_s
        parts.append(f"{'saved at' if own else 'the newest checkpoint is of'} step {checkpoint.step}")
    parts += [clean(str(w)) for w in answer.get("warnings") or ()]
    return "; ".join(parts)
