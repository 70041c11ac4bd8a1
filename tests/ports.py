"""A port for a test that needs its number before anything listens on it."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Free a moment ago, at all addresses of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
