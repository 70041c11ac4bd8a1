"""One [jobs.NAME] table -> `Job`."""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_ops.contracts import Limits, ProgressPattern
from dflash_ops.errors import ContractError
from dflash_ops.inventory.devices import DEVICE_HELP, check_roles, parse_device
from dflash_ops.inventory.model import (
    REMEDIES,
    TRAINER_TABLES,
    Budgets,
    Host,
    Job,
    LocalHost,
    Policy,
    Remedy,
    SecretEnv,
    Trainer,
    did_you_mean,
)
from dflash_ops.inventory.paths import local_path, local_program
from dflash_ops.inventory.reader import Table, describe

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ALLOW = re.compile(r"[a-z0-9_.*-]+:[a-z0-9_.*-]+")

#: What tmux would read as something else than a name: separators of a target, formats, patterns, its own escapes.
_NO_SESSION = set(".:#\\*?[]{}=@$%!")


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
    return "dflash-" + "".join("_" if c in _NO_SESSION else c for c in job)


def read_job(name: str, table: Table, hosts: Mapping[str, Host], host_names: Sequence[str], file: Path) -> Job | None:
    """The job, or None where a fault (noted) leaves nothing to build it from."""
    folder = file.parent
    if (fault := name_fault(name)) is not None:
        table.fault(f"{name!r} cannot be the name of a job: {fault}", None, "use letters, digits, - and _")
    host = _host(name, table, hosts, host_names)
    root = _root(name, table, host, folder)
    interpreter = _interpreter(table, host, folder)
    checkpoints = table.text("checkpoints", "checkpoints") or "checkpoints"
    env = _env(table, "env")
    trainer, command = _what_runs(name, table)
    progress, finished_rc, remedies = _foreign(table, command is not None)
    job = Job(
        name=name,
        host=host.name if host is not None else "",
        root=root or "",
        session=_session(table, name),
        checkpoints=os.path.normpath(Path(root or "/", checkpoints)),
        interpreter=interpreter,
        socket=_socket(table),
        env=env,
        secret_env=_secret_env(table, env, folder),
        grace_s=table.number("grace_s", 60.0, most=86_400),
        history_limit=table.integer("history_limit", 50_000, least=100, most=10_000_000),
        source=local_path(table.text("source", example='source = "my_trainer"'), folder),
        limits=_limits(table),
        policy=_policy(table),
        trainer=trainer,
        command=command,
        progress=progress,
        finished_rc=finished_rc,
        remedies=remedies,
        inventory=str(file),
    )
    table.close()
    return job if host is not None and root is not None and (trainer or command) else None


# -- where it runs


def _host(name: str, table: Table, hosts: Mapping[str, Host], host_names: Sequence[str]) -> Host | None:
    said = table.text("host", example='host = "NAME"')
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
    root = table.text("root", example=f'root = ".dflash/{name}"')
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
    if whole in ("/", "//") or (isinstance(host, LocalHost) and whole == str(Path.home())):
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
    bad = sorted(_NO_SESSION & set(session))
    if bad or session.startswith(("-", "+", "~")) or session != session.strip():
        fault = f"holds {' '.join(bad)}" if bad else "begins or ends with a sign that tmux reads otherwise"
        mended = "".join("_" if c in _NO_SESSION else c for c in session.strip().lstrip("-+~"))
        table.fault(
            f"{session!r} is no name for a tmux session: it {fault}",
            "session",
            f'write session = "{mended or default_session(job)}"',
        )
    return session


def _socket(table: Table) -> str:
    socket = table.text("socket", "dflash-ops") or "dflash-ops"
    # It becomes a file in tmux's own folder, under a limit of about 100 bytes for the whole path.
    if "/" in socket or socket.startswith(("-", ".")) or len(socket.encode()) > 60:
        table.fault(
            f"{socket!r} is no name for a tmux socket", "socket", 'write a short name without slashes: "dflash-ops"'
        )
    return socket


def _env(table: Table, key: str) -> dict[str, str]:
    below = table.table(key, example=f'{key} = {{ NAME = "value" }}')
    env: dict[str, str] = {}
    for name in below.values if below is not None else ():
        assert below is not None
        below.asked[name] = None
        value = below.values[name]
        if not _ENV_NAME.fullmatch(name):
            below.fault(f"{name!r} is no name for a variable", name, "use letters, digits and _")
        elif not isinstance(value, str):
            text = str(value).lower() if isinstance(value, bool) else value
            fix = f'write {name} = "{text}"' if isinstance(value, (bool, int, float)) else f'write {name} = "..."'
            below.fault(f"the value of {name} must be a string, not {describe(value)}", name, fix)
        elif "\0" in value:
            below.fault(f"the value of {name} holds the character U+0000", name, "take it out")
        else:
            env[name] = value
    return env


def _secret_env(table: Table, env: Mapping[str, str], folder: Path) -> tuple[SecretEnv, ...]:
    example = 'secret_env = ["HF_TOKEN", "WANDB_API_KEY=file:secrets/wandb"]'
    found: list[SecretEnv] = []
    for index, said in enumerate(table.texts("secret_env", example=example) or ()):
        name, equals, source = said.partition("=")
        where = (*table.path, "secret_env", index)
        if not _ENV_NAME.fullmatch(name):
            table.faults.add(f"{name!r} is no name for a variable", where, f"write {example}")
        elif equals and not (source.startswith("file:") and len(source) > 5):
            table.faults.add(
                f"the value of the secret {name} must not stand in the inventory",
                where,
                f'write "{name}" and export it before you start, or "{name}=file:PATH"',
            )
        elif name in env:
            table.faults.add(
                f"{name} is in env and in secret_env", where, "take it out of env: a secret has no place in this file"
            )
        elif any(name == s.name for s in found):
            table.faults.add(f"the secret {name} is named twice", where, "name it once")
        else:
            file = local_path(source.removeprefix("file:"), folder) if equals else None
            found.append(SecretEnv(name, file))
    return tuple(found)


