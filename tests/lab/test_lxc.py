"""`LxcHost` through ssh and pct into a real unprivileged container: words, bytes, ends, and pct's own errors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dflash_ops
from dflash_ops.client import JobClient
from dflash_ops.contracts import State
from dflash_ops.errors import (
    CommandFailed,
    ConnectionLost,
    ContainerMissing,
    ContainerStopped,
    DeadlineExceeded,
    NotProxmox,
    NotRoot,
)
from dflash_ops.hosts.keys import Keyring
from dflash_ops.hosts.lxc import LxcHost
from dflash_ops.hosts.ssh import SshHost
from dflash_ops.inventory import load
from lab import Lab

BULK = bytes(range(256)) * 195_313

NASTY = [
    "",
    "ä ö 漢字 🦆",
    "two\nlines\n",
    'it\'s "quoted" `x` $(touch /pwned) ${HOME} $1 \\n \\0101 \\',
    "%s%d%b",
    "--",
    "*?[a-z]~ !e;&|<>",
    "tab\tcr\rbell\x07esc\x1b[31m",
    "x" * 3000,
    os.fsdecode(b"not \xff\xfe utf-8"),
]
WORDS = st.one_of(
    st.sampled_from(NASTY), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
)


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def running(lab: Lab, word: bytes) -> bool:
    return any(word in line.split(b"\0") for line in lab.faults.processes("pve1").values())


# -- words and bytes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=4), value=WORDS, stdin=st.binary(max_size=30))
def test_every_word_arrives_as_it_is(lab: Lab, ct: LxcHost, words: list[str], value: str, stdin: bytes) -> None:
    """With perl's noise on standard error, and pct as it is: lossy for what is not one line of ASCII."""
    with lab.faults.locale_noise("pve1", always=True):
        argv = ["sh", "-c", 'printf "%s\\0" "$V" "$PWD" "$@"; cat; echo own >&2', "sh", *words]
        done = ct.run(argv, deadline=20, env={"V": value}, cwd="/usr", stdin=stdin)
    assert done.stdout == b"".join(os.fsencode(w) + b"\0" for w in (value, "/usr", *words)) + stdin
    assert (done.rc, done.stderr) == (0, b"own\n"), "the noise is not the command's"


def test_folders_and_files_with_awkward_names(ct: LxcHost) -> None:
    for name in NASTY[1:-2]:
        folder = "/srv/" + name.replace("/", "_")
        assert ct.run(["mkdir", "-p", "--", folder], deadline=20).rc == 0
        done = ct.run(["sh", "-c", "pwd; echo content > file"], deadline=20, cwd=folder)
        assert done.stdout == os.fsencode(folder) + b"\n"
        assert ct.fetch(folder + "/file", deadline=20, limit=100) == b"content\n"
    assert ct.run(["ls", "/pwned"], deadline=20).rc == 2
    assert ct.run(["true"], deadline=20, cwd="/no/such").rc == 126


def test_fifty_megabytes_both_ways(ct: LxcHost) -> None:
    pieces = (BULK[i : i + 262_144] for i in range(0, len(BULK), 262_144))
    script = "cat > /dev/shm/bulk; cat /dev/shm/bulk; cat /dev/shm/bulk >&2; rm /dev/shm/bulk"
    done = ct.run(["sh", "-c", script], deadline=90, stdin=pieces)
    want = hashlib.sha256(BULK).digest()
    assert hashlib.sha256(done.stdout).digest() == want
    assert hashlib.sha256(done.stderr).digest() == want, "binary noise on standard error hides no mark"


def test_a_clean_environment_and_folder(lab: Lab, ct: LxcHost) -> None:
    said = dict(line.split("=", 1) for line in ct.run(["env"], deadline=20, env={"MINE": "1"}).text.splitlines())
    assert said["PATH"].startswith("/usr/local/sbin:/usr/local/bin:")
    assert (said["HOME"], said["LC_ALL"], said["MINE"]) == ("/root", "C.UTF-8", "1")
    assert not [name for name in said if name.startswith("SSH_")], "nothing of the Proxmox host's session"
    assert ct.run(["pwd"], deadline=20).text == "/\n"
    assert ct.run(["cat", "/proc/self/uid_map"], deadline=20).text.split() == ["0", "100000", "65536"]


