"""Another split of a job: which devices it means, what refuses it, and the job as it is started with it. Pure.

The rule here: a split moves as few devices as it can. Targets are the first of the job's devices, drafters the last,
and what neither needs lies idle between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tomllib

from dflash_ops.balance import Split
from dflash_ops.contracts import JobSpec
from dflash_ops.deploy.toml import dump_toml
from dflash_ops.errors import ContractError, UsageError
from dflash_ops.inventory import Job
from dflash_ops.inventory.devices import check_roles

#: Keys of the trainer's config that this changes, and nothing else may.
KEYS = ("workers.target_devices", "workers.drafter_devices")


@dataclass(frozen=True)
class Devices:
    """Who has which role."""

    target: tuple[str, ...]
    drafter: tuple[str, ...]

    @property
    def split(self) -> Split:
        return Split(len(self.target), len(self.drafter))

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.target, *self.drafter)


def refuse_job(job: Job) -> None:
    """Jobs whose split is not ours to change.

    Raises:
        UsageError: it is adopted, runs its own command, or runs on several machines.
    """
    if job.adopted:
        raise UsageError(
            f"job {job.name} is adopted: dflash-ops did not start it, so its devices are not its to divide",
            job.inventory,
            "stop it there, then replace `adopted` by a trainer in the inventory, and deploy",
        )
    if job.trainer is None:
        raise UsageError(
            f"job {job.name} runs its own command: how it divides its devices is not known here, so it cannot be split",
            job.inventory,
            "change its command, then dflash-ops deploy --replace --resume; only the bundled trainer "
            "([jobs.NAME.trainer]) can be rebalanced",
        )
    if job.nodes:
        raise UsageError(
            f"job {job.name} runs on {len(job.nodes)} machines: no split of several machines is predicted or applied",
            job.inventory,
            "change target_devices and drafter_devices of its nodes, then dflash-ops deploy --replace --resume",
        )


def config_of(spec: JobSpec) -> dict[str, Any]:
    """The trainer's config that an attempt ran with, its tables.

    Raises:
        UsageError: it did not run the bundled trainer. ContractError: its config cannot be read.
    """
    for name, read in (("run.toml", tomllib.loads), ("run.json", json.loads)):
        if name in spec.files:
            try:
                found = read(spec.files[name])
            except ValueError as error:
                raise ContractError(
                    f"the attempt's {name} cannot be read: {error}", spec.root, "deploy again"
                ) from None
            if isinstance(found, dict):
                return found
    raise UsageError(
        "what runs is not the bundled trainer of the inventory",
        spec.root,
        "only the bundled trainer can be rebalanced: dflash-ops deploy starts it",
    )


def config_name(spec: JobSpec) -> str:
    """The file that holds the trainer's config."""
    return "run.toml" if "run.toml" in spec.files else "run.json"


def devices_of(spec: JobSpec, config: Mapping[str, Any]) -> Devices:
    """The devices that an attempt ran on.

    Raises:
        UsageError: something took their place after its config was written.
    """
    if named := [w for w in spec.argv if w.partition("=")[0] in KEYS]:
        raise UsageError(
            f"the supervisor changed this run's devices ({', '.join(named)}): it left one out that had failed",
            spec.root,
            "look at that device (dflash-ops incidents), then deploy with the devices that are to run",
        )
    workers = config.get("workers") or {}
    target, drafter = (tuple(map(str, workers.get(f"{role}_devices") or ())) for role in ("target", "drafter"))
    return Devices(target, drafter)


def has_features(config: Mapping[str, Any]) -> bool:
    return bool((config.get("features") or {}).get("path"))


