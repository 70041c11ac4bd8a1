"""From a host of the inventory to the way to it."""

from __future__ import annotations

from dflash_ops import inventory as inv
from dflash_ops.errors import UsageError
from dflash_ops.hosts.base import Host
from dflash_ops.hosts.local import LocalHost


def open_host(inventory: inv.Inventory, name: str) -> Host:
    """The host of this name; nothing is connected before its first call.

    Raises:
        UsageError: the inventory has no such host, or it is of a kind that this version does not reach yet.
    """
    host = inventory.hosts.get(name)
    if host is None:
        known = ", ".join(inventory.hosts)
        fix = f"name one of: {known}" if known else "add a [hosts.NAME] table"
        raise UsageError(f"there is no host {name!r}", inventory.file, fix)
    if isinstance(host, inv.LocalHost):
        return LocalHost(host.name)
    raise UsageError(
        f"host {name} is of kind {host.kind}, which is reached by a later version",
        f"{inventory.file}, key hosts.{name}.kind",
        "this version runs jobs on hosts of kind local: run dflash-ops on that machine itself",
    )
