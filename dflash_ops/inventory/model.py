"""What an inventory says, as frozen dataclasses: hosts, jobs, and a job's overrides for one run.

The rule here: these objects are already checked and already resolved (absolute paths, device names); who holds one
need not look at the file again. Nothing in this module reads a file, except the secrets that a job names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from dflash_ops.contracts import RULES, Action, Limits, Policy, Way
from dflash_ops.errors import InventoryError, UsageError, did_you_mean
from dflash_ops.inventory.devices import check_roles, parse_devices
from dflash_ops.inventory.sets import apply_sets

#: The newest `schema` of inventory.toml that this version reads.
SCHEMA = 1

#: Tables of `[jobs.NAME.trainer]` that are passed to the trainer as they are (its own `check` reads their keys).
TRAINER_TABLES = (
    "target", "drafter", "data", "train", "loss", "workers", "ring", "features", "checkpoint", "nodes",
)  # fmt: skip

#: Actions that a foreign trainer's `remedies` may say how to do, and what each means (contracts.Action).
REMEDIES: Mapping[str, str] = MappingProxyType(
    {a.value: rule.text for a, rule in RULES.items() if rule.changes or a is Action.RESTART}
)


@dataclass(frozen=True)
class LocalHost:
    """This machine. `python` runs the resident there; it needs the standard library and libtmux only."""

    kind: ClassVar[str] = "local"

    name: str
    python: str = "python3"


@dataclass(frozen=True)
class SshHost:
    """A machine behind ssh. `user` None: as ~/.ssh/config or the system says; `jump` = hosts passed on the way."""

    kind: ClassVar[str] = "ssh"

    name: str
    address: str
    user: str | None = None
    port: int = 22
    identity: str | None = None
    jump: tuple[str, ...] = ()
    known_hosts: str | None = None
    sudo: bool = False
    python: str = "python3"


@dataclass(frozen=True)
class LxcHost:
    """Container `id` on the Proxmox host `via` (the name of another host of this inventory)."""

    kind: ClassVar[str] = "lxc"

    name: str
    via: str
    id: int
    python: str = "python3"


Host = LocalHost | SshHost | LxcHost


@dataclass(frozen=True)
class Trainer:
    """The bundled trainer: devices by role (`cuda:N` or `cpu`) and its run.toml tables, keys unchecked."""

    target_devices: tuple[str, ...]
    drafter_devices: tuple[str, ...]
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def from_features(self) -> bool:
        """Whether it trains from features on disk, and so needs no target."""
        return bool(self.tables.get("features", {}).get("path"))


@dataclass(frozen=True)
class SecretEnv:
    """A variable whose value never stands in the inventory: taken from the operator's environment, or from `file`."""

    name: str
    file: str | None = None


@dataclass(frozen=True)
class Venv:
    """An environment made there from `lock`, an absolute file on this machine, by `python`, a program there."""

    lock: str
    python: str = "python3"


@dataclass(frozen=True)
class Node:
    """Which one of a job's nodes: `rank` from 0 of `count`, and the `HOST:PORT` at which all of them meet."""

    rank: int
    count: int
    rendezvous: str


