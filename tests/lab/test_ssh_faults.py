"""`SshHost` when the wire fails, what is seen of secrets on the way, and a real terminal."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import logging
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_ops.errors import (
    ConnectionLost,
    DeadlineExceeded,
    HostUnreachable,
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


def test_a_cut_of_five_seconds_is_survived(lab: Lab, pve1: SshHost) -> None:
    """Both a stream and a transfer go on, with every byte."""

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(BULK), 1 << 20):
            if at == 10 << 20:
                cut.set()
                down.wait(10)
            yield BULK[at : at + (1 << 20)]

    cut, down = threading.Event(), threading.Event()

    def wire() -> None:
        cut.wait(20)
        with lab.faults.link_down("pve1"):
            down.set()
            time.sleep(5)

    lines: list[bytes] = []
    script = "for i in $(seq 80); do echo $i; sleep 0.1; done"
    stream = threading.Thread(target=lambda: lines.extend(pve1.stream(["sh", "-c", script], idle=20)))
    cutter = threading.Thread(target=wire)
    stream.start()
    cutter.start()
    done = pve1.run(["sha256sum"], deadline=60, stdin=pieces())
    assert done.text.split()[0] == hashlib.sha256(BULK).hexdigest()
    stream.join(30)
    cutter.join(30)
    assert lines == [str(i).encode() for i in range(1, 81)]


def test_a_cut_for_ever_and_a_frozen_sshd_are_noticed_in_time(lab: Lab, pve1: SshHost) -> None:
    """One is noticed by the kernel, the other by our own watch; each is an error of its own within 15 s."""
    frozen = host("192.0.2.12", "pve2")
    for one in (pve1, frozen):
        assert one.run(["true"], deadline=20).rc == 0
    errors: dict[str, tuple[float, BaseException]] = {}

    def wait_for(name: str, call: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            call()
        except (ConnectionLost, HostUnreachable) as error:
            errors[name] = (time.monotonic() - began, error)

    def upload() -> Iterator[bytes]:
        while True:
            yield bytes(1 << 20)
            time.sleep(0.05)

    waiting = [
        ("run", lambda: pve1.run(["sleep", "600"], deadline=600)),
        ("stream", lambda: list(pve1.stream(["sleep", "600"], idle=600))),
        ("upload", lambda: pve1.run(["cat"], deadline=600, stdin=upload())),
        ("frozen run", lambda: frozen.run(["sleep", "600"], deadline=600)),
        ("frozen upload", lambda: frozen.run(["cat"], deadline=600, stdin=upload())),
    ]
    threads = [threading.Thread(target=wait_for, args=one) for one in waiting]
    for thread in threads:
        thread.start()
    time.sleep(1)
    with lab.faults.link_down("pve1"), lab.faults.sshd_stopped("pve2"):
        for thread in threads:
            thread.join(25)
        late = {name: seconds for name, (seconds, _) in errors.items() if seconds > 1 + 15}
        assert set(errors) == {name for name, _ in waiting}
        assert not late
        for one, words in ((pve1, "no answer|No route"), (frozen, "no answer")):
            with pytest.raises(HostUnreachable, match=words):
                one.run(["true"], deadline=1)
    assert pve1.run(["true"], deadline=20).rc == 0, "and it connects anew by itself"
    assert frozen.run(["true"], deadline=20).rc == 0
    frozen.close()


def test_a_killed_sshd_and_a_reset_are_a_lost_connection(lab: Lab, pve1: SshHost) -> None:
    def soon(act: Callable[[], object]) -> threading.Thread:
        thread = threading.Timer(0.5, act)
        thread.start()
        return thread

    for deadline in (20, 600):
        timer = soon(lambda: lab.faults.cut_connections("pve1"))
        with pytest.raises(ConnectionLost) as caught:
            pve1.run(["sleep", "4713"], deadline=deadline)
        assert "pve1" in caught.value.where
        timer.join()
    assert eventually(lambda: sum(b"4713" in p for p in lab.faults.processes("pve1").values()) <= 3)
    timer = soon(lambda: lab.faults.cut_connections("pve1"))
    with pytest.raises(ConnectionLost):
        list(pve1.stream(["sleep", "4714"], idle=600))
    timer.join()
    assert eventually(lambda: not running(lab, b"4714")), "nobody listens: it was ended"
    with lab.faults.sshd_killed("pve1"), pytest.raises(HostUnreachable, match="refused"):
        pve1.run(["true"], deadline=10)
    assert pve1.run(["true"], deadline=20).rc == 0
    with lab.faults.reset("pve1"), pytest.raises((ConnectionLost, HostUnreachable)):
        pve1.run(["true"], deadline=10)
    assert pve1.run(["true"], deadline=20).rc == 0


def test_a_slow_wire_is_no_silent_one(lab: Lab, pve1: SshHost) -> None:
    data = BULK[:1_500_000]
    with lab.faults.rate("pve1", "4mbit"):
        assert pve1.run(["wc", "-c"], deadline=60, stdin=data).text.strip() == str(len(data))


# -- secrets


def test_secrets_are_in_no_argument_list_log_or_error(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = "planted-token-" + os.urandom(6).hex()
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(VARIABLE, PASSPHRASE)
    one = host(identity=str(lab.operator_home.ssh / "id_locked"))
    errors: list[str] = []

    def hold() -> None:
        try:
            one.run(["sh", "-c", "sleep 9; exit 0"], deadline=6, env={"TOKEN": token})
        except DeadlineExceeded as error:
            errors.append(str(error) + repr(error))

    thread = threading.Thread(target=hold)
    thread.start()
    assert eventually(lambda: running(lab, b"sleep 9; exit 0"))
    seen = b"".join(lab.faults.processes("pve1").values())
    mine = b"".join(_read(p) for p in Path("/proc").glob("[0-9]*/cmdline"))
    thread.join()
    assert errors
    encoded = base64.b64encode(token.encode()).decode()
    for text in (seen.decode("utf-8", "replace"), mine.decode("utf-8", "replace"), *errors, caplog.text):
        for secret in (token, encoded, PASSPHRASE):
            assert secret not in text
    assert token not in lab.machines["pve1"].log
    one.close()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# -- a terminal

ATTACH = """\
import sys
from dflash_ops.hosts.ssh import SshHost
from dflash_ops.hosts.lxc import LxcHost
host = SshHost("pve1", "192.0.2.11", user="root")
if sys.argv[1] == "lxc":
    host = LxcHost("ct200", host, 200)
