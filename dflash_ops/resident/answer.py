"""What the resident says: one line of JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

from dflash_ops.errors import DflashError


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message, ensure_ascii=False, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def error(failure: DflashError) -> int:
    """Say an error that a person reads; gives the exit code of its class."""
    say({"schema": 1, "error": failure.to_json()})
    return failure.exit_code