# -- what runs


def _what_runs(name: str, table: Table) -> tuple[Trainer | None, tuple[str, ...] | None]:
    command = table.texts("command", example='command = ["python3", "train.py"]')
    trainer = table.table("trainer", example=f"a table: [jobs.{name}.trainer]")
    if "command" in table and "trainer" in table:
        table.fault(
            f"job {name} has a trainer and a command",
            "command",
            "keep one: [jobs.NAME.trainer] for the bundled trainer, command for your own",
        )
    elif "command" not in table and "trainer" not in table:
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
    return (_trainer(trainer) if trainer is not None else None), command


def _trainer(table: Table) -> Trainer:
    roles = {role: _devices(table, f"{role}_devices") for role in ("target", "drafter")}
    tables: dict[str, Mapping[str, Any]] = {}
    for key in TRAINER_TABLES:
        below = table.table(key)
        if below is not None:
            tables[key] = MappingProxyType(dict(below.values))
            for role in ("target_devices", "drafter_devices"):
                if key == "workers" and role in below:
                    below.fault(f"{role} does not belong into workers", role, f"write it one table up: {role} = [...]")
    target, drafter = roles["target"], roles["drafter"]
    if target is not None and drafter is not None and (fault := check_roles(target, drafter)) is not None:
        table.fault(fault.what, f"{fault.role}_devices", fault.fix)
    table.close()
    return Trainer(target or (), drafter or (), MappingProxyType(tables))


def _devices(table: Table, key: str) -> tuple[str, ...] | None:
    """Devices of one role, or None where a fault was noted."""
    example = f'{key} = ["cuda:0", "cuda:1"]'
    said = table.items(key, example=example)
    if said is None:
        if key not in table:
            table.fault(f"{key} is missing", None, f"add {example}")
        return None
    devices: list[str] = []
    for index, item in enumerate(said):
        whole = isinstance(item, int) and not isinstance(item, bool)
        found = parse_device(str(item)) if whole or isinstance(item, str) else None
        if found is None:
            table.faults.add(f"{item!r} is no device", (*table.path, key, index), DEVICE_HELP)
            return None
        devices += found
    return tuple(devices)


def _foreign(table: Table, has_command: bool) -> tuple[str, tuple[int, ...], Mapping[str, Remedy]]:
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


def _remedies(table: Table) -> Mapping[str, Remedy]:
    below = table.table("remedies", example='remedies = { "resume.latest" = { args = ["--resume"] } }')
    found: dict[str, Remedy] = {}
    for name, values in _flat_remedies(below.values if below is not None else {}).items():
        assert below is not None
        head = name.split(".")[0]
        below.asked[head] = below.asked[name] = None
        at = name if name in below.values else head
        if name not in REMEDIES:
            near = did_you_mean(name, list(REMEDIES))
            below.fault(f"unknown remedy {name!r}{near}", at, f"use one of: {', '.join(REMEDIES)}")
            continue
        if not isinstance(values, dict) or not values:
            below.fault(f"remedy {name} says nothing", at, "write { set = {...} }, { env = {...} } or { args = [...] }")
            continue
        path = (*below.path, name) if name in below.values else (*below.path, *name.split("."))
        one = Table(table.faults, path, values)
        settings = one.table("set", example='set = { "loss.mode" = "eager" }')
        found[name] = Remedy(
            set=dict(settings.values) if settings is not None else {},
            env=_env(one, "env"),
            args=one.texts("args", example='args = ["--resume"]') or (),
        )
        one.close()
    return MappingProxyType(found)


def _flat_remedies(values: Mapping[str, Any]) -> dict[str, Any]:
    """`loss.mode = {...}` (a table in a table) means the same as `"loss.mode" = {...}`."""
    flat: dict[str, Any] = {}
    words = {"set", "env", "args"}
    for name, value in values.items():
        if name not in REMEDIES and isinstance(value, dict) and value and not words & set(value):
            flat.update({f"{name}.{below}": inner for below, inner in value.items()})
        else:
            flat[name] = value
    return flat


# -- limits and policy


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


def _policy(table: Table) -> Policy:
    below = table.table("policy")
    if below is None:
        return Policy()
    mode = below.text("mode", "observe") or "observe"
    if mode not in ("observe", "act"):
        below.fault(
            f"unknown mode {mode!r}{did_you_mean(mode, ('observe', 'act'))}", "mode", 'write "observe" or "act"'
        )
    allow = below.texts("allow", example='allow = ["kind:action"]') or ()
    for index, word in enumerate(allow):
        if not _ALLOW.fullmatch(word):
            below.faults.add(
                f"{word!r} is no kind:action",
                (*below.path, "allow", index),
                'write "kind:action", for example "oom:retune"',
            )
    budgets = Budgets()
    if (costs := below.table("budgets")) is not None:
        budgets = Budgets(
            attempts_per_hour=costs.integer("attempts_per_hour", 5, least=0, most=60),
            backoff_s=costs.number("backoff_s", 5.0, most=3600),
            backoff_cap_s=costs.number("backoff_cap_s", 600.0, most=86_400),
        )
        if budgets.backoff_cap_s < budgets.backoff_s:
            costs.fault("backoff_cap_s is below backoff_s", "backoff_cap_s", f"write {budgets.backoff_s:g} or more")
        costs.close()
    below.close()
    return Policy(mode, allow, budgets)
