"""One [jobs.NAME] table -> `Job`."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dflash_ops.contracts import Limits
from dflash_ops.contracts.names import session_fault, session_name, socket_fault
from dflash_ops.errors import did_you_mean
from dflash_ops.inventory.env import read_env, read_secrets
from dflash_ops.inventory.model import Host, Job, LocalHost, Node
from dflash_ops.inventory.nodes import Over, check_drafters, node_env, node_tables, node_trainer, read_rendezvous
from dflash_ops.inventory.paths import home, local_path, local_program
from dflash_ops.inventory.policies import read_policy
from dflash_ops.inventory.reader import Table
from dflash_ops.inventory.runs import read_foreign, read_gate, read_venv, read_what_runs


def name_fault(name: str) -> str | None:
    """Why this cannot be the name of a job or host, or None."""
    if not name.strip():
        return "it is empty"
    if name != name.strip():
        return "it begins or ends with a blank"
    if name.startswith("-"):
        return "it would be read as an option"
    if "/" in name or any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in name):
        return "it holds a slash or a control character"
    return "it is longer than 100 characters" if len(name) > 100 else None


def default_session(job: str) -> str:
    """`dflash-NAME`, with `_` for what tmux would not take as a name."""
    return session_name(f"dflash-{job}")


def read_job(name: str, table: Table, hosts: Mapping[str, Host], host_names: Sequence[str], file: Path) -> Job | None:
    """The job, or None where a fault (noted) leaves nothing to build it from."""
    folder = file.parent
    if (fault := name_fault(name)) is not None:
        table.fault(f"{name!r} cannot be the name of a job: {fault}", None, "use letters, digits, - and _")
    # known also where every node has them, or where `nodes` has a fault and nobody asks
    table.asked.update(dict.fromkeys(("host", "root", "session", "checkpoints", "interpreter")))
    nodes = node_tables(name, table)
    env = read_env(table, "env")
    adopted = table.flag("adopted", False)
    if adopted and nodes is not None:
        table.fault(f"job {name} is adopted: it is one session on one machine", "nodes", "adopt each session by itself")
    trainer, command = read_what_runs(name, table, adopted=adopted, nodes=nodes is not None)
    progress, finished_rc, remedies = read_foreign(table, command is not None or adopted)
    secret_env = read_secrets(table, env, folder)
    places = []
    for rank, node in enumerate([table] if nodes is None else [Over(one, table) for one in nodes]):
        place = _place(name, node, hosts, host_names, folder, None if nodes is None else rank)
        places.append(place)
    rendezvous = read_rendezvous(name, table, None if nodes is None else [hosts.get(p.host) for p in places])
    job = Job(
        name=name,
        host=places[0].host if places else "",
        root=places[0].root if places else "",
        session=places[0].session if places else "",
        checkpoints=places[0].checkpoints if places else "",
        interpreter=places[0].interpreter if places else "",
        socket=_socket(table),
        env=env,
        secret_env=secret_env,
        grace_s=table.number("grace_s", 60.0, most=86_400),
        history_limit=table.integer("history_limit", 50_000, least=100, most=10_000_000),
        source=local_path(table.text("source", example='source = "my_trainer"'), folder),
        limits=_limits(table),
        policy=read_policy(table, adopted),
        trainer=trainer,
        command=command,
        progress=progress,
        finished_rc=finished_rc,
        remedies=remedies,
        venv=read_venv(table, folder),
        gate=read_gate(table),
        gate_s=table.number("gate_s", 300.0, most=86_400),
        watch_s=table.number("watch_s", 180.0, most=86_400),
        keep_releases=table.integer("keep_releases", 5, least=1, most=10_000),
        adopted=adopted,
        inventory=str(file),
    )
    if nodes is not None:
        job = _with_nodes(job, table, nodes, places, rendezvous)
    table.close()
    return job if places and all(p.host and p.root for p in places) and (trainer or command or adopted) else None


# -- where it runs


@dataclass(frozen=True)
class _Place:
    """Where a job, or one node of it, runs; host and root are empty where they have a fault."""

    host: str
    root: str
    session: str
    checkpoints: str
    interpreter: str


def _place(
    name: str, table: Table, hosts: Mapping[str, Host], host_names: Sequence[str], folder: Path, rank: int | None
) -> _Place:
    """Of a job (`rank` None) or of one of its nodes."""
    host = _host(name, table, hosts, host_names)
    root = _root(name, table, host, folder)
    interpreter = _interpreter(table, host, folder)
    checkpoints = table.text("checkpoints", "checkpoints") or "checkpoints"
    return _Place(
        host=host.name if host is not None else "",
        root=root or "",
        session=_session(table, name if rank is None else f"{name}-{rank}"),
        checkpoints=os.path.normpath(Path(root or "/", checkpoints)),
        interpreter=interpreter,
    )


def _with_nodes(job: Job, table: Table, nodes: Sequence[Table], places: Sequence[_Place], rendezvous: str) -> Job:
    """The job with each of its nodes as a job of its own; a single node is the job itself."""
    found: list[Job] = []
    for rank, (node, place) in enumerate(zip(nodes, places, strict=True)):
        trainer = job.trainer
        if trainer is not None:
            outer = Table(table.faults, (*table.path, "trainer"), table.values["trainer"])
            trainer = node_trainer(rank, node, job.name, outer, trainer)
        if "venv" in table and "interpreter" in node:
            node.fault("a job has a venv or an interpreter, not both", "interpreter", "keep one of them")
        env = node_env(node, job.env, job.secret_env)
        found.append(
            replace(
                job,
                host=place.host,
                root=place.root,
                session=place.session,
                checkpoints=place.checkpoints,
                interpreter=place.interpreter,
                env=env,
                trainer=trainer,
                node=Node(rank, len(nodes), rendezvous),
            )
        )
        node.close()
    if job.trainer is not None:
        check_drafters(job.name, table, [n.trainer for n in found if n.trainer is not None])
    if not found:
        return job
    return found[0] if len(found) == 1 else replace(found[0], node=None, nodes=tuple(found))


def _host(name: str, table: Table, hosts: Mapping[str, Host], host_names: Sequence[str]) -> Host | None:
    said = table.text("host", example='host = "NAME"', needed=True)
    if said is None:
        if "host" not in table:
            one = f'"{host_names[0]}"' if len(host_names) == 1 else '"NAME"'
            table.fault(f"job {name} has no host", None, f"add host = {one}")
        return None
    if said not in host_names:
        fix = f"name one of: {', '.join(host_names)}" if host_names else f'add [hosts.{said}] with kind = "local"'
        table.fault(f"there is no host {said!r}{did_you_mean(said, host_names)}", "host", fix)
        return None
    return hosts.get(said)  # None: it is there, with a fault of its own


def _root(name: str, table: Table, host: Host | None, folder: Path) -> str | None:
    root = table.text("root", example=f'root = ".dflash/{name}"', needed=True)
    if root is None:
        if "root" not in table:
            table.fault(f"job {name} has no root", None, f'add root = ".dflash/{name}", its folder on the host')
        return None
    if host is None:
        return None
    if isinstance(host, LocalHost):
        whole = local_path(root, folder)
    elif root.startswith("/"):
        whole = os.path.normpath(root)
    else:
        table.fault(
            f"root is no whole path: {root!r}", "root", f"write it as it is on host {host.name}, beginning with /"
        )
        return None
    if whole in ("/", "//") or (isinstance(host, LocalHost) and whole == home()):
        table.fault(f"root is {whole}, which is no folder of its own", "root", "name a folder for this job only")
        return None
    return whole


def _interpreter(table: Table, host: Host | None, folder: Path) -> str:
    said = table.text("interpreter", "python3", example='interpreter = ".venv/bin/python"') or "python3"
    if host is None or isinstance(host, LocalHost):
        return local_program(said, folder)
    if "/" in said and not said.startswith("/"):
        table.fault(
            f"interpreter is a relative path: {said!r}",
            "interpreter",
            f"write the whole path as it is on host {host.name}, or a name found in its PATH",
        )
    return said


def _session(table: Table, job: str) -> str:
    session = table.text("session", example=f'session = "{default_session(job)}"')
    if session is None:
        return default_session(job)
    if (fault := session_fault(session)) is not None:
        table.fault(
            f"{session!r} is no name for a tmux session: {fault}",
            "session",
            f'write session = "{session_name(session) or default_session(job)}"',
        )
    return session


def _socket(table: Table) -> str:
    socket = table.text("socket", "dflash-ops") or "dflash-ops"
    if socket_fault(socket) is not None:
        table.fault(
            f"{socket!r} is no name for a tmux socket", "socket", 'write a short name without slashes: "dflash-ops"'
        )
    return socket


# -- limits


def _limits(table: Table) -> Limits:
    below = table.table("limits")
    if below is None:
        return Limits()
    plain = Limits()
    values = {
        f.name: below.number(f.name, getattr(plain, f.name), most=1.0 if f.name == "slow_factor" else 10 * 86_400)
        for f in fields(Limits)
    }
    below.close()
    return Limits(**values)
