"""`nodes` of a job: on which machines it runs, what differs there, and where its nodes meet (docs/inventory.md, Nodes).

The rule here: what stands in the job counts on every node that does not say otherwise, so that a node is one short
table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash_ops.inventory.devices import role_faults
from dflash_ops.inventory.env import read_env
from dflash_ops.inventory.model import Host, LocalHost, LxcHost, SecretEnv, SshHost, Trainer
from dflash_ops.inventory.reader import Table, describe
from dflash_ops.inventory.runs import DEVICES_EXAMPLE, read_devices

#: Where the nodes meet unless the job names another port.
PORT = 29400

#: Nodes of one job at most: each has a connection and a thread of its own while it is worked on.
MOST = 64

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9]+)?\]", re.ASCII)
_EXAMPLE = 'nodes = [{ host = "a" }, { host = "b" }]'


class Over(Table):
    """A node's table in front of its job's: a key is the node's where it has it, else the job's."""

    def __init__(self, node: Table, job: Table) -> None:
        super().__init__(node.faults, node.path, node.values)
        self._node, self._job = node, job

    def _at(self, key: str) -> Table:
        return self._node if key in self._node or key not in self._job else self._job

    def __contains__(self, key: str) -> bool:
        return key in self._node or key in self._job

    def fault(self, what: str, key: str | None, fix: str) -> None:
        (self._node if key is None else self._at(key)).fault(what, key, fix)

    def clean(self, value: str, key: str, index: int | None = None) -> bool:
        return self._at(key).clean(value, key, index)

    def _get(self, key: str, kind: type, example: str) -> Any:
        self._node.asked[key] = self._job.asked[key] = None
        return self._at(key)._get(key, kind, example)


def node_tables(name: str, table: Table) -> list[Table] | None:
    """The tables of `nodes`, None for a job without them. Elements that are no tables are noted and left out."""
    said = table.items("nodes", example=_EXAMPLE)
    if said is None:
        return None
    if not said:
        table.fault(f"job {name} has 0 nodes", "nodes", f"write {_EXAMPLE}, or remove it")
        return None
    if len(said) > MOST:
        table.fault(f"job {name} has {len(said)} nodes; {MOST} are the most", "nodes", "name fewer")
        return None
    found = []
    for index, item in enumerate(said):
        path = (*table.path, "nodes", index)
        if isinstance(item, dict):
            found.append(Table(table.faults, path, item))
        else:
            table.faults.add(f"node {index} must be a table, not {describe(item)}", path, f"write {_EXAMPLE}")
    return found


def node_trainer(rank: int, node: Table, name: str, outer: Table, trainer: Trainer) -> Trainer:
    """The job's trainer with this node's devices; `outer` is its table `[jobs.NAME.trainer]`."""
    roles: dict[str, tuple[str, ...]] = {}
    places: dict[str, Table] = {}
    for role, given in (("target", trainer.target_devices), ("drafter", trainer.drafter_devices)):
        key = f"{role}_devices"
        places[role] = node if key in node or key not in outer else outer
        node.asked[key] = None
        if key in node:
            own = read_devices(node, key)
            if own is not None:
                roles[role] = own
        elif key not in outer:
            where = f"to this node, or for all nodes to [jobs.{name}.trainer]"
            node.fault(f"node {rank} of job {name} has no {key}", None, f"add {key} = {DEVICES_EXAMPLE} {where}")
        elif given or outer.values[key] == []:  # else its own fault was told
            roles[role] = given
    if len(roles) < 2:
        return trainer
    for fault in role_faults(roles["target"], roles["drafter"], features=trainer.from_features):
        places[fault.role].fault(f"node {rank}: {fault.what}", f"{fault.role}_devices", fault.fix)
    return replace(trainer, target_devices=roles["target"], drafter_devices=roles["drafter"])


def check_drafters(name: str, table: Table, trainers: Sequence[Trainer]) -> None:
    """Drafters of all nodes average with each other: they are of one kind."""
    kinds = [{d.partition(":")[0] for d in t.drafter_devices} for t in trainers]
    for rank, kind in enumerate(kinds):
        if len(kind) == 1 and len(kinds[0]) == 1 and kind != kinds[0]:
            what = f"the drafters of node 0 are on {_kind(kinds[0])}, those of node {rank} on {_kind(kind)}"
            path = (*table.path, "nodes", rank, "drafter_devices")
            table.faults.add(f"{what}: they cannot average with each other", path, "put all drafters on one kind")
            return


def _kind(kinds: set[str]) -> str:
    return "the CPU" if kinds == {"cpu"} else "GPUs"


def node_env(node: Table, env: Mapping[str, str], secrets: Sequence[SecretEnv]) -> dict[str, str]:
    """The job's environment with the node's own variables."""
    own = read_env(node, "env")
    for secret in secrets:
        if secret.name in own:
            node.fault(f"{secret.name} is in env and in secret_env", "env", "take it out of env: a secret has no place")
    return {**env, **own}


def read_rendezvous(name: str, table: Table, nodes: Sequence[Host | None] | None) -> str:
    """`HOST:PORT` at which the nodes meet; empty for a job without nodes, or with a fault.

    Args:
        nodes: each node's host, None where it has a fault of its own.
    """
    example = 'rendezvous = "192.0.2.11:29400"'
    said = table.text("rendezvous", example=example)
    if nodes is None:
        if said is not None and "nodes" not in table:
            table.fault("rendezvous belongs to a job with nodes", "rendezvous", f"add {_EXAMPLE}, or remove it")
        return ""
    if said is not None:
        endpoint = parse_rendezvous(said)
        if endpoint is None:
            table.fault(f"{said!r} is no HOST:PORT", "rendezvous", f"write {example}: an address of node 0")
        return endpoint or ""
    if not nodes or nodes[0] is None:
        return ""
    first, others = nodes[0], [n for n in nodes if n is not None]
    if len(nodes) == 1 or all(isinstance(n, LocalHost) for n in others):
        return f"127.0.0.1:{PORT}"
    if isinstance(first, SshHost):
        return f"{first.address}:{PORT}" if ":" not in first.address else f"[{first.address}]:{PORT}"
    kind = "a container" if isinstance(first, LxcHost) else "this machine"
    table.fault(
        f"node 0 is on {kind}, whose address for the other nodes is not in this file",
        "nodes",
        f"add {example}: an address of host {first.name} that all nodes reach",
    )
    return ""


def parse_rendezvous(text: str) -> str | None:
    """`HOST:PORT`, with the usual port where none is named; None where it is neither."""
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, str(PORT)
    if not _NAME.fullmatch(host) and not _IPV6.fullmatch(host):
        return None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        return None
    return f"{host}:{int(port)}"
