"""Preflight's look at the place where the nodes of a job meet: real sockets."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from dflash_ops.contracts import JobSpec
from dflash_ops.resident.meeting import rendezvous
from dflash_ops.resident.preflight import Request


def asked(where: str, rank: int, *, pid: int | None = None, nnodes: int = 2) -> Request:
    spec = JobSpec("j", "/r", "s", ("x",), "/c", nnodes=nnodes, node_rank=rank, rendezvous=where)
    return Request(spec=spec, interpreter="python3", pid=pid)


def status(request: Request) -> tuple[str, str, str]:
    (check,) = rendezvous(request)
    return check.status, check.what, check.next


@pytest.fixture
def taken() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server  # type: ignore[misc]


def test_node_0_can_listen_or_says_why_not(taken: socket.socket) -> None:
    where = f"127.0.0.1:{taken.getsockname()[1]}"
    word, what, next = status(asked(where, 0))
    assert word == "failed"
    assert "in use by another process" in what
    assert "ss -ltnp" in next
    assert status(asked(where, 0, pid=1))[0] == "ok"  # by the very attempt that is to be replaced
    taken.close()
    assert status(asked(where, 0))[:2] == ("ok", f"node 0 can listen on {where}")
    word, what, _ = status(asked("192.0.2.1:29400", 0))
    assert word == "warn"
    assert "no address of this machine" in what


def test_another_node_gets_there_or_says_how_far(taken: socket.socket) -> None:
    where = f"127.0.0.1:{taken.getsockname()[1]}"
    assert status(asked(where, 1))[:2] == ("ok", f"{where} answers")
    taken.close()
    word, what, _ = status(asked(where, 1))
    assert word == "ok"
    assert "nobody listens yet" in what
    word, what, next = status(asked("no-such-host.invalid:1", 1))
    assert word == "failed"
    assert "no-such-host.invalid is not known" in what
    assert "/etc/hosts" in next


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """A name with several addresses."""
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, type: [(socket.AF_INET, type, 0, "", (address, port)) for address in addresses],
    )


def test_a_name_of_several_addresses_is_as_good_as_its_best(
    taken: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"node0:{taken.getsockname()[1]}"
    named(monkeypatch, "255.255.255.255", "127.0.0.1")  # nobody can connect to the first
    assert status(asked(where, 1))[:2] == ("ok", f"{where} answers")
    named(monkeypatch, "192.0.2.1", "127.0.0.1")
    assert "in use by another process" in status(asked(where, 0))[1]
    taken.close()
    assert status(asked(where, 0))[:2] == ("ok", f"node 0 can listen on {where}")
    named(monkeypatch, "255.255.255.255", "255.255.255.255")
    word, what, _ = status(asked(where, 1))
    assert (word, "cannot be reached from here" in what) == ("failed", True)


def test_a_port_in_use_at_one_address_counts(taken: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.0.2", "127.0.0.1")  # the first is free, the trainer needs both
    assert status(asked(f"node0:{taken.getsockname()[1]}", 0))[0] == "failed"


def test_a_job_on_one_machine_is_not_asked() -> None:
    assert rendezvous(asked("", 0, nnodes=1)) == []
    assert rendezvous(replace(asked("127.0.0.1:1", 0), spec=asked("x", 0, nnodes=1).spec)) == []
