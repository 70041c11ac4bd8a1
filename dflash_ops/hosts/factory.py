"""From a host of the inventory to the way to it."""

from __future__ import annotations

from dflash_ops import inventory as inv
from dflash_ops.errors import UsageError
from dflash_ops.hosts.base import Host
from dflash_ops.hosts.local import LocalHost


def open_host(inventory: inv.Inventory, name: str, *, accept_new: bool = False) -> Host:
    """The host of this name; nothing is connected before its first call.

    Args:
        accept_new: host keys that are not known yet are taken and remembered (a changed one never).

    Raises:
        UsageError: the inventory has no such host.
    """
    host = inventory.hosts.get(name)
    if host is None:
        known = ", ".join(inventory.hosts)
        fix = f"name one of: {known}" if known else "add a [hosts.NAME] table"
        raise UsageError(f"there is no host {name!r}", inventory.file, fix)
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
            accept_new=accept_new,
        )
    from dflash_ops.hosts.lxc import LxcHost

    return LxcHost(host.name, open_host(inventory, host.via, accept_new=accept_new), host.id)
