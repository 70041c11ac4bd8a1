"""A Proxmox host with containers, made of network namespaces, a real sshd and real unprivileged LXC containers.

    from lab import Lab

    with Lab.up() as lab, lab.operator():       # this thread is the operator's machine now
        ...                                     # ssh 192.0.2.11, inventory: lab.inventory
        lab.faults.link_down("pve1")

Built in a few seconds, torn down always; it touches nothing but its own namespaces, containers and folder. Standard
library only. See README.md beside this file.
"""

from lab.build import Lab
from lab.needs import missing

__all__ = ["Lab", "missing"]
