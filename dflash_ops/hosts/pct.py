"""What pct says, and what that means. Pure: text in, error out (messages as of pve-container 6.1.10).

The rule here: pct's exit codes are as good as random (1, 2, 4, 255 for its own failures), so that the message decides.
"""

from __future__ import annotations

import re

from dflash_ops.errors import (
    ContainerError,
    ContainerLocked,
    ContainerMissing,
    ContainerStopped,
    HostError,
    NotProxmox,
    NotRoot,
)

_MISSING = re.compile(r"(?i)Configuration file '[^']*' does not exist|unable to find configuration file|no such CT")
_STOPPED = re.compile(
    r"(?i)container '?\d+'? not running|(?:CT|VM) \d+ not running|can only push files to a running CT"
)
_RACE = re.compile(r"Failed to get (?:init pid|attach context)")
_LOCKED = re.compile(r"(?:CT|VM) is locked \(([\w-]+)\)")
_LOCK_FILE = re.compile(r"can't lock file '([^']+)'")
_NOT_ROOT = re.compile(r"(?im)please run as root|^sudo: .*(?:password|terminal|tty|not allowed|not in the sudoers)")
_NO_PCT = re.compile(r"(?i)pct.{0,3}: (?:No such file|not found|command not found)")
_STATUS = re.compile(r"(?m)^status: (\w+)$")

#: Lines of a program on the way that mean nothing.
_NOISE = re.compile(r"(?m)^(?:perl: warning: .*|\t(?:LANGUAGE|LC_\w+|LANG) = .*|    are supported and installed .*)$")


def error_of(said: str, rc: int, container: int, via: str) -> HostError | None:
    """The error that a pct which never began our command means; None where its words are not known.

    Args:
        said: its standard error. rc: its exit code. container: its number. via: name of the Proxmox host.
    """
    place = f"container {container} on {via}"
    if _MISSING.search(said):
        return ContainerMissing(
            f"there is no container {container}", f"host {via}", "pct list shows those that are there; correct `id`"
        )
    if (lock := _LOCKED.search(said)) is not None:
        return ContainerLocked(
            f"the container is locked by: {lock[1]}", place, f"wait for its end, or look: pct config {container}"
        )
    if (file := _LOCK_FILE.search(said)) is not None:
        return ContainerLocked(
            f"another pct holds the lock file {file[1]}", place, "wait for it; then say the same again"
        )
    if _STOPPED.search(said):
        return ContainerStopped("the container does not run", place, f"start it there: pct start {container}")
    if _RACE.search(said):
        return ContainerStopped(
            "the container is just starting or shutting down", place, f"look: pct status {container}; then again"
        )
    if _NOT_ROOT.search(said):
        return NotRoot(
            f"pct may be used by root only: {first_line(said)}",
            f"host {via}",
            f"connect as root, or set sudo = true for host {via} and allow it in sudoers without a password",
        )
    if rc == 127 or _NO_PCT.search(said):
        return NotProxmox(
            "there is no pct on this host, so that it is no Proxmox host",
            f"host {via}",
            "let `via` name the Proxmox host itself, or reach the machine with kind ssh",
        )
    return None


def other(said: str, rc: int, container: int, via: str) -> ContainerError:
    """A pct that failed in words of its own."""
    text = first_line(said)
    return ContainerError(
        f"pct failed with exit code {rc}" + (f": {text}" if text else ""),
        f"container {container} on {via}",
        f"try it there: pct exec {container} -- true",
    )


def status_of(said: str) -> str | None:
    """`running`, `stopped`, ... from what `pct status` printed."""
    found = _STATUS.search(said)
    return found[1] if found else None


def first_line(said: str) -> str:
    """The first line that is no locale noise."""
    lines = [line.strip() for line in _NOISE.sub("", said).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
