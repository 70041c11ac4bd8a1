"""inventory.toml -> `Inventory`: hosts, jobs, and what must hold between them (docs/inventory.md has every key)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_ops.errors import InventoryError, did_you_mean
from dflash_ops.inventory.jobs import name_fault, read_job
from dflash_ops.inventory.lines import Path as KeyPath
from dflash_ops.inventory.model import SCHEMA, Host, Inventory, Job, LocalHost, LxcHost, SshHost
from dflash_ops.inventory.paths import local_path, local_program
from dflash_ops.inventory.reader import Faults, Table, read_toml

_ADDRESS = re.compile(r"[^\s/@'\"\\$`;|&<>(){}*?!#~-][^\s/@'\"\\$`;|&<>(){}*?!#~]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*\$?", re.ASCII)


class InventoryErrors(InventoryError):
    """Several faults of one file, in the order of their lines; what, where and next are those of the first."""

    def __init__(self, errors: Sequence[InventoryError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.what, file=first.file, key=first.key, line=first.line, fix=first.fix)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def load(path: Path | str) -> Inventory:
    """Read and check one inventory.

    Raises:
        InventoryError: its one fault; InventoryErrors (a kind of InventoryError) where it has several.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100  # what is named relative to a link stays beside the link
    values, faults = read_toml(path)
    _check_schema(values, faults)
    inventory = _read(path, values, faults)
    if faults.found:
        ordered = sorted(faults.found, key=lambda e: e.line or 0)
        raise ordered[0] if len(ordered) == 1 else InventoryErrors(ordered)
    return inventory


def _check_schema(values: Mapping[str, Any], faults: Faults) -> None:
    """A newer file is refused at once: whatever else it says would be misread."""
    schema = values.get("schema", SCHEMA)
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        faults.add(f"schema must be {SCHEMA}, not {schema!r}", ("schema",), f"write schema = {SCHEMA}")
    elif schema > SCHEMA:
        faults.add(
            f"the inventory is of schema {schema}; this dflash-ops reads {SCHEMA} and older",
            ("schema",),
            "install a newer dflash-ops",
        )
        raise faults.found[-1]


def _read(path: Path, values: Mapping[str, Any], faults: Faults) -> Inventory:
    top = Table(faults, (), values)
    top.asked["schema"] = None
    default_job = top.text("default_job", example='default_job = "NAME"')
    playbooks = _playbooks(top, path.parent)
    host_tables = top.tables("hosts")
    hosts = {name: host for name, table in host_tables.items() if (host := _read_host(name, table, path.parent))}
    _check_ways(hosts, host_tables, faults)
    job_tables = top.tables("jobs")
    jobs = {
        name: job
        for name, table in job_tables.items()
        if (job := read_job(name, table, hosts, list(host_tables), path)) is not None
    }
    _check_apart(jobs, hosts, faults)
    if default_job is not None and default_job not in job_tables:
        names = ", ".join(job_tables) or "there are none"
        top.fault(
            f"default_job names no job of this file: {default_job!r}{did_you_mean(default_job, list(job_tables))}",
            "default_job",
            f"name one of its jobs: {names}",
        )
    top.close()
    return Inventory(str(path), MappingProxyType(hosts), MappingProxyType(jobs), default_job, playbooks)


def _playbooks(top: Table, folder: Path) -> tuple[str, ...]:
    """Folders of own kinds, each absolute. Whether they are there is asked where they are read, by triage only."""
    if isinstance(top.values.get("playbooks"), str):
        one = top.text("playbooks", example='playbooks = "playbooks"')
        names: tuple[str, ...] = () if one is None else (one,)
    else:
        names = top.texts("playbooks", example='playbooks = ["playbooks"]') or ()
    found: list[str] = []
    for index, name in enumerate(names):
        if not name.strip():
            top.faults.add("an empty name is no folder", ("playbooks", index), "take it out")
        elif top.clean(name, "playbooks", index):
            found.append(str(local_path(name, folder)))
    return tuple(dict.fromkeys(found))


# -- hosts


def _read_host(name: str, table: Table, folder: Path) -> Host | None:
    if (fault := name_fault(name)) is not None:
        table.fault(f"{name!r} cannot be the name of a host: {fault}", None, "use letters, digits, - and _")
    kinds = ("local", "ssh", "lxc")
    kind = table.text("kind", example='kind = "local"', needed=True)
    if kind is None:
        if "kind" not in table:
            table.fault(f"host {name} has no kind", None, 'add kind = "local", "ssh" or "lxc"')
        return None  # which other keys it may have is not known
    if kind not in kinds:
        table.fault(f"unknown kind {kind!r}{did_you_mean(kind, kinds)}", "kind", 'write kind = "local", "ssh" or "lxc"')
        return None
    python = table.text("python", "python3") or "python3"
    host: Host | None
    if kind == "local":
        host = LocalHost(name, python=local_program(python, folder))
    elif kind == "ssh":
        host = _read_ssh(name, table, folder, python)
    else:
        host = _read_lxc(name, table, python)
    if kind != "local" and "/" in python and not python.startswith("/"):
        table.fault(
            f"python is a relative path: {python}",
            "python",
            "write the whole path as it is on that host, or a name found in its PATH",
        )
    table.close()
    return host


