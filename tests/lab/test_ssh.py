"""`SshHost` against a real sshd: commands, keys, host keys, hops and sessions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_ops.errors import (
    AuthenticationFailed,
    CommandFailed,
    ConnectionLost,
    DeadlineExceeded,
    HostKeyChanged,
    HostKeyUnknown,
    HostUnreachable,
    NotRoot,
)
from dflash_ops.hosts.base import PASSPHRASE as VARIABLE
from dflash_ops.hosts.keys import Keyring
from dflash_ops.hosts.ssh import SshHost
from lab import Lab
from lab.operator import PASSPHRASE

#: 50 MB with every byte in it.
BULK = bytes(range(256)) * 195_313


def host(address: str = "192.0.2.11", name: str = "h", **more: object) -> SshHost:
    more.setdefault("user", "root")
    return SshHost(name, address, keyring=Keyring(), **more)  # type: ignore[arg-type]


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def running(lab: Lab, word: bytes, machine: str = "pve1") -> bool:
    return any(word in line.split(b"\0") for line in lab.faults.processes(machine).values())


# -- commands


def test_streams_codes_environment_and_folder(pve1: SshHost) -> None:
    done = pve1.run(["sh", "-c", "cat; echo err >&2; exit 3"], deadline=10, stdin=b"in\xff")
    assert (done.rc, done.stdout, done.stderr) == (3, b"in\xff", b"err\n")
    assert pve1.run(["sh", "-c", "kill -9 $$"], deadline=10).rc == 137
    assert pve1.run(["no-such-program"], deadline=10).rc == 127
    done = pve1.run(["sh", "-c", 'printf "%s|%s" "$A" "$PWD"'], deadline=10, env={"A": "ä\n'x $(y)"}, cwd="/srv")
    assert done.text == "ä\n'x $(y)|/srv"
    assert pve1.run(["true"], deadline=10, cwd="/no/such").rc == 126
    assert list(pve1.stream(["seq", "3"], idle=10)) == [b"1", b"2", b"3"]
    with pytest.raises(CommandFailed) as caught:
        list(pve1.stream(["sh", "-c", "echo a; echo why >&2; exit 9"], idle=10))
    assert (caught.value.rc, caught.value.stderr) == (9, "why")
    assert pve1.fetch("/etc/hostname", deadline=10, limit=3) == b"e1\n"
    with pytest.raises(CommandFailed, match="/none cannot be read"):
        pve1.fetch("/none", deadline=10, limit=3)


def test_fifty_megabytes_both_ways_at_once(pve1: SshHost) -> None:
    pieces = (BULK[i : i + 300_000] for i in range(0, len(BULK), 300_000))
    done = pve1.run(["tee", "/dev/stderr"], deadline=60, stdin=pieces)
    want = hashlib.sha256(BULK).digest()
    assert hashlib.sha256(done.stdout).digest() == want
    assert hashlib.sha256(done.stderr).digest() == want


def test_a_command_that_does_not_read_its_input_ends_all_the_same(pve1: SshHost) -> None:
    done = pve1.run(["sh", "-c", "exec <&-; exit 5"], deadline=20, stdin=BULK[:8_000_000])
    assert done.rc == 5


def test_an_end_without_an_exit_code_is_no_result(pve1: SshHost) -> None:
    """What sshd says of a command that a signal ended, where no wrapper of ours turns that into 128+N."""
    with pytest.raises(ConnectionLost, match="without an exit code"):
        pve1.run_bare(["sh", "-c", "kill -9 $PPID"], deadline=10)
    assert pve1.run(["true"], deadline=10).rc == 0


def test_an_interrupt_gives_everything_back(lab: Lab, pve1: SshHost) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"one"
        raise KeyboardInterrupt

    for _ in range(12):  # more than there are sessions on a connection
        with pytest.raises(KeyboardInterrupt):
            pve1.run(["sh", "-c", "cat; sleep 4715"], deadline=600, stdin=pieces())
    assert pve1.run(["true"], deadline=10).rc == 0
    stream = pve1.stream(["sh", "-c", "echo up; sleep 4716"], idle=20)
    assert next(stream) == b"up"
    stream.close()  # type: ignore[attr-defined]
    assert eventually(lambda: not running(lab, b"4716"))


def test_a_daemon_left_behind_is_not_waited_for(pve1: SshHost) -> None:
    began = time.monotonic()
    assert pve1.run(["sh", "-c", "setsid sleep 20 & echo started"], deadline=60).text == "started\n"
    assert time.monotonic() - began < 10


def test_the_deadline_ends_the_command_there(lab: Lab, pve1: SshHost) -> None:
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s from: sleep 4711"):
        pve1.run(["sleep", "4711"], deadline=0.5)
    with pytest.raises(DeadlineExceeded):
        list(pve1.stream(["sleep", "4712"], idle=0.5))
    assert eventually(lambda: not running(lab, b"4711") and not running(lab, b"4712"))
    assert pve1.run(["true"], deadline=10).rc == 0, "the connection is as good as before"


def test_one_connection_for_all_calls_and_threads(lab: Lab, pve1: SshHost) -> None:
    before = lab.machines["pve1"].log.count("Accepted publickey")
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda n: pve1.run(["sh", "-c", f"exit {n}"], deadline=20).rc, range(30)))
    assert codes == list(range(30))
    assert lab.machines["pve1"].log.count("Accepted publickey") - before == 1


def test_few_sessions_on_a_connection_are_shared_out(lab: Lab) -> None:
    with lab.faults.max_sessions("pve1", 1):
        one = host()
        before = lab.machines["pve1"].log.count("Accepted publickey")
        with ThreadPoolExecutor(8) as pool:
            codes = list(pool.map(lambda _: one.run(["sleep", "0.2"], deadline=30).rc, range(8)))
        assert codes == [0] * 8
        assert lab.machines["pve1"].log.count("Accepted publickey") - before == 3, "and no more connections than three"
        # all connections taken: a wait with an end, and no error of the others
        holders = [
            threading.Thread(target=one.run, args=(["sleep", "2.5"],), kwargs={"deadline": 20}) for _ in range(3)
        ]
        for thread in holders:
            thread.start()
        time.sleep(1)
        with pytest.raises(DeadlineExceeded):
            one.run(["true"], deadline=0.5)
        for thread in holders:
            thread.join()
        one.close()
    with lab.faults.max_sessions("pve1", 0), pytest.raises(HostUnreachable, match="no session"):
        host().run(["true"], deadline=10)


# -- keys


def test_a_key_under_a_passphrase_is_opened_once(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locked = str(lab.operator_home.ssh / "id_locked")
    with pytest.raises(AuthenticationFailed, match="passphrase") as caught:
        host(identity=locked).run(["true"], deadline=20)
    assert "ssh-add" in caught.value.next
    monkeypatch.setenv(VARIABLE, "wrong-" + PASSPHRASE)
    with pytest.raises(AuthenticationFailed, match="does not open") as caught:
        host(identity=locked).run(["true"], deadline=20)
    assert PASSPHRASE not in str(caught.value)
    monkeypatch.delenv(VARIABLE)
    asked = tmp_path / "asked"
    program = tmp_path / "askpass"
    program.write_text(f"#!/bin/sh\necho x >> {asked}\necho {PASSPHRASE}\n")
    program.chmod(0o700)
    monkeypatch.setenv("SSH_ASKPASS", str(program))
    ring = Keyring()
    for _ in range(2):
        one = SshHost("h", "192.0.2.11", user="root", identity=locked, keyring=ring)
        assert one.run(["true"], deadline=20).rc == 0
        one.close()
    assert asked.read_text() == "x\n", "asked once"


@pytest.fixture
def agent(lab: Lab, tmp_path: Path) -> Iterator[str]:
    """Socket of an ssh-agent that holds id_locked, opened."""
    sock = str(tmp_path / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL)
    assert eventually(lambda: Path(sock).exists())
    program = tmp_path / "give"
    program.write_text(f"#!/bin/sh\necho {PASSPHRASE}\n")
    program.chmod(0o700)
    env = {**os.environ, "SSH_AUTH_SOCK": sock, "SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force"}
    argv = ["ssh-add", str(lab.operator_home.ssh / "id_locked")]
    subprocess.run(argv, env=env, check=True, capture_output=True, timeout=20)
    yield sock
    process.terminate()
    process.wait(10)


def test_the_agents_key_needs_no_passphrase(lab: Lab, agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    only = lab.operator_home.folder / "only-agent"
    only.write_text(f"Host *\n  UserKnownHostsFile {lab.operator_home.known_hosts}\n")
    (lab.operator_home.ssh / "id_ed25519").rename(lab.operator_home.ssh / "aside")
    try:
        assert host(config=only).run(["true"], deadline=20).rc == 0
        named = host(identity=str(lab.operator_home.ssh / "id_locked"))
        assert named.run(["true"], deadline=20).rc == 0, "named, and the agent has it"
    finally:
        (lab.operator_home.ssh / "aside").rename(lab.operator_home.ssh / "id_ed25519")


def test_a_certificate_beside_the_key_is_used(lab: Lab, tmp_path: Path) -> None:
    def keygen(*words: str) -> None:
        subprocess.run(["ssh-keygen", "-q", *words], check=True, capture_output=True, timeout=20)

    keygen("-t", "ed25519", "-N", "", "-f", str(tmp_path / "ca"))
    keygen("-t", "ed25519", "-N", "", "-f", str(tmp_path / "id"))
    with pytest.raises(AuthenticationFailed, match=r"keys tried: .*id"):
        host(identity=str(tmp_path / "id"), config=_config(lab, tmp_path)).run(["true"], deadline=20)
    keygen("-s", str(tmp_path / "ca"), "-I", "operator", "-n", "root", str(tmp_path / "id.pub"))
    authorized = lab.machines["pve1"].folder / "authorized_keys"
    before = authorized.read_text()
    authorized.write_text(before + "cert-authority " + (tmp_path / "ca.pub").read_text())
    try:
        assert host(identity=str(tmp_path / "id"), config=_config(lab, tmp_path)).run(["true"], deadline=20).rc == 0
    finally:
        authorized.write_text(before)


def _config(lab: Lab, folder: Path) -> Path:
    """An ssh config with the lab's known_hosts and no key."""
    path = folder / "config"
    path.write_text(f"Host *\n  UserKnownHostsFile {lab.operator_home.known_hosts}\n")
    return path


