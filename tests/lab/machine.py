"""One machine of the lab: a network namespace with its own users, root home, host keys and a real sshd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab import net
from lab.needs import SBIN
from lab.owner import start_ticks
from lab.shell import sh

#: An account that is not root; it may use sudo without a password.
USER, UID = "ops", 6001
#: One that may not.
PLAIN, PLAIN_UID = "plain", 6002

SSHD = """\
ListenAddress {address}
HostKey {folder}/keys/ssh_host_ed25519_key
HostKey {folder}/keys/ssh_host_ecdsa_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UseDNS no
PrintMotd no
AcceptEnv LANG LC_*
SetEnv PATH={path}
MaxStartups 100
MaxSessions {sessions}
LogLevel VERBOSE
Subsystem sftp internal-sftp
"""


@dataclass
class Machine:
    """`folder` holds all of it; `proxmox` machines have `pct` in their PATH."""

    name: str
    namespace: str
    folder: Path
    proxmox: bool = False
    max_sessions: int = 10
    _sshd: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return net.address(self.name)

    @property
    def host_key(self) -> Path:
        return self.folder / "keys" / "ssh_host_ed25519_key"

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text("utf-8", "replace")

    # -- making

    def make(self, authorized: str, keys: Path) -> None:
        """Files of the machine; `keys` holds a pair of host keys made for it."""
        for name in ("etc", "keys", "sbin", "run/sshd", "run/lxc", "root", "home", "sudoers.d", "tmp", "usr"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for file in keys.glob("ssh_host_*"):
            shutil.copy(file, self.folder / "keys" / file.name)
        (self.folder / "authorized_keys").write_text(authorized)
        self._users()
        (self.folder / "etc/hostname").write_text(self.name + "\n")
        (self.folder / "etc/hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        rules = f"Defaults secure_path={SBIN}\n{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n"
        self._private("etc/sudoers", rules, 0o440)
        if self.proxmox:
            target = self.folder / "sbin" / "pct"
            shutil.copy(Path(__file__).with_name("pct.py"), target)
            target.chmod(0o755)
            (self.folder / "sbin/machine").symlink_to(self.folder)
            (self.folder / "pve").mkdir(exist_ok=True)
            (self.folder / "knobs").mkdir(exist_ok=True)

    def _users(self) -> None:
        """The machine's own users, with root's home (and two more accounts) in the lab's folder."""
        lines = Path("/etc/passwd").read_text().splitlines()
        root = f"root:x:0:0:root:{self.folder}/root:/bin/bash"
        own = [f"{n}:x:{u}:{u}:{n}:{self.folder}/home/{n}:/bin/sh" for n, u in ((USER, UID), (PLAIN, PLAIN_UID))]
        rest = [line for line in lines if not line.startswith(("root:", USER + ":", PLAIN + ":"))]
        (self.folder / "etc/passwd").write_text("\n".join([root, *rest, *own]) + "\n")
        groups = [g for g in Path("/etc/group").read_text().splitlines() if not g.startswith((USER + ":", PLAIN + ":"))]
        (self.folder / "etc/group").write_text(
            "\n".join([*groups, f"{USER}:x:{UID}:", f"{PLAIN}:x:{PLAIN_UID}:"]) + "\n"
        )
        names = [line.split(":", 1)[0] for line in (root, *rest, *own)]
        # "*" and not "!": sshd refuses an account that is locked, even with a key
        self._private("etc/shadow", "".join(f"{n}:*:19000:0:99999:7:::\n" for n in names), 0o640)
        for name, uid in ((USER, UID), (PLAIN, PLAIN_UID)):
            home = self.folder / "home" / name
            home.mkdir(exist_ok=True)
            os.chown(home, uid, uid)

    def _private(self, name: str, text: str, mode: int) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(mode)

    # -- running

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """`argv` as it must be started to run on this machine; no process is left between."""
        enter = str(Path(__file__).with_name("enter.sh"))
        spaces = [
            "nsenter",
            f"--net={net.RUN / self.namespace}",
            "unshare",
            "--mount",
            "--uts",
            "--propagation",
            "private",
        ]
        return [*spaces, "sh", enter, str(self.folder), self.name, *argv]

    def run(self, argv: Sequence[str], *, ok: Sequence[int] | None = (0,), seconds: float = 20.0) -> str:
        """A command on this machine as root, not by ssh; its standard output."""
        return sh(self.wrap(argv), ok=ok, seconds=seconds)

    def start_sshd(self) -> None:
        config = self.folder / "sshd_config"
        config.write_text(SSHD.format(address=self.address, folder=self.folder, path=SBIN, sessions=self.max_sessions))
        log = self.folder / "sshd.log"
        with log.open("ab") as out:
            before = out.tell()
            argv = self.wrap(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)])
            env = {"PATH": SBIN, "HOME": str(self.folder / "root")}
            self._sshd = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env, cwd="/"
            )
        until = time.monotonic() + 10
        while b"Server listening" not in log.read_bytes()[before:]:
            if self._sshd.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"sshd of {self.name} does not start: {self.log[-2000:]}")
            time.sleep(0.01)

    def stop_sshd(self) -> None:
        """The listening sshd only; connections that are open go on."""
        if self._sshd is not None:
            self._sshd.terminate()
            self._sshd.wait(10)
            self._sshd = None

    def sshd_pids(self) -> list[int]:
        """The listener and every sshd of an open connection."""
        return [p for p in pids_inside(self.namespace) if _comm(p) == "sshd"]

    def signal_sshd(self, number: signal.Signals, *, listener: bool = True) -> None:
        first = self._sshd.pid if self._sshd is not None else None
        for pid in self.sshd_pids():
            if listener or pid != first:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if number is signal.SIGKILL and listener and self._sshd is not None:
            self._sshd.wait(10)
            self._sshd = None


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def pids_inside(namespace: str) -> list[int]:
    """Processes whose network namespace this is; never this process or one that it descends from."""
    try:
        wanted = net.inode(namespace)
    except FileNotFoundError:
        return []
    return pids_of({wanted})


def pids_of(inodes: set[int]) -> list[int]:
    mine = set()
    pid = os.getpid()
    while pid > 1:
        mine.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            break
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) not in mine:
            with contextlib.suppress(OSError):
                if (path / "ns/net").stat().st_ino in inodes:
                    found.append(int(path.name))
    return found


def end_all(inodes: set[int], seconds: float = 10.0) -> None:
    """KILL to every process in these network namespaces, until there is none (a forking one is met again)."""
    until = time.monotonic() + seconds
    while pids := pids_of(inodes):
        if time.monotonic() > until:
            raise RuntimeError(f"processes of the lab do not end: {pids}")
        for pid in pids:
            # Looked at again right before: the number may be another's by now.
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/ns/net").stat().st_ino in inodes and start_ticks(pid) is not None:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
