"""Every command of the tutorial is run in the lab, whose addresses are those of the text: its host, its container 200.

What needs eight GPUs, a network or a real Proxmox is named below with its reason.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reader import REPO, Reader, Rule, follow, reader_in

from lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def kill_the_trainer(reader: Reader) -> None:
    """The very process, by its number: a pattern might meet somebody else's."""
    start = json.loads((reader.cwd / "first/run/attempts/1/start.json").read_text())
    os.kill(start["launcher"]["pid"], signal.SIGKILL)


def until_it_steps_again(reader: Reader) -> None:
    """As long as it takes, where the text has a fixed wait."""
    end = time.monotonic() + 120
    while True:
        said = reader.obey("dflash-ops status first --json", Rule(""))
        job = json.loads(said.stdout)["jobs"][0]
        if (job["attempt"], job["state"]) == (2, "stepping"):
            return
        assert time.monotonic() < end, said.stdout
        time.sleep(0.5)


def own_socket(reader: Reader) -> None:
    """The job of this machine in a tmux server of its own: the usual one may be somebody's."""
    file = reader.cwd / "inventory.toml"
    file.write_text(file.read_text().replace("[jobs.first]", f'[jobs.first]\nsocket = "{reader.socket}"'))


RULES = (
    Rule(r"python3 -m venv", skip="needs a package registry; CI installs the wheel"),
    Rule(r"export PATH=", skip="the reader has dflash-ops in his PATH already"),
    Rule(r"cat > inventory.toml", after=own_socket),
    Rule(r"(mkdir|cd|cat) "),
    Rule(r"pkill ", instead=kill_the_trainer),
    Rule(r"sleep ", instead=until_it_steps_again),
    Rule(r"ssh-copy-id", skip="the lab's host knows the key"),
    Rule(r"ssh root@192\.0\.2\.11 pct list"),
    Rule(r"dflash-ops doctor (first|second)", codes=(0, 3)),  # what this machine lacks is no fault of the text
    Rule(r"dflash-ops enable second", proof="tests/lab/test_wire_boot.py"),  # the lab's container has no cron by itself
    Rule(r"dflash-ops supervise second --once", codes=(0, 1)),  # 1: there is something to tell
    Rule(r"dflash-ops .*\bdflash\b", skip="the real one: eight GPUs and a target"),
)


@pytest.fixture
def reader(lab: Lab, tmp_path: Path) -> Iterator[Reader]:
    made = reader_in(tmp_path)
    made.environ["HOME"] = home = str(lab.operator_home.home)  # where the key is; OpenSSH asks the passwd file instead
    ssh = made.home / "bin/ssh"
    ssh.write_text(
        f'#!/bin/sh\nexec /usr/bin/ssh -F "{home}/.ssh/config" -o UserKnownHostsFile="{home}/.ssh/known_hosts"'
        f' -i "{home}/.ssh/id_ed25519" "$@"\n'
    )
    ssh.chmod(0o755)
    try:
        yield made
    finally:
        made.obey("dflash-ops stop second --grace 5", Rule(""))
        made.end()


def test_every_command_of_the_tutorial_does_what_it_says(reader: Reader) -> None:
    follow((REPO / "docs/tutorial.md").read_text("utf-8"), RULES, reader)
    assert (reader.cwd / "first.html").stat().st_size > 1000
