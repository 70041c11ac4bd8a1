"""The operator's side of the lab: a home with ssh keys, known_hosts, ssh config and an inventory."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab import net
from lab.machine import Machine
from lab.shell import sh

#: Passphrase of the key id_locked; tests look that it appears nowhere. Another in each process, so that a second lab's
#: ssh-keygen is never taken for a leak of this one's.
PASSPHRASE = f"planted-passphrase-{secrets.token_hex(6)}"

INVENTORY = """\
schema = 1
default_job = "demo"

[hosts.pve1]
kind = "ssh"
address = "192.0.2.11"
user = "root"

[hosts.pve2]
kind = "ssh"
address = "192.0.2.12"
user = "root"

[hosts.inner]
kind = "ssh"
address = "192.0.2.13"
user = "root"
jump = ["root@192.0.2.11", "root@192.0.2.12"]

[hosts.ct200]
kind = "lxc"
via = "pve1"
id = 200

[hosts.ct201]
kind = "lxc"
via = "pve1"
id = 201

[hosts.ct300]
kind = "lxc"
via = "pve2"
id = 300

[jobs.demo]
host = "ct200"
root = "/srv/demo"
session = "dflash-demo"
command = ["python3", "-u", "{release}/train.py"]
source = "trainer"
progress = 'step (?P<step>\\d+)/(?P<total>\\d+) loss (?P<loss>[0-9.]+)'
"""

TRAINER = """\
import signal, sys, time

stop = False


def ask(*_):
    global stop
    stop = True


signal.signal(signal.SIGTERM, ask)
signal.signal(signal.SIGINT, ask)
for step in range(1, 100001):
    print("step %d/100000 loss %.4f" % (step, 5 / (1 + step / 100)), flush=True)
    time.sleep(0.2)
    if stop:
        sys.exit(3)
"""


@dataclass
class Operator:
    folder: Path
    namespace: str

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def ssh(self) -> Path:
        return self.home / ".ssh"

    @property
    def env(self) -> dict[str, str]:
        return {"HOME": str(self.home), "SSH_AUTH_SOCK": "", "DFLASH_INVENTORY": str(self.folder / "inventory.toml")}

    @property
    def authorized(self) -> str:
        return "".join(p.read_text() for p in sorted(self.ssh.glob("id_*.pub")))

    @property
    def known_hosts(self) -> Path:
        return self.ssh / "known_hosts"

    def keys_for(self, machine: str) -> Path:
        return self.folder / "hostkeys" / machine

    def make(self, machines: Iterable[Machine]) -> None:
        self.ssh.mkdir(parents=True, mode=0o700)
        _keygen(self.ssh / "id_ed25519", "operator")
        _keygen(self.ssh / "id_locked", "operator-locked", PASSPHRASE)
        lines = []
        for machine in machines:
            folder = self.keys_for(machine.name)
            folder.mkdir(parents=True)
            _keygen(folder / "ssh_host_ed25519_key", machine.name)
            _keygen(folder / "ssh_host_ecdsa_key", machine.name, kind=("ecdsa",))
            kind, blob, *_ = (folder / "ssh_host_ed25519_key.pub").read_text().split()
            lines.append(f"{machine.address} {kind} {blob}\n")
        self.known_hosts.write_text("".join(lines))
        (self.ssh / "config").write_text(
            f"Host *\n  UserKnownHostsFile {self.known_hosts}\n  IdentityFile {self.ssh / 'id_ed25519'}\n  User root\n"
        )
        (self.folder / "inventory.toml").write_text(INVENTORY)
        (self.folder / "trainer").mkdir()
        (self.folder / "trainer/train.py").write_text(TRAINER)

    def wrap(self, argv: Iterable[str]) -> list[str]:
        """`argv` as a process on the operator's machine."""
        pairs = [f"{k}={v}" for k, v in self.env.items()]
        return ["nsenter", f"--net={net.RUN / self.namespace}", "env", *pairs, *argv]


def _keygen(path: Path, comment: str, passphrase: str = "", kind: tuple[str, ...] = ("ed25519",)) -> None:
    sh(["ssh-keygen", "-q", "-t", *kind, "-N", passphrase, "-C", comment, "-f", str(path)])