def _read_ssh(name: str, table: Table, folder: Path, python: str) -> SshHost | None:
    address = table.text("address", example='address = "192.0.2.6"', needed=True)
    if address is None and "address" not in table:
        table.fault(f"host {name} has no address", None, 'add address = "192.0.2.6"')
    if address is not None and not _ADDRESS.fullmatch(address):
        login, _, rest = address.rpartition("@")
        fix = f'write address = "{rest}" and user = "{login}"' if login else "write a name or an IP address only"
        table.fault(f"{address!r} is no address", "address", fix)
        address = None
    user = table.text("user", example='user = "root"')
    if user is not None and not _USER.fullmatch(user):
        table.fault(f"{user!r} is no user name", "user", "write the login name on that host")
    identity = table.text("identity", example='identity = "~/.ssh/id_ed25519"')
    known_hosts = table.text("known_hosts", example='known_hosts = "~/.ssh/known_hosts"')
    jump = table.texts("jump", example='jump = ["bastion.example"]') or ()
    for index, hop in enumerate(jump):
        if not hop.strip() or hop.startswith("-") or any(c.isspace() for c in hop):
            table.faults.add(f"{hop!r} is no host to jump over", (*table.path, "jump", index), "write user@host:port")
    host = SshHost(
        name,
        address=address or "",
        user=user,
        port=table.integer("port", 22, least=1, most=65535),
        identity=local_path(identity, folder),
        jump=jump,
        known_hosts=local_path(known_hosts, folder),
        sudo=table.flag("sudo", False),
        python=python,
    )
    return host if address is not None else None


def _read_lxc(name: str, table: Table, python: str) -> LxcHost | None:
    via = table.text("via", example='via = "proxmox"', needed=True)
    if via is None and "via" not in table:
        table.fault(f"host {name} has no via", None, 'add via = "NAME" of the Proxmox host')
    # Proxmox gives numbers from 100 on; below that they are reserved.
    number = table.integer("id", 100, least=100, most=999_999_999)
    if "id" not in table:
        table.fault(f"host {name} has no id", None, "add id = 200, the container's number (pct list shows it)")
    return LxcHost(name, via=via, id=number, python=python) if via is not None else None


def _check_ways(hosts: Mapping[str, Host], tables: Mapping[str, Table], faults: Faults) -> None:
    """Each `via` leads to a host, and in the end to one that is no container."""
    for name, host in hosts.items():
        if not isinstance(host, LxcHost):
            continue
        if host.via not in tables:
            others = [n for n in tables if n != name]
            faults.add(
                f"host {name} goes via {host.via!r}, which is no host here{did_you_mean(host.via, others)}",
                ("hosts", name, "via"),
                f"name one of: {', '.join(others)}" if others else "add the Proxmox host as [hosts.NAME]",
            )
            continue
        way = [name]
        here: Host | None = host
        while isinstance(here, LxcHost):
            way.append(here.via)
            if here.via == name:
                faults.add(
                    f"host {name} is reached through itself: {' -> '.join(way)}",
                    ("hosts", name, "via"),
                    "let the last one be of kind ssh or local",
                )
                break
            if here.via in way[:-1]:
                break  # a loop further on, said at its own hosts
            here = hosts.get(here.via)


# -- between jobs


def _machine(name: str, hosts: Mapping[str, Host]) -> tuple[object, ...]:
    """What two names of the same machine have in common."""
    host = hosts[name]
    if isinstance(host, LocalHost):
        return ("local",)
    if isinstance(host, SshHost):
        return ("ssh", host.address.lower(), host.port)
    return ("lxc", *(_machine(host.via, hosts) if host.via in hosts else (host.via,)), host.id)


def _check_apart(jobs: Mapping[str, Job], hosts: Mapping[str, Host], faults: Faults) -> None:
    """No two jobs of one machine, and no two nodes there, share a root or a session."""
    roots: dict[object, Job] = {}
    sessions: dict[object, Job] = {}
    looped = {e.key for e in faults.found if "through itself" in e.what}
    for job in (part for whole in jobs.values() for part in whole.parts):
        if looped:
            return  # a machine that is reached through itself has no identity to compare
        machine = _machine(job.host, hosts)
        root = os.path.realpath(job.root) if machine == ("local",) else os.path.normpath(job.root)
        if (first := roots.setdefault((machine, root), job)) is not job:
            faults.add(
                f"{_both(first, job)} have the same root on one machine: {job.root}",
                _key_of(job, "root", faults),
                f"give each {_kind_of(first, job)} a root of its own",
            )
        # tmux servers are one a user and socket; users differ by host entry at most
        if (first := sessions.setdefault((machine, job.socket, job.session), job)) is not job:
            faults.add(
                f"{_both(first, job)} have the same tmux session on one machine: {job.session}",
                _key_of(job, "session", faults),
                f'give one of them another name: session = "{job.session}-2"',
            )


def _both(first: Job, second: Job) -> str:
    if first.name == second.name and first.node is not None and second.node is not None:
        return f"nodes {first.node.rank} and {second.node.rank} of job {first.name}"
    return f"jobs {first.name} and {second.name}"


def _kind_of(first: Job, second: Job) -> str:
    return "node" if first.name == second.name else "job"


def _key_of(job: Job, key: str, faults: Faults) -> KeyPath:
    """Where this key of a job or node stands; where neither has it, where it would stand."""
    if job.node is not None:
        own: KeyPath = ("jobs", job.name, "nodes", job.node.rank, key)
        if own in faults.lines or ("jobs", job.name, key) not in faults.lines:
            return own
    return ("jobs", job.name, key)
