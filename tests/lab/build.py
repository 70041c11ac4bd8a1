"""`Lab`: up and down."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab import net, owner
from lab.container import CGROUPS, Container, clear_cgroups
from lab.machine import Machine, end_all
from lab.needs import missing
from lab.operator import Operator
from lab.shell import sh

if TYPE_CHECKING:
    from lab.faults import Faults

#: Machine -> its containers.
CONTAINERS: dict[str, tuple[int, ...]] = {"pve1": (200, 201), "pve2": (300,), "inner": ()}


class Lab:
    """A lab that is up. Machines `pve1`, `pve2` (Proxmox hosts) and `inner` (no Proxmox host, behind pve2)."""

    def __init__(self, token: owner.Token, folder: Path) -> None:
        self.token = token
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.containers: dict[int, Container] = {}
        self._faults: Faults | None = None
        self._down = False

    # -- up

    @classmethod
    def up(cls, *, keep: bool = False, packages: Path | None = None) -> Lab:
        """Build one. `keep`: it outlives this process, until `down`.

        Args:
            packages: a site-packages folder that the containers get read-only; /opt/dflash/bin/python has it.
        """
        if (why := missing()) is not None:
            raise RuntimeError(why)
        sweep()
        token = owner.new(owner=not keep)
        folder = owner.base() / token.id
        folder.mkdir(parents=True, mode=0o755)
        for path in (folder, folder.parent):
            path.chmod(0o755)
        token.containers = {str(n): name for name, numbers in CONTAINERS.items() for n in numbers}
        token.write(folder)
        lab = cls(token, folder)
        if not keep:
            atexit.register(lab.down)
        try:
            lab._build(packages)
        except BaseException:
            lab.down()
            raise
        return lab

    def _build(self, packages: Path | None) -> None:
        # Recorded before they are made: a lab that dies half-built is swept as well.
        spaces = {name: self.namespace(name) for name in net.ADDRESSES}
        self.token.namespaces = dict.fromkeys(spaces.values(), 0)
        self.token.write(self.folder)
        net.make(self.token.id, owner.PREFIX)
        self.token.namespaces = {space: net.inode(space) for space in spaces.values()}
        self.token.write(self.folder)
        self._read()
        self.operator_home.make(self.machines.values())
        for machine in self.machines.values():
            machine.make(self.operator_home.authorized, self.operator_home.keys_for(machine.name))
            machine.start_sshd()
        for container in self.containers.values():
            container.make(packages=packages)
            container.start()

    def _read(self) -> None:
        """The objects for what the token names."""
        spaces = {name: self.namespace(name) for name in net.ADDRESSES}
        self.operator_home = Operator(self.folder / "op", spaces["op"])
        self.machines = {
            name: Machine(name, spaces[name], self.folder / name, proxmox=bool(numbers))
            for name, numbers in CONTAINERS.items()
        }
        self.containers = {
            n: Container(n, self.machines[name], f"{owner.PREFIX}{self.token.id}-{name}")
            for name, numbers in CONTAINERS.items()
            for n in numbers
        }

    @property
    def inventory(self) -> Path:
        """A ready inventory.toml: hosts pve1, pve2, inner (ssh), ct200, ct201, ct300 (lxc) and a job."""
        return self.operator_home.folder / "inventory.toml"

    @property
    def faults(self) -> Faults:
        from lab.faults import Faults

        if self._faults is None:
            self._faults = Faults(self)
        return self._faults

    def namespace(self, name: str) -> str:
        """The network namespace of a machine, or of `op`."""
        return f"{owner.PREFIX}{self.token.id}-{name}"

    @contextlib.contextmanager
    def operator(self) -> Iterator[None]:
        """This thread is the operator's machine: its network, its home and its ssh keys."""
        before = {name: os.environ.get(name) for name in self.operator_home.env}
        with net.inside(self.operator_home.namespace):
            os.environ.update(self.operator_home.env)
            try:
                yield
            finally:
                for name, value in before.items():
                    os.environ.pop(name, None)
                    if value is not None:
                        os.environ[name] = value

    def calls(self, machine: str = "pve1") -> list[list[str]]:
        """Every call of pct on that machine so far, as its arguments."""
        path = self.machines[machine].folder / "pct.calls"
        lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
        return [line.partition("\t")[2].split("\x1f") for line in lines]

    # -- down

    def down(self) -> None:
        """All of it away. May be called twice."""
        if self._down:
            return
        self._down = True
        atexit.unregister(self.down)
        for machine in self.machines.values():
            if machine._sshd is not None:
                machine._sshd.kill()
                machine._sshd.wait(10)
        demolish(self.folder, self.token)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()


def demolish(folder: Path, token: owner.Token) -> None:
    """End, remove and forget what the token names, and nothing else. Every step may have been done already."""
    if token.boot == owner.boot_id():
        spaces: dict[str, int] = {}
        for name, recorded in token.namespaces.items():
            if name.startswith(f"{owner.PREFIX}{token.id}-"):
                with contextlib.suppress(FileNotFoundError):
                    there = net.inode(name)
                    # 0: it died while they were being made; the name with its random id is ours all the same
                    if recorded in (0, there):
                        spaces[name] = there
        end_all(set(spaces.values()))
        for name, inode in spaces.items():
            net.remove(name, inode)
        for machine in set(token.containers.values()):
            _clear(f"{owner.PREFIX}{token.id}-{machine}")
    _unmount(folder)
    _remove(folder)


def _clear(cgroup: str) -> None:
    if CGROUPS.is_dir():
        clear_cgroups(cgroup)


def _unmount(folder: Path) -> None:
    """Nothing of ours is mounted in the machine's own mount namespace; should it be, it goes before the files go."""
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in sorted((p for p in places if Path(p).is_relative_to(folder)), reverse=True):
        sh(["umount", "-l", place])


def _remove(folder: Path) -> None:
    device = folder.stat().st_dev

    def guard(path: str, names: Sequence[str]) -> None:
        for name in names:
            if Path(path, name).lstat().st_dev != device:
                raise RuntimeError(f"something is mounted in the lab's folder, which stays: {path}/{name}")

    for path, folders, _ in os.walk(folder):
        guard(path, folders)
    shutil.rmtree(folder)


def sweep() -> None:
    """Take down labs whose owner is dead (kill -9, power); one that cannot be is said and left."""
    for folder, token in owner.labs():
        if token.orphaned:
            try:
                demolish(folder, token)
            except (OSError, RuntimeError) as error:
                print(f"lab: the leavings of lab {token.id} stay: {error}", file=sys.stderr)


def opened(lab_id: str) -> Lab:
    """A lab that another process keeps up."""
    folder = owner.base() / lab_id
    token = owner.read(folder)
    if token is None:
        raise RuntimeError(f"there is no lab {lab_id} in {owner.base()}")
    lab = Lab(token, folder)
    lab._read()
    return lab
