"""Unprivileged LXC containers: a skeleton of their own /etc, /root, /var and the machine's /usr, read-only."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.machine import Machine
from lab.shell import run

#: Ids of the container are shifted by this, as on Proxmox.
SHIFT = 100_000

CGROUPS = Path("/sys/fs/cgroup")

#: Bytes of /srv/small, a file system of its own that a test may fill.
SMALL_MB = 24

CONFIG = """\
lxc.uts.name = {name}
lxc.rootfs.path = dir:{rootfs}
lxc.idmap = u 0 100000 65536
lxc.idmap = g 0 100000 65536
lxc.net.0.type = none
lxc.init.cmd = /usr/bin/tini -- sleep infinity
lxc.apparmor.profile = unconfined
lxc.autodev = 1
lxc.tty.max = 0
lxc.pty.max = 1024
lxc.mount.auto = proc:mixed
lxc.mount.entry = /sys sys none rbind,ro,create=dir 0 0
lxc.mount.entry = tmpfs dev/shm tmpfs rw,nosuid,nodev,create=dir 0 0
lxc.mount.entry = tmpfs srv/small tmpfs rw,size={small}m,nr_inodes=4096,mode=755,create=dir 0 0
lxc.mount.entry = {usr} usr none bind,ro{idmap} 0 0
lxc.cgroup.dir.container = {cgroup}/lxc/{name}
lxc.cgroup.dir.container.inner = ns
lxc.cgroup.dir.monitor = {cgroup}/lxc.monitor/{name}
"""

#: The container's Python with torch: a venv made of links, its packages those of the tests' own Python.
VENV = "/opt/dflash"


@dataclass
class Container:
    """Container `id` of `machine`. Its folder is `machine.folder/lxc/<id>`."""

    id: int
    machine: Machine
    cgroup: str
    _extra: str = ""

    @property
    def folder(self) -> Path:
        return self.machine.folder / "lxc" / str(self.id)

    @property
    def rootfs(self) -> Path:
        return self.folder / "rootfs"

    @property
    def conf(self) -> Path:
        """What the stand-in for pct reads, as /etc/pve/lxc/ID.conf."""
        return self.machine.folder / "pve" / f"{self.id}.conf"

    def make(self, *, packages: Path | None = None) -> None:
        """The root file system and the configuration; takes some 20 ms."""
        rootfs = self.rootfs
        for name in ("etc", "root", "home", "var/tmp", "var/log", "var/lib", "var/cache", "tmp", "run", "proc", "sys",
                     "dev", "usr", "opt", "srv/small", "mnt"):  # fmt: skip
            (rootfs / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                (rootfs / name).symlink_to(f"usr/{name}")
        (rootfs / "var/run").symlink_to("/run")
        etc = {
            "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
            "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
            "hostname": f"ct{self.id}\n",
            "hosts": f"127.0.0.1 localhost ct{self.id}\n",
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "resolv.conf": "",
            "pam.d/cron": "".join(f"{what} required pam_permit.so\n" for what in ("auth", "account", "session")),
        }
        (rootfs / "etc/pam.d").mkdir()
        for name, text in etc.items():
            (rootfs / "etc" / name).write_text(text)
        # the dynamic linker's cache, and what awk and the like point to
        for name in ("ld.so.cache", "ld.so.conf", "alternatives"):
            there = Path("/etc", name)
            if there.is_dir():
                shutil.copytree(there, rootfs / "etc" / name, symlinks=True)
            elif there.exists():
                shutil.copy(there, rootfs / "etc" / name)
        extra = self._venv(packages) if packages is not None else ""
        for path in (rootfs, *rootfs.rglob("*")):
            os.lchown(path, SHIFT, SHIFT)
        for name in ("tmp", "var/tmp"):
            (rootfs / name).chmod(0o1777)
        (rootfs / "root").chmod(0o700)
        for parent in (self.folder, self.folder.parent):
            parent.chmod(0o755)
        self._extra = extra
        self._configure(idmap=True)
        self.conf.write_text(
            f"arch: amd64\ncores: 2\nhostname: ct{self.id}\nmemory: 2048\nostype: debian\nunprivileged: 1\n"
        )

    def _configure(self, *, idmap: bool) -> None:
        """`idmap`: root in the container sees the machine's /usr as its own; not every file system can."""
        text = CONFIG.format(
            name=self.id,
            rootfs=self.rootfs,
            usr=self.machine.folder / "usr",
            small=SMALL_MB,
            cgroup=self.cgroup,
            idmap=",idmap=container" if idmap else "",
        )
        extra = self._extra if idmap else self._extra.replace(",idmap=container", "")
        (self.folder / "config").write_text(text + extra)

    def _venv(self, packages: Path) -> str:
        """A Python with the tests' own packages (torch and others) at /opt/dflash/bin/python; its mount entry."""
        venv = self.rootfs / VENV.lstrip("/")
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        site = venv / "lib" / version / "site-packages"
        site.mkdir(parents=True)
        (venv / "bin").mkdir()
        (venv / "bin/python").symlink_to(f"/usr/bin/{version}")
        (venv / "bin/python3").symlink_to("python")
        (venv / "pyvenv.cfg").write_text(
            f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version[6:]}\n"
        )
        (site / "lab.pth").write_text("/opt/packages\n")
        return f"lxc.mount.entry = {packages} opt/packages none bind,ro,create=dir,idmap=container 0 0\n"

    # -- from the Proxmox host's side, without pct

    def exec(self, argv: Sequence[str], *, ok: Sequence[int] | None = (0,), seconds: float = 20.0) -> str:
        """A command in the container as its root; standard output."""
        return self.machine.run([*self._lxc("lxc-attach"), "--clear-env", "--", *argv], ok=ok, seconds=seconds)

    def _lxc(self, tool: str) -> list[str]:
        return [tool, "-P", str(self.machine.folder / "lxc"), "-n", str(self.id)]

    @property
    def running(self) -> bool:
        return self.init_pid is not None

    @property
    def init_pid(self) -> int | None:
        said = self.machine.run([*self._lxc("lxc-info"), "-p", "-H"], ok=None).strip()
        return int(said) if said.isdigit() else None

    def start(self) -> None:
        """Start it; the processes of a container that was killed leave cgroups in its way, which go first."""
        fault = self._start()
        if fault is not None and "idmap" in fault:
            self._configure(idmap=False)
            fault = self._start()
        if fault is not None:
            raise RuntimeError(f"container {self.id} does not start: {fault}")

    def _start(self) -> str | None:
        self._clear_cgroups()
        log = self.folder / "lxc.log"
        log.unlink(missing_ok=True)
        done = run(self.machine.wrap([*self._lxc("lxc-start"), "-o", str(log), "-l", "WARN"]))
        if done.returncode == 0:
            return None
        said = log.read_text("utf-8", "replace") if log.exists() else ""
        return _errors(said) or done.stderr.decode("utf-8", "replace")

    def stop(self, *, kill: bool = True) -> None:
        if self.running:
            self.machine.run([*self._lxc("lxc-stop"), *(["-k"] if kill else ["-t", "10"])], ok=None, seconds=30)
        until = time.monotonic() + 10
        while self.running and time.monotonic() < until:
            time.sleep(0.02)
        self._clear_cgroups()

    def _clear_cgroups(self) -> None:
        clear_cgroups(f"{self.cgroup}/lxc/{self.id}")
        clear_cgroups(f"{self.cgroup}/lxc.monitor/{self.id}")


def clear_cgroups(relative: str) -> None:
    """Remove a cgroup and those below it from every hierarchy; one with a process in it stays."""
    hierarchies = [CGROUPS, *(p for p in CGROUPS.iterdir() if p.is_dir())]
    for hierarchy in hierarchies:
        top = hierarchy / relative
        if top.is_dir():
            for path in sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    path.rmdir()
            with contextlib.suppress(OSError):
                top.rmdir()


def _errors(log: str) -> str:
    """The first lines of lxc's log that are errors; warnings about cgroups follow by the dozen."""
    return "\n".join([line for line in log.splitlines() if " ERROR " in line][:8])
