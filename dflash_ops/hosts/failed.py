"""Errors and small commands that every host of a shell has in common."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_ops.errors import CommandFailed, DeadlineExceeded
from dflash_ops.hosts.base import Host
from dflash_ops.hosts.words import show


def too_late(where: str, argv: Sequence[str], seconds: float, *, line: bool = False) -> DeadlineExceeded:
    """The deadline passed (`line`: no line came in time)."""
    return DeadlineExceeded(
        f"no {'line' if line else 'answer'} within {seconds:g} s from: {show(argv)}",
        where,
        "the command was ended; look whether it still has something to say"
        if line
        else "the command was ended; see what holds it up there, or repeat with more time",
    )


def command_failed(where: str, argv: Sequence[str], rc: int, stderr: bytes) -> CommandFailed:
    """A stream's command ended with another code than 0."""
    text = stderr.decode("utf-8", "replace").strip()
    return CommandFailed(
        f"exit code {rc} from: {show(argv)}" + (f"\n{text[-1000:]}" if text else ""),
        where,
        "read what it says above" if text else "run it by hand there",
        rc=rc,
        stderr=text,
    )


def fetch_tail(host: Host, where: str, path: str, *, deadline: float, limit: int) -> bytes:
    """The last `limit` bytes of a file, by tail(1).

    Raises:
        CommandFailed: it is not there or cannot be read. HostError.
    """
    done = host.run(["tail", "-c", str(limit), "--", path], deadline=deadline)
    if done.rc != 0:
        said = done.error_text.strip()
        raise CommandFailed(
            f"{path} cannot be read: {said}",
            where,
            "see whether it is there and may be read",
            rc=done.rc,
            stderr=said,
        )
    return done.stdout
