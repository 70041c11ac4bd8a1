"""pct's own words, as the real one says them, become errors of their own."""

from __future__ import annotations

import pytest

from dflash_ops.errors import (
    ContainerLocked,
    ContainerMissing,
    ContainerStopped,
    HostError,
    NotProxmox,
    NotRoot,
)
from dflash_ops.hosts import pct

NOISE = (
    'perl: warning: Setting locale failed.\n\tLANG = "de_DE.UTF-8"\n    are supported and installed on your system.\n'
)


@pytest.mark.parametrize(
    ("said", "rc", "kind", "word"),
    [
        ("Configuration file 'nodes/pve/lxc/200.conf' does not exist", 2, ContainerMissing, "no container 200"),
        ("container '200' not running!", 255, ContainerStopped, "does not run"),
        ("can only push files to a running CT", 255, ContainerStopped, "does not run"),
        ("CT 200 not running", 255, ContainerStopped, "does not run"),
        ("VM 200 not running", 255, ContainerStopped, "does not run"),
        ("CT is locked (backup)", 255, ContainerLocked, "backup"),
        (
            "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-200.lock' - got timeout",
            4,
            ContainerLocked,
            "pve-config-200.lock",
        ),
        ("lxc-attach: 200: attach.c: get_attach_context: 405 - Failed to get init pid", 1, ContainerStopped, "just"),
        ("please run as root", 255, NotRoot, "root"),
        ("sudo: a password is required", 1, NotRoot, "password"),
        ("env: 'pct': No such file or directory", 127, NotProxmox, "no pct"),
        ("sudo: pct: command not found", 1, NotProxmox, "no pct"),
        ("bash: line 1: pct: command not found", 127, NotProxmox, "no pct"),
    ],
)
def test_known_words(said: str, rc: int, kind: type[HostError], word: str) -> None:
    for text in (said + "\n", NOISE + said + "\n"):
        error = pct.error_of(text, rc, 200, "pve1")
        assert type(error) is kind
        assert word in error.what
        assert "pve1" in error.where
        assert error.next


def test_unknown_words_are_told_without_noise() -> None:
    assert pct.error_of("something new", 5, 200, "pve1") is None
    error = pct.other(NOISE + "unable to open file '/fastboot.tmp'\n", 5, 200, "pve1")
    assert "exit code 5: unable to open file" in error.what


def test_status() -> None:
    assert pct.status_of(NOISE + "status: running\n") == "running"
    assert pct.status_of("status: stopped\n") == "stopped"
    assert pct.status_of("nothing of the kind") is None
