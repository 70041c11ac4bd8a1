"""`lab`: one lab for all tests of a session, entered for each test; CI must have it, other machines may skip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lacking import lacking

from dflash_ops.hosts.keys import Keyring
from dflash_ops.hosts.lxc import LxcHost
from dflash_ops.hosts.ssh import SshHost
from lab import Lab, missing
from lab.__main__ import packages


@pytest.fixture(scope="session")
def the_lab() -> Iterator[Lab]:
    """The lab, outside of it: use `lab` in tests."""
    why = missing()
    if why is not None:
        lacking(why)
    with Lab.up(packages=packages()) as lab:
        yield lab


@pytest.fixture
def lab(the_lab: Lab) -> Iterator[Lab]:
    """The lab, with this thread as its operator; every fault of a test before is mended."""
    with the_lab.operator():
        yield the_lab
    for machine in the_lab.machines.values():
        if machine.proxmox:
            for knob in (machine.folder / "knobs").iterdir():
                knob.unlink()
    for number in the_lab.containers:
        the_lab.faults.start_container(number)


@pytest.fixture
def pve1(lab: Lab) -> Iterator[SshHost]:
    """The Proxmox host, by ssh."""
    host = SshHost("pve1", "192.0.2.11", user="root", keyring=Keyring())
    yield host
    host.close()


@pytest.fixture
def ct(pve1: SshHost) -> LxcHost:
    """Its container 200, by pct."""
    return LxcHost("ct200", pve1, 200)


@pytest.fixture
def operator_home(lab: Lab) -> Path:
    return lab.operator_home.home
