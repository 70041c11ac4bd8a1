"""The fake host as its users see it, and the way from a name to a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.errors import CommandFailed, HostUnreachable, UsageError
from dflash_ops.hosts.base import Host
from dflash_ops.hosts.factory import Hosts, open_host
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.hosts.local import LocalHost
from dflash_ops.hosts.lxc import LxcHost
from dflash_ops.inventory import load


def test_answers_are_given_and_calls_kept() -> None:
    fake = FakeHost("gpu")
    host: Host = fake  # it is one
    fake.answer("tmux", "-V", stdout="tmux 3.3a\n")
    fake.answer("nvidia-smi", ..., rc=127, stderr="not found")
    fake.answer("cat", lambda word: word.startswith("/srv"), stdout=b"\xff")
    assert host.run(["tmux", "-V"], deadline=5, env={"A": "1"}, cwd="/").text == "tmux 3.3a\n"
    assert host.run(["nvidia-smi", "-q", "-x"], deadline=5).rc == 127
    assert host.run(["cat", "/srv/x"], deadline=5, stdin=iter([b"a", b"b"])).stdout == b"\xff"
    assert [c.argv[0] for c in fake.calls] == ["tmux", "nvidia-smi", "cat"]
    assert (fake.calls[0].env, fake.calls[0].cwd, fake.calls[0].deadline) == ({"A": "1"}, "/", 5)
    assert fake.calls[2].stdin == b"ab"


def test_what_has_no_answer_is_never_invented() -> None:
    fake = FakeHost("gpu").answer("tmux", "-V")
    for argv in (["tmux"], ["tmux", "-V", "x"], ["Tmux", "-V"]):
        with pytest.raises(AssertionError, match="no answer for"):
            fake.run(argv, deadline=5)
    with pytest.raises(CommandFailed):
        fake.fetch("/x", deadline=5, limit=10)


def test_errors_and_answers_that_are_used_up() -> None:
    fake = FakeHost().answer("up", stdout="yes").answer("up", error=HostUnreachable("no route", "host gpu"), times=2)
    for _ in range(2):
        with pytest.raises(HostUnreachable):
            fake.run(["up"], deadline=5)
    assert fake.run(["up"], deadline=5).text == "yes"


def test_streams_and_files() -> None:
    fake = FakeHost().answer("follow", stdout="a\nb", rc=1, stderr="gone")
    lines = fake.stream(["follow"], idle=5)
    assert [next(lines), next(lines)] == [b"a", b"b"]
    with pytest.raises(CommandFailed) as caught:
        next(lines)
    assert (caught.value.rc, caught.value.stderr) == (1, "gone")
    fake.files["/log"] = b"0123456789"
    assert fake.fetch("/log", deadline=5, limit=3) == b"789"


def test_hosts_by_name(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(
        '[hosts.here]\nkind = "local"\n[hosts.p]\nkind = "ssh"\naddress = "192.0.2.6"\n'
        '[hosts.c]\nkind = "lxc"\nvia = "p"\nid = 200\n'
    )
    inventory = load(path)
    host = open_host(inventory, "here")
    assert isinstance(host, LocalHost)
    assert host.name == "here"
    container = open_host(inventory, "c")  # nothing is connected before its first call
    assert isinstance(container, LxcHost)
    assert (container.name, container.container, container.via.name) == ("c", 200, "p")
    with Hosts(inventory) as hosts:
        assert hosts["c"] is hosts["c"]
        assert hosts["c"].via is hosts["p"], "containers of one Proxmox host share its connection"
    with pytest.raises(UsageError, match="no host 'x'"):
        open_host(inventory, "x")
