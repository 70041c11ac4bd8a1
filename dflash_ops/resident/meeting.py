"""Where the nodes of one job meet, as a check of preflight: is the port free on node 0, do the others get there?

The rule here: what cannot be known before node 0 listens is said as what was seen. A refused connection is a good
answer: the packets arrive, and nobody listens yet.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from dflash_ops.resident.preflight import Check, Request

#: Seconds for another node's answer.
REACH_S = 3.0

#: Addresses of one name that are tried.
MOST = 8

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
    look = _listen if spec.node_rank == 0 else _reach
    return [look(found[:MOST], request)]


def _listen(found: Sequence[Address], request: Request) -> Check:
    """Node 0: whether it could listen there. The trainer listens on its port at every address of the machine."""
    where = request.spec.rendezvous
    errors = [_bound(address) for address in found]
    numbers = {error.errno for error in errors if error is not None}
    if errno.EADDRINUSE in numbers:
        if request.pid is not None:
            return Check(_NAME, "ok", f"{where} is in use, as it should be while the job that is replaced runs")
        look = f"ss -ltnp 'sport = :{where.rpartition(':')[2]}'"
        fix = f"name another port as `rendezvous` of the job, or end who has it: {look}"
        return Check(_NAME, "failed", f"{where} is in use by another process", fix)
    if None in errors:
        return Check(_NAME, "ok", f"node 0 can listen on {where}")
    if errno.EADDRNOTAVAIL in numbers:
        return Check(
            _NAME,
            "warn",
            f"{where} is no address of this machine, on which node 0 runs",
            "write one of its own as `rendezvous`, unless it is forwarded to here",
        )
    return Check(_NAME, "failed", f"{where} cannot be listened on: {_words(errors[0])}", "name another port")


def _bound(address: Address) -> OSError | None:
    """Why one address cannot be listened on."""
    family, kind, protocol, _, at = address
    try:
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(at)
            one.listen(1)
    except OSError as error:
        return error
    return None


def _reach(found: Sequence[Address], request: Request) -> Check:
    """Another node: whether its packets get there. As the trainer does, it tries one address after the other."""
    where = request.spec.rendezvous
    errors: list[OSError] = []
    for family, kind, protocol, _, at in found:
        try:
            with socket.socket(family, kind, protocol) as one:
                one.settimeout(REACH_S)
                one.connect(at)
            return Check(_NAME, "ok", f"{where} answers")
        except ConnectionRefusedError:
            return Check(_NAME, "ok", f"the way to {where} is there (nobody listens yet)")
        except OSError as error:
            errors.append(error)
    if any(isinstance(error, TimeoutError) for error in errors):
        return Check(
            _NAME,
            "warn",
            f"{where} does not answer within {REACH_S:g} s",
            "node 0 does not listen yet, but a firewall may be in the way: let this port pass",
        )
    return Check(
        _NAME,
        "failed",
        f"{where} cannot be reached from here: {_words(errors[0])}",
        "write an address of node 0 as `rendezvous` that every node reaches",
    )


def _words(error: OSError | None) -> str:
    return error.strerror or str(error) if error is not None else ""