@dataclass(frozen=True)
class Job:
    """One job. Exactly one of `trainer` and `command` is set, or neither where the job is `adopted`.

    `root` and `checkpoints` are absolute paths on the job's host, `interpreter` is absolute or a name found in PATH
    there, `source` is an absolute folder on this machine (None: the bundled code). `overrides` are those of one run.

    A job of several nodes has each of them in `nodes`, as a job that is whole by itself (same name, its `node` set);
    where it runs, its devices and its environment are then those of node 0 here.
    """

    name: str
    host: str
    root: str
    session: str
    checkpoints: str
    interpreter: str = "python3"
    socket: str = "dflash-ops"
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: tuple[SecretEnv, ...] = ()
    grace_s: float = 60.0
    history_limit: int = 50_000
    source: str | None = None
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)
    trainer: Trainer | None = None
    command: tuple[str, ...] | None = None
    progress: str = ""
    finished_rc: tuple[int, ...] = (0,)
    remedies: Mapping[str, Way] = field(default_factory=dict)
    venv: Venv | None = None
    gate: tuple[str, ...] | None = None
    gate_s: float = 300.0
    watch_s: float = 180.0
    keep_releases: int = 5
    adopted: bool = False
    nodes: tuple[Job, ...] = ()
    node: Node | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    inventory: str = ""

    @property
    def parts(self) -> tuple[Job, ...]:
        """Its nodes, or itself."""
        return self.nodes or (self,)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts it runs on, each once."""
        return tuple(dict.fromkeys(part.host for part in self.parts))

    @property
    def label(self) -> str:
        """How a node is called before people: `node 1 (b)`; a job without nodes by its name."""
        return self.name if self.node is None or self.node.count == 1 else f"node {self.node.rank} ({self.host})"

    def at_node(self, rank: int | None) -> Job:
        """One node of this job as a job of its own; None: itself.

        Raises:
            UsageError: it has no such node.
        """
        if rank is None:
            return self
        if rank < len(self.parts):
            return self.parts[rank]
        count = len(self.parts)
        has = "runs on one machine only" if count == 1 else f"has the nodes 0 to {count - 1}"
        raise UsageError(f"job {self.name} {has}", f"--node {rank}", "name one of them, or leave it out")

    def with_overrides(
        self,
        target_gpus: str | None = None,
        drafter_gpus: str | None = None,
        sets: Sequence[str] = (),
    ) -> Job:
        """This job as it should run once.

        Args:
            target_gpus, drafter_gpus: `0,1,2`, `0-4`, `cuda:0`, `cpu,cpu`; None keeps the inventory's.
            sets: `key=value`; the value is read as TOML, and as a plain string where it is none. Keys: `train.lr`
                and any other `table.key` of the trainer, `env.NAME`, `limits.KEY`, `grace_s`, `history_limit`.

        Raises:
            UsageError: a device or key that cannot be meant, or one device in two roles.
        """
        job = self
        overrides = dict(self.overrides)
        if target_gpus is not None or drafter_gpus is not None:
            if job.trainer is None:
                raise UsageError(
                    f"job {job.name} runs its own command: its devices are not dflash-ops' to choose",
                    "--target-gpus, --drafter-gpus",
                    "give them to the command itself, for example --set env.CUDA_VISIBLE_DEVICES=0,1",
                )
            target, drafter = job.trainer.target_devices, job.trainer.drafter_devices
            if target_gpus is not None:
                target = parse_devices(target_gpus, "--target-gpus")
                overrides["target_gpus"] = target_gpus
            if drafter_gpus is not None:
                drafter = parse_devices(drafter_gpus, "--drafter-gpus")
                overrides["drafter_gpus"] = drafter_gpus
            if fault := check_roles(target, drafter, features=job.trainer.from_features):
                raise UsageError(
                    fault.what, f"--target-gpus {','.join(target)} --drafter-gpus {','.join(drafter)}", fault.fix
                )
            job = replace(job, trainer=replace(job.trainer, target_devices=target, drafter_devices=drafter))
        changes, said = apply_sets(job, sets, TRAINER_TABLES)
        nodes = tuple(n.with_overrides(target_gpus, drafter_gpus, sets) for n in job.nodes)
        return replace(job, **changes, nodes=nodes, overrides={**overrides, **said})

    def secrets(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Values of `secret_env`, from `environ` or their files (a final newline is not part of a secret).

        Raises:
            InventoryError: a variable is not set, or its file cannot be read; the value itself is never said.
        """
        found: dict[str, str] = {}
        for secret in self.secret_env:
            key = f"jobs.{quote_key(self.name)}.secret_env"
            if secret.file is None:
                if secret.name not in environ:
                    raise InventoryError(
                        f"the secret {secret.name} is not set in your environment",
                        file=self.inventory,
                        key=key,
                        fix=f"export {secret.name}=... before you start, or write {secret.name}=file:PATH",
                    )
                found[secret.name] = environ[secret.name]
            else:
                try:
                    found[secret.name] = Path(secret.file).read_text("utf-8").rstrip("\r\n")
                except (OSError, UnicodeDecodeError) as error:
                    raise InventoryError(
                        f"the file of the secret {secret.name} cannot be read: {error}",
                        file=self.inventory,
                        key=key,
                        fix=f"put the value of {secret.name}, as UTF-8 text, into {secret.file}",
                    ) from None
        return found


@dataclass(frozen=True)
class Inventory:
    """All of one inventory.toml; `file` is its absolute path, `playbooks` absolute folders of own kinds."""

    file: str
    hosts: Mapping[str, Host]
    jobs: Mapping[str, Job]
    default_job: str | None = None
    playbooks: tuple[str, ...] = ()

    def job(self, name: str | None = None) -> Job:
        """The job of this name; without one, `default_job`, or the only job there is.

        Raises:
            UsageError: no such job (the nearest name is offered), or several and none named.
        """
        if name is not None:
            if name in self.jobs:
                return self.jobs[name]
            raise UsageError(
                f"there is no job {name!r}{did_you_mean(name, self.jobs)}",
                self.file,
                f"name one of: {', '.join(self.jobs)}" if self.jobs else "add a [jobs.NAME] table",
            )
        if self.default_job is not None:
            return self.jobs[self.default_job]
        if len(self.jobs) == 1:
            return next(iter(self.jobs.values()))
        if not self.jobs:
            raise UsageError("the inventory has no job", self.file, "add a [jobs.NAME] table")
        raise UsageError(
            f"the inventory has {len(self.jobs)} jobs and none was named",
            self.file,
            f'name one of: {", ".join(self.jobs)}; or write default_job = "NAME" at the top of the inventory',
        )

    def host_of(self, job: Job) -> Host:
        return self.hosts[job.host]


def quote_key(key: str) -> str:
    """A key as TOML writes it: bare where that is allowed, else in quotes."""
    if key and key.isascii() and all(c.isalnum() or c in "-_" for c in key):
        return key
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
