"""Network namespaces, the wires between them, and entering one by a thread of this process.

Addresses are of 192.0.2.0/24 and live in the namespaces only: nothing of the machine's own network is touched. Each
wire is point to point (/32 on both ends), and no namespace has a default route: what a cut wire cannot carry goes
nowhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from lab.shell import sh

CLONE_NEWNET = 0x40000000
RUN = Path("/run/netns")

#: Name -> last byte of its address.
ADDRESSES = {"op": 1, "pve1": 11, "pve2": 12, "inner": 13}
#: Who has a wire to whom. `inner` is reached over pve2 only.
WIRES = (("op", "pve1"), ("op", "pve2"), ("pve1", "pve2"), ("pve2", "inner"))


def address(name: str) -> str:
    return f"192.0.2.{ADDRESSES[name]}"


def wire_end(here: str, there: str) -> str:
    """Name of the interface in `here` that leads to `there`."""
    return f"to-{there}"


def inode(namespace: str) -> int:
    return (RUN / namespace).stat().st_ino


def make(lab_id: str, prefix: str) -> dict[str, str]:
    """All namespaces and wires; name -> namespace."""
    spaces = {name: f"{prefix}{lab_id}-{name}" for name in ADDRESSES}
    for space in spaces.values():
        sh(["ip", "netns", "add", space])
    lines: dict[str, list[str]] = {name: ["link set lo up"] for name in spaces}
    for number, (a, b) in enumerate(WIRES):
        # made inside the first namespace, so that no interface ever stands in the machine's own
        lines[a].append(f"link add {wire_end(a, b)} type veth peer name w{number} netns {spaces[b]}")
        lines[b].append(f"link set w{number} name {wire_end(b, a)}")
        for here, there in ((a, b), (b, a)):
            end = wire_end(here, there)
            lines[here].append(f"addr add {address(here)}/32 peer {address(there)} dev {end}")
            lines[here].append(f"link set {end} up")
    order = ["op", "pve1", "pve2", "inner"]
    for name in order:
        sh(["ip", "-n", spaces[name], "-batch", "-"], stdin="\n".join(lines[name]).encode() + b"\n")
        # Where a wire is cut, the answer is at once "no way", never another way.
        sh(["ip", "-n", spaces[name], "route", "add", "unreachable", "192.0.2.0/24", "metric", "9999"])
    return spaces


def remove(namespace: str, wanted_inode: int) -> None:
    """The namespace, if it still is the one that was recorded."""
    with contextlib.suppress(FileNotFoundError):
        if inode(namespace) == wanted_inode:
            sh(["ip", "netns", "del", namespace], ok=None)


_libc = ctypes.CDLL(None, use_errno=True)


def _setns(fd: int) -> None:
    if _libc.setns(fd, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "setns")


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread (and the threads and processes that it starts) is in `namespace`; its sockets stay there."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(RUN / namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _setns(before)
    finally:
        os.close(before)