@pytest.mark.parametrize(("script", "rc"), [("exit 0", 0), ("exit 1", 1), ("exit 255", 255), ("kill -9 $$", 137)])
def test_the_exit_code_is_the_commands_own(ct: LxcHost, script: str, rc: int) -> None:
    """1, 2, 4 and 255 are pct's own failures as well."""
    assert ct.run(["sh", "-c", script], deadline=20).rc == rc


def test_a_fake_mark_in_the_output_is_output(ct: LxcHost) -> None:
    done = ct.run(["sh", "-c", "echo dflash-0123456789abcdef end 0 >&2; exit 9"], deadline=20)
    assert (done.rc, done.stderr) == (9, b"dflash-0123456789abcdef end 0\n")


def test_streams(ct: LxcHost) -> None:
    assert list(ct.stream(["sh", "-c", 'printf "a\\nb\\n\\nlast"'], idle=20)) == [b"a", b"b", b"", b"last"]
    assert list(ct.stream(["cat"], idle=20, stdin=b"in\n")) == [b"in"]
    assert list(ct.stream(["printf", "%s\n", "ä", "x\ny"], idle=20)) == ["ä".encode(), b"x", b"y"]
    with pytest.raises(CommandFailed) as caught:
        list(ct.stream(["sh", "-c", "echo a; echo why >&2; exit 255"], idle=20))
    assert (caught.value.rc, caught.value.stderr) == (255, "why")
    with pytest.raises(CommandFailed) as caught:
        list(ct.stream(["sh", "-c", "seq 20000 >&2; exit 4"], idle=20))
    assert caught.value.rc == 4
    assert caught.value.stderr.endswith("20000")


# -- ends


@pytest.mark.parametrize("way", ["ssh", "lxc"])
def test_a_command_that_is_spoken_with(lab: Lab, pve1: SshHost, ct: LxcHost, way: str) -> None:
    host = pve1 if way == "ssh" else ct
    script = 'while read -r x; do echo "got $x"; [ "$x" != die ] || kill -9 $$; done; echo "$1"; exit 3'
    calls = len(lab.calls())
    with host.converse(["sh", "-c", script, "sh", "ü \n'"], deadline=30) as talk:
        assert talk.ask([b"one\n"], deadline=10) == b"got one"
        assert talk.ask([b"x" * 500_000, b"\n"], deadline=10) == b"got " + b"x" * 500_000
        done = talk.end()
    assert (done.rc, done.text) == (3, "ü \n'\n")
    assert len(lab.calls()) - calls == (way == "lxc")
    with host.converse(["sh", "-c", script], deadline=30) as talk:
        assert talk.ask([b"die\n"], deadline=10) == b"got die"
        assert talk.ask([b"more\n"], deadline=10) == b""
        assert talk.end().rc == 137
    with (
        pytest.raises(DeadlineExceeded, match=r"within 0\.5 s from: cat") as late,
        host.converse(["cat"], deadline=30) as talk,
    ):
        talk.ask([], deadline=0.5)
    assert host.name in late.value.where


def test_a_container_that_stops_while_it_is_spoken_with(lab: Lab, ct: LxcHost) -> None:
    with pytest.raises(ContainerStopped), ct.converse(["cat"], deadline=30) as talk:
        assert talk.ask([b"hello\n"], deadline=10) == b"hello"
        lab.faults.stop_container(200)
        assert talk.ask([b"again\n"], deadline=10) == b""
        talk.end()
    lab.faults.start_container(200)


def test_the_deadline_ends_the_command_in_the_container(lab: Lab, ct: LxcHost) -> None:
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s from: sleep 4811") as caught:
        ct.run(["sleep", "4811"], deadline=0.5)
    assert "ct200" in caught.value.where
    with pytest.raises(DeadlineExceeded):
        ct.run(["sh", "-c", "trap '' TERM; sleep 4812; sleep 4812; sleep 4812"], deadline=0.5)
    with pytest.raises(DeadlineExceeded):
        list(ct.stream(["sleep", "4813"], idle=0.5))
    assert eventually(lambda: not any(running(lab, word) for word in (b"4811", b"4812", b"4813")))


