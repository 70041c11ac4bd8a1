"""Whose a lab is: a token file in its folder, and the sweeping of labs whose owner is dead.

The rule here: nothing is ended, unmounted or removed that the token file of a lab does not name; a process counts as
the recorded one only if its start time is the recorded one too, a namespace only if it is the same inode.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

TOKEN = "lab.json"
PREFIX = "dflab-"
SCHEMA = 1


def base() -> Path:
    """Where labs keep their folders; containers with shifted ids must be able to look into it."""
    return Path(os.environ.get("DFLASH_LAB_STATE") or "/var/tmp/dflash-lab")


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat, or None where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


@dataclass
class Token:
    """What a lab owns. `owner` None: it stays until someone says `down`."""

    id: str
    owner: tuple[int, int] | None
    boot: str = ""
    made: float = 0.0
    namespaces: dict[str, int] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def write(self, folder: Path) -> None:
        beside = folder / (TOKEN + ".new")
        beside.write_text(json.dumps(asdict(self), indent=1))
        beside.rename(folder / TOKEN)

    @property
    def orphaned(self) -> bool:
        if self.boot != boot_id():
            return True
        return self.owner is not None and start_ticks(self.owner[0]) != self.owner[1]


def read(folder: Path) -> Token | None:
    """The token of a lab's folder; None where this is no lab of ours."""
    try:
        said = json.loads((folder / TOKEN).read_text())
        owner = said["owner"]
        if said["schema"] != SCHEMA or folder.name != said["id"]:
            return None
        return Token(
            said["id"],
            (owner[0], owner[1]) if owner else None,
            said["boot"],
            said["made"],
            dict(said["namespaces"]),
            dict(said["containers"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def new(owner: bool) -> Token:
    pid = os.getpid()
    start = start_ticks(pid)
    assert start is not None
    return Token(os.urandom(3).hex(), (pid, start) if owner else None, boot_id(), time.time())


def labs() -> list[tuple[Path, Token]]:
    """All labs of this machine, oldest first."""
    found = [(p, t) for p in base().glob("*") if p.is_dir() and (t := read(p)) is not None]
    return sorted(found, key=lambda one: one[1].made)
