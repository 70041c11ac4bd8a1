"""The watch from outside over several jobs: one that is away delays the look at none."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.cli.main import run
from dflash_ops.cli.supervise import Watch
from dflash_ops.contracts import Snapshot, State, dumps
from dflash_ops.errors import HostUnreachable
from dflash_ops.hosts.base import Completed
from dflash_ops.hosts.local import LocalHost


def test_the_others_are_looked_at_while_one_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = threading.Event()

    class Away(LocalHost):
        def run(self, *args: Any, **more: Any) -> Completed:
            assert looked.wait(60), "the other job was not looked at meanwhile"
            raise HostUnreachable("no route", "host away")

    def made(hosts: Any, name: str) -> LocalHost:
        return Away(name) if name == "away" else LocalHost(name)

    def look(watch: Watch) -> list[str]:
        said = original(watch)
        if watch.job.name == "near":
            looked.set()
        return said

    original = Watch.look
    monkeypatch.setattr(Watch, "look", look)
    monkeypatch.setattr("dflash_ops.hosts.factory.Hosts._make", made)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("APPRISE_URLS", raising=False)
    inventory = tmp_path / "inventory.toml"
    inventory.write_text(
        "".join(
            f'[hosts.{n}]\nkind = "ssh"\naddress = "192.0.2.{k}"\n'
            f'[jobs.{n}]\nhost = "{n}"\nroot = "{tmp_path}/{n}"\nsession = "{n}"\ncommand = ["true"]\n'
            for k, n in enumerate(("away", "near"), 6)
        )
    )
    (tmp_path / "near/run").mkdir(parents=True)
    crashed = Snapshot("near", 1.0, State.CRASHED, 1.0, "exit code 1", attempt=3)
    (tmp_path / "near/run/snapshot.json").write_text(dumps(crashed))
    assert run(["supervise", "--all", "--once", "-i", str(inventory)]) == 5
    first, second = capsys.readouterr().out.splitlines()
    assert " near: crashed since " in first
    assert " away: unreachable since " in second
