"""From a host of the inventory to the way to it."""

from __future__ import annotations

import threading
from types import TracebackType

from dflash_ops import inventory as inv
from dflash_ops.errors import UsageError
from dflash_ops.hosts.base import Host
from dflash_ops.hosts.local import LocalHost


class Hosts:
    """The hosts of one inventory, each opened once, whatever thread asks: containers of one Proxmox host share it.

    Args:
        accept_new: host keys that are not known yet are taken and remembered (a changed one never).
    """

    def __init__(self, inventory: inv.Inventory, *, accept_new: bool = False) -> None:
        self._inventory = inventory
        self._accept_new = accept_new
        self._open: dict[str, Host] = {}
        self._lock = threading.RLock()  # a container's host is opened with it

    def __getitem__(self, name: str) -> Host:
        """The host of this name; nothing is connected before its first call.

        Raises:
            UsageError: the inventory has no such host.
        """
        with self._lock:
            if name not in self._open:
                self._open[name] = self._make(name)
            return self._open[name]

    def close(self) -> None:
        """Give all connections back."""
        for host in self._open.values():
            host.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _make(self, name: str) -> Host:
        host = self._inventory.hosts.get(name)
        if host is None:
            known = ", ".join(self._inventory.hosts)
            fix = f"name one of: {known}" if known else "add a [hosts.NAME] table"
            raise UsageError(f"there is no host {name!r}", self._inventory.file, fix)
        if isinstance(host, inv.LocalHost):
            return LocalHost(host.name)
        if isinstance(host, inv.SshHost):
            from dflash_ops.hosts.ssh import SshHost

            return SshHost(
                host.name,
                host.address,
                user=host.user,
                # 22 is what the inventory has where nothing is said: then the ssh config's port counts
                port=host.port if host.port != 22 else None,
                identity=host.identity,
                jump=host.jump,
                known_hosts=host.known_hosts,
                sudo=host.sudo,
                accept_new=self._accept_new,
            )
        from dflash_ops.hosts.lxc import LxcHost

        return LxcHost(host.name, self[host.via], host.id)


def open_host(inventory: inv.Inventory, name: str, *, accept_new: bool = False) -> Host:
    """One host of the inventory, for a command that needs only this one.

    Raises:
        UsageError: the inventory has no such host.
    """
    return Hosts(inventory, accept_new=accept_new)[name]
