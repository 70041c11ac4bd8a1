"""docs/inventory.md, the dataclasses and the loader know the same keys."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from dflash_ops.contracts import Limits
from dflash_ops.errors import InventoryError
from dflash_ops.inventory import (
    REMEDIES,
    TRAINER_TABLES,
    Budgets,
    InventoryErrors,
    Job,
    LocalHost,
    LxcHost,
    Policy,
    SshHost,
    Trainer,
    Venv,
    Way,
    load,
)

DOC = (Path(__file__).resolve().parents[2] / "docs/inventory.md").read_text("utf-8")

#: What a dataclass carries beside the keys of the file.
ADDED = {"name", "overrides", "inventory", "tables", "node"}


def documented(heading: str, column: str = "key") -> dict[str, str]:
    """Keys of the table under a heading -> their default, in the order of the page."""
    section = DOC.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = section.split(f"| {column} |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| `([^`]+)` \|(?:[^|]*\| ?([^|]*?) ?\|)?", table, re.MULTILINE)
    return dict(rows)


def names(cls: type, *extra: str) -> set[str]:
    return ({f.name for f in fields(cls)} - ADDED) | set(extra)  # type: ignore[arg-type]


SECTIONS = {
    "Top level": {"schema", "default_job", "playbooks", "hosts", "jobs"},
    "Host of kind `local`": names(LocalHost, "kind"),
    "Host of kind `ssh`": names(SshHost, "kind"),
    "Host of kind `lxc`": names(LxcHost, "kind"),
    "Job": names(Job, "rendezvous"),
    "Nodes": {
        "host",
        "root",
        "session",
        "checkpoints",
        "interpreter",
        "env",
        "target_devices",
        "drafter_devices",
    },
    "Venv": names(Venv),
    "Trainer": names(Trainer, *TRAINER_TABLES),
    "Limits": names(Limits),
    "Policy": names(Policy),
    "Budgets": names(Budgets),
    "Remedy": names(Way) - {"scale"},
}


@pytest.mark.parametrize("heading", SECTIONS)
def test_page_and_dataclasses(heading: str) -> None:
    assert set(documented(heading)) == SECTIONS[heading]


BROKEN = """\
zzz = 1
[hosts.l]
kind = "local"
zzz = 1
[hosts.s]
kind = "ssh"
address = "192.0.2.6"
zzz = 1
[hosts.x]
kind = "lxc"
via = "s"
id = 200
zzz = 1
[jobs.a]
host = "l"
root = "a"
zzz = 1
[jobs.a.trainer]
target_devices = ["cpu"]
drafter_devices = ["cpu"]
zzz = 1
[jobs.b]
host = "l"
root = "b"
command = ["true"]
limits = { zzz = 1 }
venv = { lock = "l", zzz = 1 }
policy = { zzz = 1, budgets = { zzz = 1 } }
remedies = { fresh_compile_cache = { zzz = 1 } }
[jobs.c]
root = "c"
[jobs.c.trainer]
target_devices = ["cpu"]
drafter_devices = ["cpu"]
[[jobs.c.nodes]]
host = "l"
zzz = 1
"""

AT = {
    "zzz": "Top level",
    "hosts.l.zzz": "Host of kind `local`",
    "hosts.s.zzz": "Host of kind `ssh`",
    "hosts.x.zzz": "Host of kind `lxc`",
    "jobs.a.zzz": "Job",
    "jobs.a.trainer.zzz": "Trainer",
    "jobs.b.limits.zzz": "Limits",
    "jobs.b.venv.zzz": "Venv",
    "jobs.b.policy.zzz": "Policy",
    "jobs.b.policy.budgets.zzz": "Budgets",
    "jobs.b.remedies.fresh_compile_cache.zzz": "Remedy",
    "jobs.c.nodes[0].zzz": "Nodes",
}


def test_page_and_loader(tmp_path: Path) -> None:
    """A key that nobody knows is answered with the keys that are known there: those of the page."""
    path = tmp_path / "inventory.toml"
    path.write_text(BROKEN, "utf-8")
    with pytest.raises(InventoryErrors) as caught:
        load(path)
    known = {e.key: set(e.fix.split("known here: ")[1].split(", ")) for e in caught.value.errors}
    assert set(known) == set(AT)
    for key, heading in AT.items():
        assert known[key] == set(documented(heading)), heading


def test_defaults_are_as_the_page_says() -> None:
    for heading, cls in (("Limits", Limits), ("Budgets", Budgets)):
        for key, default in documented(heading).items():
            assert float(default.strip("`")) == getattr(cls(), key)
    job = {f.name: f.default for f in fields(Job)}
    for key in ("socket", "interpreter"):
        assert documented("Job")[key] == f'`"{job[key]}"`'
    for key in ("grace_s", "history_limit", "watch_s", "gate_s", "keep_releases"):
        assert float(documented("Job")[key].strip("`")) == job[key]
    assert documented("Host of kind `ssh`")["port"] == "`22`"


def test_remedies() -> None:
    section = DOC.split("\n## Remedy\n", 1)[1].split("\n## ", 1)[0].split("| remedy |", 1)[1]
    assert dict(re.findall(r"^\| `([^`]+)` \| (.*?) \|$", section, re.MULTILINE)) == dict(REMEDIES)


def test_the_forms_of_remedies_on_the_page_load(tmp_path: Path) -> None:
    text = '[hosts.h]\nkind = "local"\n[jobs.a]\nhost = "h"\nroot = "a"\ncommand = ["true"]\n'
    path = tmp_path / "i.toml"
    path.write_text(text + 'remedies = { restart = { args = ["--resume"] } }\n')
    first = load(path).job().remedies
    path.write_text(text + '[jobs.a.remedies]\nrestart = { args = ["--resume"] }\n')
    assert load(path).job().remedies == first
    path.write_text(text + 'remedies = { restarts = { args = ["--resume"] } }\n')
    with pytest.raises(InventoryError, match=r"unknown remedy 'restarts'"):
        load(path)
