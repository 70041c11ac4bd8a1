"""Whether this machine can carry a lab: root, the programs of .ci/lab-packages, and no setuid newuidmap."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PROGRAMS = {
    "lxc-start": "lxc",
    "lxc-attach": "lxc",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "tini": "tini",
    "iptables": "iptables",
    "ip": "iproute2",
    "tc": "iproute2",
    "rsync": "rsync",
    "sudo": "sudo",
    "tmux": "tmux",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
SBIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> str | None:
    """Why there can be no lab here, or None."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux"
    if os.geteuid() != 0:
        return "the lab needs root (network namespaces, containers)"
    gone = sorted({package for name, package in PROGRAMS.items() if shutil.which(name, path=SBIN) is None})
    if gone:
        return f"the lab needs packages: {' '.join(gone)} (.ci/lab-packages installs them)"
    if shutil.which("newuidmap", path=SBIN):
        return "package uidmap is installed: LXC would use it and map no ids for root; remove it"
    if not Path("/usr/bin/python3").exists():
        return "the lab needs /usr/bin/python3: a version manager's Python cannot be read in a container"
    return None
