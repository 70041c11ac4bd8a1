"""Over which network interface a node reaches the endpoint: what gloo and NCCL must be told to use. No torch.

Both pick an interface by themselves, and on a machine with several (containers, a second network) not always the one
on which the other nodes are.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from trainer.errors import ConfigError

_SIOCGIFADDR = 0x8915
_IPV6 = Path("/proc/net/if_inet6")


def local_address(host: str, port: int) -> str:
    """This machine's own address on the way to an endpoint. Asks the routing table only: nothing is sent.

    Raises:
        ConfigError: the name does not resolve, or there is no way there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{host} cannot be resolved: {error}", "--rdzv-endpoint", "give node 0's address, as all nodes reach it"
        ) from error
    why: OSError | None = None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError as error:
            why = error
    raise ConfigError(
        f"there is no way to {host}: {why}", "--rdzv-endpoint", "give node 0's address, as all nodes reach it"
    ) from why


def interface_of(address: str) -> str:
    """Name of the interface that has an address.

    Raises:
        ConfigError: none has it.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return "lo"
    name = _with_ipv4(wanted) if isinstance(wanted, ipaddress.IPv4Address) else _with_ipv6(wanted)
    if name is None:
        raise ConfigError(
            f"no interface here has the address {address}", "--rdzv-endpoint", "set GLOO_SOCKET_IFNAME to the right one"
        )
    return name


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _with_ipv4(wanted: ipaddress.IPv4Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if ipaddress.IPv4Address(raw[20:24]) == wanted:
                return name
    return None


def _with_ipv6(wanted: ipaddress.IPv6Address) -> str | None:
    try:
        lines = _IPV6.read_text().splitlines()
    except OSError:
        return None  # a kernel without IPv6
    for line in lines:
        words = line.split()
        if len(words) == 6 and ipaddress.IPv6Address(int(words[0], 16)) == wanted:
            return words[5]
    return None
