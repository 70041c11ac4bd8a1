"""`env` and `secret_env` of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dflash_ops.inventory.model import SecretEnv
from dflash_ops.inventory.paths import local_path
from dflash_ops.inventory.reader import Table, describe

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def read_env(table: Table, key: str) -> dict[str, str]:
    below = table.table(key, example=f'{key} = {{ NAME = "value" }}')
    env: dict[str, str] = {}
    for name in below.values if below is not None else ():
        assert below is not None
        below.asked[name] = None
        value = below.values[name]
        if not ENV_NAME.fullmatch(name):
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


def read_secrets(table: Table, env: Mapping[str, str], folder: Path) -> tuple[SecretEnv, ...]:
    example = 'secret_env = ["HF_TOKEN", "WANDB_API_KEY=file:secrets/wandb"]'
    found: list[SecretEnv] = []
    for index, said in enumerate(table.texts("secret_env", example=example) or ()):
        name, equals, source = said.partition("=")
        where = (*table.path, "secret_env", index)
        if not ENV_NAME.fullmatch(name):
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