def test_a_lost_connection_ends_the_command_in_the_container(lab: Lab, ct: LxcHost) -> None:
    for call in (
        lambda: ct.run(["sleep", "4814"], deadline=600),
        lambda: list(ct.stream(["sleep", "4814"], idle=600)),
    ):
        timer = threading.Timer(0.7, lambda: lab.faults.cut_connections("pve1"))
        timer.start()
        with pytest.raises(ConnectionLost) as caught:
            call()
        timer.join()
        assert "ct200" in caught.value.where
        assert eventually(lambda: not running(lab, b"4814"))


# -- pct's own errors


def test_missing_stopped_and_back(lab: Lab, pve1: SshHost, ct: LxcHost) -> None:
    gone = LxcHost("ct999", pve1, 999)
    for call in (lambda: gone.run(["true"], deadline=20), lambda: list(gone.stream(["true"], idle=20))):
        with pytest.raises(ContainerMissing, match="no container 999"):
            call()
    lab.faults.stop_container(200)
    for call in (lambda: ct.run(["true"], deadline=20), lambda: list(ct.stream(["true"], idle=20))):
        with pytest.raises(ContainerStopped, match="does not run") as caught:
            call()
        assert "pct start 200" in caught.value.next
    lab.faults.start_container(200)
    assert ct.run(["true"], deadline=20).rc == 0


@pytest.mark.parametrize("way", ["run", "stream"])
def test_a_container_that_is_stopped_under_a_command_gives_no_exit_code(lab: Lab, ct: LxcHost, way: str) -> None:
    timer = threading.Timer(0.7, lambda: lab.faults.stop_container(200))
    timer.start()
    with pytest.raises(ContainerStopped, match="stopped while the command ran"):
        if way == "run":
            ct.run(["sleep", "600"], deadline=600)
        else:
            list(ct.stream(["sleep", "600"], idle=600))
    timer.join()


def test_a_command_killed_with_its_wrapper_is_no_result(lab: Lab, ct: LxcHost) -> None:
    """As by the OOM killer: the container lives, the exec is gone."""
    with pytest.raises(ConnectionLost, match="before the command did"):
        ct.run(["sh", "-c", "kill -9 $PPID"], deadline=20)
    assert ct.run(["true"], deadline=20).rc == 0


def test_locked_race_and_no_proxmox(lab: Lab, pve1: SshHost, ct: LxcHost) -> None:
    with lab.faults.locked(200):
        assert ct.run(["true"], deadline=20).rc == 0, "exec goes on under a lock"
    with lab.faults.race("pve1"), pytest.raises(ContainerStopped, match="shutting down"):
        ct.run(["true"], deadline=20)
    inner = SshHost("inner", "192.0.2.13", user="root", jump=["192.0.2.11", "192.0.2.12"], keyring=Keyring())
    with pytest.raises(NotProxmox):
        LxcHost("x", inner, 200).run(["true"], deadline=30)
    inner.close()
    with lab.faults.no_pct("pve1"), pytest.raises(NotProxmox):
        ct.run(["true"], deadline=20)


def test_users_that_are_not_root(lab: Lab) -> None:
    for user, sudo, fine in (("ops", True, True), ("ops", False, False), ("plain", True, False)):
        pve = SshHost("pve1", "192.0.2.11", user=user, sudo=sudo, keyring=Keyring())
        one = LxcHost("ct200", pve, 200)
        if fine:
            done = one.run(["sh", "-c", 'printf "%s" "$A"; id -u'], deadline=20, env={"A": "ä\n"})
            assert done.text == "ä\n0\n"
            assert list(one.stream(["id", "-u"], idle=20)) == [b"0"]
        else:
            for call in (lambda: one.run(["true"], deadline=20), lambda: list(one.stream(["true"], idle=20))):  # noqa: B023
                with pytest.raises(NotRoot):
                    call()
        pve.close()


def test_disk_full_and_read_only_are_the_commands_to_say(lab: Lab, ct: LxcHost) -> None:
    with lab.faults.disk_full(200):
        done = ct.run(["sh", "-c", "cat > /srv/small/file"], deadline=20, stdin=b"x" * 100_000)
    assert done.rc != 0
    assert "No space left" in done.error_text
    with lab.faults.read_only_root(200):
        done = ct.run(["touch", "/root/file"], deadline=20, cwd="/root", env={"A": "ä"})
    assert (done.rc, "Read-only" in done.error_text) == (1, True)
    assert ct.run(["touch", "/root/file"], deadline=20).rc == 0