def pool(now: Devices, allowed: Sequence[str] | None) -> tuple[str, ...]:
    """The devices to be divided: the job's own, or those that are `allowed`, in the order in which they are taken.

    Raises:
        UsageError: one of them twice.
    """
    if allowed is None:
        return now.all
    twice = sorted({d for d in allowed if d != "cpu" and list(allowed).count(d) > 1})
    if twice:
        raise UsageError(f"{', '.join(twice)} is named twice", "--devices", "one process a GPU: name it once")
    left = list(allowed)

    def take(devices: Sequence[str]) -> list[str]:
        taken = []
        for device in devices:
            if device in left:
                left.remove(device)
                taken.append(device)
        return taken

    target, drafter = take(now.target), take(now.drafter)
    return (*target, *left, *drafter)


def choose(devices: Sequence[str], split: Split, *, features: bool = False) -> Devices:
    """Which devices a split means.

    Raises:
        UsageError: it has a negative number, nobody in a role, more than there are, or drafters of two kinds.
    """
    where = f"--targets {split.targets} --drafters {split.drafters}"
    for role, count in (("targets", split.targets), ("drafters", split.drafters)):
        if count < 0:
            raise UsageError(f"{count} {role}: there are no less than none", where, "give a number from 1 on")
    if split.drafters == 0:
        raise UsageError("0 drafters: nobody would train", where, "keep at least 1 drafter")
    if split.targets == 0 and not features:
        raise UsageError(
            "0 targets: nobody would fill the ring", where, "keep at least 1 target, or train from features on disk"
        )
    if split.devices > len(devices):
        wide = "cpu,cpu,cpu" if set(devices) == {"cpu"} else "0-7"
        raise UsageError(
            f"{split} is {split.devices} devices, and the job has {len(devices)}: {', '.join(devices)}",
            where,
            f"ask for {len(devices)} at most, or name the devices that it may have: --devices {wide}",
        )
    found = Devices(tuple(devices[: split.targets]), tuple(devices[len(devices) - split.drafters :]))
    if fault := check_roles(found.target, found.drafter, features=features):
        raise UsageError(fault.what, where, fault.fix)
    return found


def with_devices(
    spec: JobSpec, devices: Devices, secrets: Mapping[str, str], *, reason: str, actor: str, watch_s: float
) -> JobSpec:
    """The job of an attempt as it is started with other devices, and with all else as it was.

    Args:
        spec: of the attempt, without the values of its secrets. watch_s: for so long the supervisor lets us go first.

    Raises:
        UsageError: a secret of it is not known now. ContractError: its config cannot be read.
    """
    config = config_of(spec)
    config["workers"] = {
        **(config.get("workers") or {}),
        "target_devices": list(devices.target),
        "drafter_devices": list(devices.drafter),
    }
    forms: dict[str, Callable[[dict[str, Any]], str]] = {"run.toml": dump_toml, "run.json": _as_json}
    files = {name: forms[name](config) if name in forms else text for name, text in spec.files.items()}
    named = dict(zip(KEYS, (list(devices.target), list(devices.drafter)), strict=True))
    remedies = replace(spec.remedies, values={**spec.remedies.values, **named})
    overrides = {
        **spec.overrides,
        "target_gpus": ",".join(devices.target),
        "drafter_gpus": ",".join(devices.drafter),
    }
    again = replace(spec, files=files, remedies=remedies, overrides=overrides)
    return with_secrets(again, secrets, reason=reason, actor=actor, watch_s=watch_s)


def _as_json(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def with_secrets(spec: JobSpec, secrets: Mapping[str, str], *, reason: str, actor: str, watch_s: float) -> JobSpec:
    """The job of an attempt as a person starts it again.

    Raises:
        UsageError: a secret of it is not known now.
    """
    if missing := [name for name in spec.secret_env if name not in secrets]:
        raise UsageError(
            f"the running attempt had secrets that are not known now: {', '.join(missing)}",
            "secret_env of the job",
            "name them in the inventory, and set them in your environment",
        )
    env = {**spec.env, **{name: secrets[name] for name in spec.secret_env}}
    return replace(spec, env=env, reason=reason, actor=actor, decision="", watch_s=watch_s)