script = "stty size; echo ready ä; trap 'stty size' WINCH; trap 'echo int; sleep 0.3; exit 7' INT; "
code = host.terminal(["sh", "-c", script + "while :; do sleep 0.1; done"])
print("code", code)
"""


@pytest.mark.parametrize("kind", ["ssh", "lxc"])
def test_a_terminal_with_its_size_and_keys(lab: Lab, kind: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-c", ATTACH, kind],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        start_new_session=True,
    )
    try:
        said = _until(ours, "ready ä")
        assert "33 99" in said
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 111, 0, 0))
        process.send_signal(28)  # WINCH: no foreground job of this terminal would get it here
        assert "44 111" in _until(ours, "44 111")
        os.write(ours, b"\x03")
        assert "int" in _until(ours, "code 7")
        assert process.wait(10) == 0
        assert termios.tcgetattr(theirs) == before, "the terminal is as it was"
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)
        os.close(theirs)


def _until(fd: int, word: str, seconds: float = 20.0) -> str:
    got = b""
    until = time.monotonic() + seconds
    while word.encode() not in got and time.monotonic() < until:
        if select.select([fd], [], [], 0.2)[0]:
            got += os.read(fd, 4096)
    text = got.decode("utf-8", "replace")
    assert word in text, text
    return text
