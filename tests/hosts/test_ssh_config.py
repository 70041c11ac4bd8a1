"""From names to hops: the inventory over ~/.ssh/config over OpenSSH's defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_ops.errors import UsageError
from dflash_ops.hosts.sshconfig import Hop, SshConfig

CONFIG = """\
Include extra/*.conf

Host pve
  HostName 192.0.2.11
  User admin
  Port 2222
  IdentityFile ~/.ssh/id_pve
  UserKnownHostsFile ~/.ssh/pve_hosts

Host inner
  HostName 192.0.2.13
  ProxyJump pve,operator@192.0.2.12:2200

Host behind
  ProxyJump inner

Host command
  HostName 192.0.2.14
  ProxyCommand nc -x proxy %h %p

Host none
  ProxyJump none
  ProxyCommand none

Host circle
  ProxyJump elcric
Host elcric
  ProxyJump circle

Host alias
  HostKeyAlias the-one
  IdentitiesOnly yes
  IdentityAgent none
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshConfig:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    ssh = tmp_path / ".ssh"
    (ssh / "extra").mkdir(parents=True)
    (ssh / "extra/one.conf").write_text("Host included\n  HostName 192.0.2.20\n  User inc\n")
    (ssh / "config").write_text(CONFIG)
    return SshConfig()


def said(hop: Hop) -> str:
    return f"{hop.user}@{hop.address}:{hop.port}"


def test_a_host_of_the_config(config: SshConfig, tmp_path: Path) -> None:
    (hop,) = config.way("pve")
    assert said(hop) == "admin@192.0.2.11:2222"
    assert hop.keys == (tmp_path / ".ssh/id_pve",)
    assert hop.known_hosts == (tmp_path / ".ssh/pve_hosts",)
    assert hop.key_name == "[192.0.2.11]:2222"
    assert hop.agent == "/run/agent"
    assert said(config.way("included")[0]) == "inc@192.0.2.20:22"


def test_the_inventory_comes_first(config: SshConfig, tmp_path: Path) -> None:
    (hop,) = config.way("pve", user="root", port=22022, identity="/keys/one", known_hosts="/keys/hosts")
    assert said(hop) == "root@192.0.2.11:22022"
    assert hop.keys[0] == Path("/keys/one")
    assert hop.identities_only
    assert hop.known_hosts == (Path("/keys/hosts"),)


def test_jumps_over_several_hops_each_by_its_own_config(config: SshConfig) -> None:
    assert [said(h) for h in config.way("inner", user="root")] == [
        "admin@192.0.2.11:2222",
        "operator@192.0.2.12:2200",
        "root@192.0.2.13:22",
    ]
    assert [h.address for h in config.way("behind")] == ["192.0.2.11", "192.0.2.12", "192.0.2.13", "behind"]
    ways = config.way("192.0.2.30", user="root", jump=["root@192.0.2.1:22", "ssh://a@[2001:db8::1]:23"], identity="/k")
    assert [said(h) for h in ways] == ["root@192.0.2.1:22", "a@2001:db8::1:23", "root@192.0.2.30:22"]
    assert all(Path("/k") in h.keys for h in ways), "the inventory's key is tried at each hop"
    assert not ways[0].identities_only, "but a jump host may want another one"


def test_none_and_commands(config: SshConfig) -> None:
    assert config.way("command")[0].proxy_command == "nc -x proxy 192.0.2.14 22"
    (hop,) = config.way("none")
    assert hop.proxy_command is None
    # jumps of the inventory come before the config's command
    assert config.way("command", jump=["192.0.2.1"])[-1].proxy_command is None


def test_names_of_keys_and_agents(config: SshConfig) -> None:
    (hop,) = config.way("alias")
    assert (hop.key_name, hop.identities_only, hop.agent) == ("the-one", True, None)


def test_default_keys_are_tried_where_none_is_named(config: SshConfig, tmp_path: Path) -> None:
    (tmp_path / ".ssh/id_ed25519").write_text("")
    (hop,) = config.way("192.0.2.40")
    assert hop.keys == (tmp_path / ".ssh/id_ed25519",)
    assert hop.given == 0


def test_what_cannot_be_meant(config: SshConfig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lead to themselves"):
        config.way("circle")
    with pytest.raises(UsageError, match="no host to jump over"):
        config.way("192.0.2.1", jump=["a@b@c:x"])
    broken = tmp_path / "broken"
    broken.write_text("what is this line\n\0")
    with pytest.raises(UsageError, match="ssh config") as caught:
        SshConfig(broken)
    assert str(broken) in caught.value.where
    assert SshConfig(tmp_path / "missing").way("192.0.2.1")[0].address == "192.0.2.1"


def test_match_exec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.setenv("DFLASH_SSH_PASSPHRASE", "planted")
    seen = tmp_path / "seen"
    file = tmp_path / "exec"
    file.write_text(
        f'Match exec "env > {seen}; echo noise; test %h = 192.0.2.50"\n  User yes\n'
        'Match host 192.0.2.52 exec "sleep 60"\n  User never\nHost *\n  User no\n'
    )
    assert SshConfig(file).way("192.0.2.50")[0].user == "yes"
    assert SshConfig(file).way("192.0.2.51")[0].user == "no"
    assert "planted" not in seen.read_text()
    monkeypatch.setattr("dflash_ops.hosts.sshconfig.EXEC_S", 0.3)
    with pytest.raises(UsageError, match=r"no end of `Match exec sleep 60` in 0\.3 s"):
        SshConfig(file).way("192.0.2.52")
