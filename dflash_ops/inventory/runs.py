"""What a job runs: the bundled trainer on its devices, or a command of its own with progress and remedies."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_ops.contracts import ProgressPattern, Way, forbidden
from dflash_ops.errors import ContractError, did_you_mean
from dflash_ops.inventory.devices import DEVICE_HELP, parse_device, role_faults
from dflash_ops.inventory.env import read_env
from dflash_ops.inventory.lines import Path as KeyPath
from dflash_ops.inventory.model import REMEDIES, TRAINER_TABLES, Trainer, Venv
from dflash_ops.inventory.paths import local_path
from dflash_ops.inventory.reader import Table

#: Devices as a fault shows them.
DEVICES_EXAMPLE = '["cuda:0", "cuda:1"]'


def read_what_runs(
    name: str, table: Table, *, adopted: bool = False, nodes: bool = False
) -> tuple[Trainer | None, tuple[str, ...] | None]:
    """The trainer or the command. With `nodes` the devices may be missing: each node may have its own."""
    command = table.texts("command", example='command = ["python3", "train.py"]')
    trainer = table.table("trainer", example=f"a table: [jobs.{name}.trainer]")
    if "command" in table and "trainer" in table:
        table.fault(
            f"job {name} has a trainer and a command",
            "command",
            "keep one: [jobs.NAME.trainer] for the bundled trainer, command for your own",
        )
    elif adopted and ("command" in table or "trainer" in table):
        table.fault(
            f"job {name} is adopted: what runs in it was not started by dflash-ops",
            "adopted",
            "remove adopted, or remove its trainer or command",
        )
    elif not adopted and "command" not in table and "trainer" not in table:
        table.fault(
            f"job {name} has nothing to run",
            None,
            f"add [jobs.{name}.trainer] for the bundled trainer, or command = [...] for your own",
        )
    if command is not None:
        if not command:
            if not table.values["command"]:
                table.fault("command is empty", "command", 'write command = ["python3", "train.py"]')
            command = None
        elif not command[0].strip():
            table.fault("command begins with an empty word", "command", "let the first word be the program")
        elif len(command) == 1 and len(shlex.split(command[0].replace("'", " "))) > 1 and "/" not in command[0]:
            words = ", ".join(f'"{w}"' for w in command[0].split())
            table.fault("command is one word with blanks in it; no shell will split it", "command", f"write [{words}]")
        else:
            for index, word in enumerate(command):
                if "\0" in word:
                    table.faults.add(
                        "command holds the character U+0000", (*table.path, "command", index), "take it out"
                    )
    return (_trainer(trainer, nodes=nodes) if trainer is not None else None), command


def _trainer(table: Table, *, nodes: bool) -> Trainer:
    roles = {role: read_devices(table, f"{role}_devices", needed=not nodes) for role in ("target", "drafter")}
    tables: dict[str, Mapping[str, Any]] = {}
    for key in TRAINER_TABLES:
        below = table.table(key)
        if below is not None:
            tables[key] = MappingProxyType(dict(below.values))
            _no_dates(below, below.path, below.values)
            for role in ("target_devices", "drafter_devices"):
                if key == "workers" and role in below:
                    below.fault(f"{role} does not belong into workers", role, f"write it one table up: {role} = [...]")
    target, drafter = roles["target"], roles["drafter"]
    known = target is not None and drafter is not None and not nodes
    trainer = Trainer(target or (), drafter or (), MappingProxyType(tables))
    for fault in role_faults(target or (), drafter or (), features=trainer.from_features) if known else ():
        table.fault(fault.what, f"{fault.role}_devices", fault.fix)
    table.close()
    return trainer


def _no_dates(table: Table, path: KeyPath, value: Any) -> None:
    """run.json has no form for a date, and no key of the trainer is one."""
    if isinstance(value, (datetime.date, datetime.time)):
        table.faults.add(f"{value} is a date; the trainer knows none", path, f'put it in quotes: "{value}"')
    elif isinstance(value, (dict, list)):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            _no_dates(table, (*path, key), below)


def read_devices(table: Table, key: str, *, needed: bool = True) -> tuple[str, ...] | None:
    """Devices of one role, or None where a fault was noted (or they are missing and not `needed`)."""
    example = f"{key} = {DEVICES_EXAMPLE}"
    said = table.items(key, example=example)
    if said is None:
        if key not in table and needed:
            table.fault(f"{key} is missing", None, f"add {example}")
        return None
    devices: list[str] = []
    whole_list = True
    for index, item in enumerate(said):
        whole = isinstance(item, int) and not isinstance(item, bool)
        found = parse_device(str(item)) if whole or isinstance(item, str) else None
        if found is None:
            table.faults.add(f"{item!r} is no device", (*table.path, key, index), DEVICE_HELP)
            whole_list = False
        devices += found or ()
    return tuple(devices) if whole_list else None


def read_foreign(table: Table, has_command: bool) -> tuple[str, tuple[int, ...], Mapping[str, Way]]:
    """progress, finished_rc and remedies: of a job's own command only."""
    progress = table.text("progress", example="progress = 'step (?P<step>\\d+)/(?P<total>\\d+)'") or ""
    if progress:
        try:
            ProgressPattern(progress)
        except ContractError as error:
            fix = error.next or "correct the expression; single quotes keep its backslashes as they are"
            table.fault(error.what, "progress", fix)
    codes = table.items("finished_rc", example="finished_rc = [0]")
    finished: tuple[int, ...] = (0,)
    if codes is not None:
        good = [c for c in codes if isinstance(c, int) and not isinstance(c, bool) and 0 <= c <= 255]
        if len(good) != len(codes) or not good:
            table.fault("finished_rc must be a list of exit codes from 0 to 255", "finished_rc", "write [0]")
        else:
            finished = tuple(good)
    remedies = _remedies(table)
    if not has_command and "trainer" in table:
        for key in ("progress", "finished_rc", "remedies"):
            if key in table:
                table.fault(f"{key} belongs to a job with its own command", key, "remove it: the trainer has its own")
    return progress, finished, remedies


