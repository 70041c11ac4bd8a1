"""Where the nodes of one job meet, as a check of preflight: is the port free on node 0, do the others get there?

The rule here: what cannot be known before node 0 listens is said as what was seen. A refused connection is a good
answer: the packets arrive, and nobody listens yet.
"""

from __future__ import annotations

import errno
import socket

from dflash_ops.resident.preflight import Check, Request

#: Seconds for another node's answer.
REACH_S = 3.0

_NAME = "rendezvous"

#: One answer of getaddrinfo.
Address = tuple[int, int, int, str, "tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]"]


def rendezvous(request: Request) -> list[Check]:
    """Nothing for a job on one machine."""
    spec = request.spec
    if spec.nnodes < 2:
        return []
    host, _, port = spec.rendezvous.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError) as error:
        fix = "let it be known there (/etc/hosts), or write an address of node 0 as `rendezvous`"
        return [Check(_NAME, "failed", f"{host or spec.rendezvous} is not known: {error}", fix)]
    where = spec.rendezvous
    return [_listen(found[0], where, request) if spec.node_rank == 0 else _reach(found[0], where)]


def _listen(address: Address, where: str, request: Request) -> Check:
    """Node 0: whether it could listen there."""
    family, kind, protocol, _, at = address
    try:
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(at)
            one.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            if request.pid is not None:
                return Check(_NAME, "ok", f"{where} is in use, as it should be while the job that is replaced runs")
            look = f"ss -ltnp 'sport = :{at[1]!s}'"
            fix = f"name another port as `rendezvous` of the job, or end who has it: {look}"
            return Check(_NAME, "failed", f"{where} is in use by another process", fix)
        if error.errno == errno.EADDRNOTAVAIL:
            return Check(
                _NAME,
                "warn",
                f"{where} is no address of this machine, on which node 0 runs",
                "write one of its own as `rendezvous`, unless it is forwarded to here",
            )
        return Check(_NAME, "failed", f"{where} cannot be listened on: {error.strerror or error}", "name another port")
    return Check(_NAME, "ok", f"node 0 can listen on {where}")


def _reach(address: Address, where: str) -> Check:
    """Another node: whether its packets get there."""
    family, kind, protocol, _, at = address
    try:
        with socket.socket(family, kind, protocol) as one:
            one.settimeout(REACH_S)
            one.connect(at)
    except ConnectionRefusedError:
        return Check(_NAME, "ok", f"the way to {where} is there (nobody listens yet)")
    except TimeoutError:
        return Check(
            _NAME,
            "warn",
            f"{where} does not answer within {REACH_S:g} s",
            "node 0 does not listen yet, but a firewall may be in the way: let this port pass",
        )
    except OSError as error:
        return Check(
            _NAME,
            "failed",
            f"{where} cannot be reached from here: {error.strerror or error}",
            "write an address of node 0 as `rendezvous` that every node reaches",
        )
    return Check(_NAME, "ok", f"{where} answers")
