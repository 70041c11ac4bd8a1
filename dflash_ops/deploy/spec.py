"""From a job to what is sent: the release, the trainer's config, and job.json for the resident. No transport here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_ops import __version__
from dflash_ops.bundle import bundled
from dflash_ops.contracts import JobSpec
from dflash_ops.deploy.release import Built, build
from dflash_ops.deploy.toml import dump_toml
from dflash_ops.inventory import Job
from dflash_ops.inventory.remedies import remedy_table

#: Modules that the bundled trainer imports and the versions it knows (the extra `trainer` of pyproject.toml).
REQUIRES: Mapping[str, str] = {
    "torch": ">=2.11,<2.15",
    "transformers": ">=4.57",
    "safetensors": ">=0.6",
    "tokenizers": ">=0.22",
    "jinja2": ">=3.1.6",
    "numpy": ">=2.0",
}


@dataclass(frozen=True)
class Config:
    """The trainer's config in both forms; Python 3.10 has no tomllib."""

    toml: str
    json: str

    def text(self, name: str) -> str:
        return self.json if name.endswith(".json") else self.toml


def build_release(job: Job) -> Built | None:
    """The code that the job runs: its `source`, or the bundled trainer; None for a command without a source.

    Raises:
        ReleaseError: as `release.build`.
    """
    if job.source is not None:
        return build(Path(job.source), version=__version__, ignores=True)
    if job.trainer is not None:
        return build(bundled("trainer"), prefix="trainer", source="the bundled trainer", version=__version__)
    return None


def run_config(job: Job) -> Config | None:
    """run.toml of the bundled trainer: its tables as the inventory and `--set` have them, and the devices.

    Raises:
        UsageError: a value that neither form can say.
    """
    if job.trainer is None:
        return None
    tables: dict[str, Any] = {"schema": 1, **{k: dict(v) for k, v in job.trainer.tables.items()}}
    workers = tables.setdefault("workers", {})
    workers["target_devices"] = list(job.trainer.target_devices)
    workers["drafter_devices"] = list(job.trainer.drafter_devices)
    return Config(dump_toml(tables), json.dumps(tables, indent=2, ensure_ascii=False) + "\n")


def job_argv(job: Job, config_name: str) -> tuple[str, ...]:
    """The launcher's command, with placeholders for the resident to fill.

    `--resume auto` always: where checkpoints are to be left behind, deploy has set them aside before the start, and a
    later restart of the same job must go on from what it saved.
    """
    if job.command is not None:
        return tuple(_node_words(job, word) for word in job.command)
    run = ("-m", "trainer", "run", "--config", f"{{attempt}}/{config_name}", "--out", "{attempt}")
    return (job.interpreter, *run, "--checkpoints", "{checkpoints}", "--resume", "auto", *_node_arguments(job))


def _node_arguments(job: Job) -> tuple[str, ...]:
    """What the bundled trainer is told of its place among several nodes; a single one needs nothing."""
    node = job.node
    if node is None or node.count == 1:
        return ()
    return ("--nnodes", str(node.count), "--node-rank", str(node.rank), "--rdzv-endpoint", node.rendezvous)


def _node_words(job: Job, text: str) -> str:
    """`{nnodes}`, `{node_rank}` and `{rendezvous}` filled in; in a job without nodes they are no placeholders."""
    if job.node is None:
        return text
    places = {"{nnodes}": job.node.count, "{node_rank}": job.node.rank, "{rendezvous}": job.node.rendezvous}
    return re.sub("|".join(map(re.escape, places)), lambda m: str(places[m.group()]), text)


def job_env(job: Job, release: str | None, secrets: Mapping[str, str]) -> dict[str, str]:
    """The job's environment: its own, its secrets, its place among several nodes; the release's code comes first."""
    env = {**{k: _node_words(job, v) for k, v in job.env.items()}, **secrets}
    if job.node is not None:
        env["DFLASH_NNODES"] = str(job.node.count)
        env["DFLASH_NODE_RANK"] = str(job.node.rank)
        env["DFLASH_RDZV_ENDPOINT"] = job.node.rendezvous
    if release is not None:
        own = env.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{{release}}:{own}" if own else "{release}"
    return env


def alone(spec: JobSpec) -> JobSpec:
    """The same job as one on a single machine: how a node tries a release by itself."""
    if spec.nnodes == 1:
        return spec
    env = {**spec.env, "DFLASH_NNODES": "1", "DFLASH_NODE_RANK": "0"}
    return replace(spec, env=env, nnodes=1, node_rank=0, rendezvous="")


def job_spec(
    job: Job,
    release: str | None,
    config: Config | None,
    config_name: str,
    secrets: Mapping[str, str],
    *,
    reason: str,
    actor: str,
    watch_s: float = 0.0,
    playbooks: str = "",
) -> JobSpec:
    """What `resident start` gets. `watch_s`: for so long the deploy watches it. `playbooks`: own kinds, as JSON."""
    files = {config_name: config.text(config_name)} if config is not None else {}
    if playbooks:
        files["playbooks.json"] = playbooks
    return JobSpec(
        job=job.name,
        root=job.root,
        session=job.session,
        argv=job_argv(job, config_name),
        checkpoints=job.checkpoints,
        socket=job.socket,
        env=job_env(job, release, secrets),
        secret_env=tuple(secrets),
        files=files,
        release=release,
        progress=job.progress,
        finished_rc=job.finished_rc,
        grace_s=job.grace_s,
        history_limit=job.history_limit,
        overrides=dict(job.overrides),
        reason=reason,
        actor=actor,
        limits=job.limits,
        policy=job.policy,
        remedies=remedy_table(job),
        watch_s=watch_s,
        nnodes=job.node.count if job.node is not None else 1,
        node_rank=job.node.rank if job.node is not None else 0,
        rendezvous=job.node.rendezvous if job.node is not None else "",
    )