def read_venv(table: Table, folder: Path) -> Venv | None:
    """`venv = { lock = ..., python = ... }`."""
    below = table.table("venv", example='venv = { lock = "requirements.lock" }')
    if below is None:
        return None
    lock = below.text("lock", example='lock = "requirements.lock"', needed=True)
    python = below.text("python", "python3") or "python3"
    if lock is None and "lock" not in below:
        below.fault("venv has no lock", None, 'add lock = "requirements.lock", a file on this machine')
    if "/" in python and not python.startswith("/"):
        below.fault(f"python is a relative path: {python!r}", "python", "write the whole path, or a name found in PATH")
    if "interpreter" in table:
        table.fault("a job has a venv or an interpreter, not both", "venv", "keep one of them")
    below.close()
    return Venv(local_path(lock, folder) or "", python) if lock is not None else None


def read_gate(table: Table) -> tuple[str, ...] | None:
    """`gate = [...]`: of a job's own command only; the bundled trainer has its own."""
    gate = table.texts("gate", example='gate = ["python3", "{release}/smoke.py"]')
    if gate is None:
        return None
    if "trainer" in table:
        table.fault("gate belongs to a job with its own command", "gate", "remove it: the trainer has its own")
    if not gate or not gate[0].strip() or any("\0" in word for word in gate):
        table.fault("gate is no command", "gate", 'write gate = ["python3", "{release}/smoke.py"]')
        return None
    return gate


def _remedies(table: Table) -> Mapping[str, Way]:
    below = table.table("remedies", example='remedies = { restart = { args = ["--resume"] } }')
    found: dict[str, Way] = {}
    for name in below.values if below is not None else ():
        assert below is not None
        below.asked[name] = None
        if name not in REMEDIES:
            near = did_you_mean(name, list(REMEDIES))
            below.fault(f"unknown remedy {name!r}{near}", name, f"use one of: {', '.join(REMEDIES)}")
            continue
        one = below.table(name, example=f'{name} = {{ args = ["--resume"] }}')
        if one is None:
            continue
        if not one.values:
            below.fault(f"remedy {name} says nothing", name, "write one of set, env and args, as { args = [...] }")
            continue
        settings = one.table("set", example='set = { "loss.mode" = "eager" }')
        found[name] = Way(
            set=dict(settings.values) if settings is not None else {},
            env=dict(read_env(one, "env")),
            args=one.texts("args", example='args = ["--resume"]') or (),
        )
        one.close()
        _no_forbidden(below, name, found[name])
    return MappingProxyType(found)


def _no_forbidden(table: Table, name: str, way: Way) -> None:
    """Nothing that no supervisor may do (contracts.FORBIDDEN) hides in a remedy."""
    words = [*way.args, *(f"{k}={v}" for k, v in {**way.env, **way.set}.items())]
    for word in words:
        if (bad := forbidden(word)) is not None:
            table.fault(f"remedy {name} would have {bad!r} run, which is never done by itself", name, "do that by hand")
