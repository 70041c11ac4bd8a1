"""A moment as people read it."""

from __future__ import annotations

import time


def clock(t: float) -> str:
    """Seconds since the epoch as `2026-01-31 12:00:00Z` (UTC)."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(t))