def test_sudo(lab: Lab) -> None:
    one = host(user="ops", sudo=True)
    assert one.run(["id", "-u"], deadline=20).text == "0\n"
    assert one.run(["sh", "-c", 'printf "%s" "$A"; exit 1'], deadline=20, env={"A": "ä"}).text == "ä"
    assert list(one.stream(["id", "-u"], idle=10)) == [b"0"]
    other = host(user="plain", sudo=True)
    for call in (lambda: other.run(["id"], deadline=20), lambda: list(other.stream(["id"], idle=10))):
        with pytest.raises(NotRoot, match="sudo refuses: sudo: a password is required"):
            call()
    one.close()
    other.close()


# -- host keys


def test_an_unknown_host_is_shown_and_taken_on_request_only(lab: Lab, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    with pytest.raises(HostKeyUnknown) as caught:
        host(known_hosts=str(known)).run(["true"], deadline=20)
    said = subprocess.run(
        ["ssh-keygen", "-lf", str(lab.machines["pve1"].host_key)], capture_output=True, text=True, check=True
    )
    assert said.stdout.split()[1] in caught.value.what
    assert "--accept-new" in caught.value.next
    assert not known.exists()
    assert host(known_hosts=str(known), accept_new=True).run(["true"], deadline=20).rc == 0
    assert host(known_hosts=str(known)).run(["true"], deadline=20).rc == 0
    assert len(known.read_text().splitlines()) == 1


def test_a_changed_host_key_is_never_taken(lab: Lab) -> None:
    with lab.faults.changed_host_key("pve1"):
        for accept_new in (False, True):
            with pytest.raises(HostKeyChanged) as caught:
                host(accept_new=accept_new).run(["true"], deadline=20)
            assert caught.value.what.count("SHA256:") == 2
            assert f"{lab.operator_home.known_hosts}:1" in caught.value.where
    assert host().run(["true"], deadline=20).rc == 0


def test_a_host_known_by_another_kind_of_key_is_known(lab: Lab, tmp_path: Path) -> None:
    kind, blob, *_ = (lab.machines["pve1"].folder / "keys/ssh_host_ecdsa_key.pub").read_text().split()
    (tmp_path / "known_hosts").write_text(f"192.0.2.11 {kind} {blob}\n")
    assert host(known_hosts=str(tmp_path / "known_hosts")).run(["true"], deadline=20).rc == 0


# -- hops


def test_jumps_over_two_hops_of_the_inventory_and_of_the_config(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(HostUnreachable):
        host("192.0.2.13").run(["true"], deadline=5)
    one = host("192.0.2.13", jump=["root@192.0.2.11", "root@192.0.2.12"])
    assert one.run(["hostname"], deadline=30).text == "inner\n"
    assert one.run(["cat"], deadline=30, stdin=BULK[:3_000_000]).stdout == BULK[:3_000_000]
    one.close()
    config = tmp_path / "config"
    config.write_text(
        f"Host *\n  UserKnownHostsFile {lab.operator_home.known_hosts}\n"
        f"  IdentityFile {lab.operator_home.ssh / 'id_ed25519'}\n  User root\n"
        "Host first\n  HostName 192.0.2.11\nHost second\n  HostName 192.0.2.12\n"
        "Host target\n  HostName 192.0.2.13\n  ProxyJump first,second\n"
        f"Host command\n  HostName 192.0.2.13\n  ProxyCommand ssh -F {config} -W %h:%p second\n"
    )
    for name in ("target", "command"):
        one = host(name, config=config, user=None)
        assert one.run(["hostname"], deadline=30).text == "inner\n"
        one.close()


def test_a_hop_that_fails_is_named(lab: Lab) -> None:
    with pytest.raises(HostUnreachable, match=r"jump host cannot reach 192\.0\.2\.13"):
        host("192.0.2.13", jump=["root@192.0.2.11"]).run(["true"], deadline=20)
    with pytest.raises(HostUnreachable, match="refused") as caught:
        host(port=2222).run(["true"], deadline=20)
    assert "is sshd running" in caught.value.next
    with pytest.raises(HostUnreachable, match="cannot be resolved"):
        host("no-such-name.invalid").run(["true"], deadline=20)
