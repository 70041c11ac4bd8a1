"""Many hosts behind one sshd (a jump host): connections are made a few at a time, since sshd drops some beyond that."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import HostUnreachable
from dflash_ops.hosts import connect
from dflash_ops.hosts.ssh import SshHost


def test_connections_to_one_sshd_are_made_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most, lock = 0, 0, threading.Lock()
    full = threading.Event()

    def tcp(hop: Any, until: float) -> Any:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            if inside == connect.DOOR:
                full.set()
        assert full.wait(60)
        with lock:
            inside -= 1
        raise HostUnreachable("no answer", hop.place)

    monkeypatch.setattr(connect, "_tcp", tcp)
    empty = tmp_path / "config"
    empty.write_text("")
    hosts = [SshHost(f"h{n}", f"192.0.2.{n}", jump=("192.0.2.200",), config=empty) for n in range(30)]
    refused: list[str] = []

    def ask(host: SshHost) -> None:
        with pytest.raises(HostUnreachable) as error:
            host.run(["true"], deadline=60)
        refused.append(error.value.what)

    threads = [threading.Thread(target=ask, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert refused == ["no answer"] * 30
    assert most == connect.DOOR


def test_who_gets_no_place_in_time_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hop = type("Hop", (), {"address": "192.0.2.201", "port": 22, "place": "192.0.2.201"})()
    monkeypatch.setattr(connect, "DOOR", 1)
    with (
        connect._door(hop, 0.0),
        pytest.raises(HostUnreachable, match="none came through in time"),
        connect._door(hop, 0.0),
    ):
        pass
    with connect._door(hop, 0.0):  # given back
        pass