# -- cost


def test_one_call_is_one_exec_also_when_pct_is_slow(lab: Lab, ct: LxcHost) -> None:
    before = len(lab.calls())
    with lab.faults.pct_delay("pve1", 0.3):
        assert ct.run(["printf", "%s", "ä"], deadline=20, env={"A": "b"}, cwd="/srv").text == "ä"
        assert list(ct.stream(["seq", "2"], idle=20)) == [b"1", b"2"]
    calls = lab.calls()[before:]
    assert [c[:3] for c in calls] == [["exec", "200", "--"]] * 2
    assert all(w.isascii() and w.isprintable() for c in calls for w in c)


def test_no_value_of_a_variable_is_seen_on_the_way(lab: Lab, ct: LxcHost) -> None:
    token = "planted-token-" + os.urandom(6).hex()
    seen: list[bytes] = []
    thread = threading.Thread(target=lambda: ct.run(["sleep", "1.5"], deadline=20, env={"TOKEN": token}))
    thread.start()
    assert eventually(lambda: running(lab, b"1.5"))
    seen += lab.faults.processes("pve1").values()
    thread.join()
    assert seen
    assert token.encode() not in b"".join(seen)
    assert token not in json.dumps(lab.calls())


# -- the commands of dflash-ops


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dflash_ops.cli.main", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def test_doctor_and_status_through_ssh_and_pct(lab: Lab) -> None:
    done = cli("doctor", "demo")
    assert "host ct200" in done.stdout
    assert "tmux 3" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    done = cli("status", "demo", "--json")
    (job,) = json.loads(done.stdout)["jobs"]
    assert (done.returncode, job["deployed"]) == (0, False)
    lab.faults.stop_container(200)
    done = cli("status", "demo", "--json")
    (job,) = json.loads(done.stdout)["jobs"]
    assert (done.returncode, job["state"]) == (5, "unreachable")
    assert "does not run" in job["detail"]


def test_doctor_takes_a_new_host_key_on_request(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    known = lab.operator_home.known_hosts
    aside = tmp_path_factory.mktemp("known") / "known_hosts"
    shutil.move(known, aside)
    try:
        done = cli("doctor", "demo")
        assert done.returncode == 3
        assert "SHA256:" in done.stdout
        assert "--accept-new" in done.stdout
        done = cli("doctor", "demo", "--accept-new")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        shutil.move(aside, known)


def test_a_status_is_one_exec(lab: Lab, ct: LxcHost) -> None:
    job = load(lab.inventory).job("demo")
    client = JobClient(ct, job)
    before = len(lab.calls())
    assert client.snapshot().snapshot.state is State.UNKNOWN
    assert len(lab.calls()) - before == 1
    lab.faults.stop_container(200)
    seen = client.snapshot().snapshot
    assert seen.state is State.UNREACHABLE


ON_THE_PROXMOX_HOST = """
from dflash_ops.errors import ContainerMissing
from dflash_ops.hosts.local import LocalHost
from dflash_ops.hosts.lxc import LxcHost
ct = LxcHost("ct200", LocalHost("here"), 200)
words = ["sh", "-c", 'printf "%s|" "$A" "$1"; cat; exit 3', "sh", "x\\ny"]
done = ct.run(words, deadline=20, stdin=b"in", env={"A": "ä"})
assert (done.rc, done.text) == (3, "ä|x\\ny|in"), done
assert ct.run(["true"], deadline=600).rc == 0
assert list(ct.stream(["seq", "2"], idle=20)) == [b"1", b"2"]
try:
    LxcHost("ct999", LocalHost("here"), 999).run(["true"], deadline=20)
except ContainerMissing:
    print("fine")
"""


def test_on_the_proxmox_host_itself_without_ssh(lab: Lab) -> None:
    here = f"import sys; sys.path.insert(0, {str(Path(dflash_ops.__file__).parent.parent)!r})"
    said = lab.machines["pve1"].run([sys.executable, "-c", here + ON_THE_PROXMOX_HOST], seconds=60)
    assert said == "fine\n"
