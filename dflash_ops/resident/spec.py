"""From a JobSpec to what is really run: placeholders, environment, and the form without secrets.

The rule here: the value of a secret exists in the process environment of the trainer and nowhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_ops.contracts import JobSpec, Layout, ProgressPattern
from dflash_ops.contracts.names import session_fault, socket_fault
from dflash_ops.errors import UsageError

#: What every trainer gets unless its job says otherwise: logs at once, a traceback on a fault, NCCL's flight recorder.
DEFAULT_ENV = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}

#: Files of an attempt's folder that a job must not bring.
RESERVED = frozenset({"start.json", "exit.json", "stop.json", "job.json", "log", "metrics.jsonl", "plan.jsonl"})


@dataclass(frozen=True)
class Command:
    """What the wrapper runs."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]


def check(spec: JobSpec, root: Path) -> None:
    """Refuse what cannot work before anything is written.

    Raises:
        UsageError: names the key and the fix.
        ContractError: the progress pattern is none.
    """
    if os.path.realpath(spec.root) != os.path.realpath(root):
        raise UsageError(f"the job's root is {spec.root}, but --root is {root}", "job.json: root", "use the same")
    if not spec.argv:
        raise UsageError("the job has no command", "job.json: argv", "name a command")
    for key, value, fault in (
        ("session", spec.session, session_fault(spec.session)),
        ("socket", spec.socket, socket_fault(spec.socket)),
    ):
        if fault is not None:
            raise UsageError(
                f"{value!r} is no tmux {key} name: {fault}", f"job.json: {key}", "use letters, digits, - and _"
            )
    for name in spec.files:
        if "/" in name or name in (".", "..", "") or name in RESERVED:
            raise UsageError(f"{name!r} cannot be a file of the attempt", "job.json: files", "use a plain, free name")
    if missing := sorted(set(spec.secret_env) - set(spec.env)):
        raise UsageError(f"secret_env names {', '.join(missing)}, which env does not have", "job.json: secret_env", "")
    for name in spec.env:
        if not name or "=" in name or "\0" in name + spec.env[name]:
            raise UsageError(f"{name!r} cannot be an environment variable", "job.json: env", "rename or remove it")
    if any("\0" in part for part in spec.argv):
        raise UsageError("an argument holds a NUL byte", "job.json: argv", "remove it")
    if spec.progress:
        ProgressPattern(spec.progress)


def public(spec: JobSpec) -> JobSpec:
    """The form that may be written down: without the secrets' values."""
    return replace(spec, env={k: v for k, v in spec.env.items() if k not in set(spec.secret_env)})


def release_folder(spec: JobSpec, layout: Layout) -> Path:
    return layout.release(spec.release) if spec.release else layout.current


def checkpoints_folder(spec: JobSpec, root: Path) -> Path:
    """The job's checkpoints folder, absolute; relative ones lie under the root."""
    return root / spec.checkpoints.replace("{root}", str(root))


def devices(job: JobSpec) -> list[str]:
    """Devices of the job's workers, as far as its remedies table knows its config."""
    lists = [v for k, v in job.remedies.values.items() if k.endswith("_devices") and isinstance(v, (list, tuple))]
    return [str(device) for one in lists for device in one]


def on_gpus(job: JobSpec) -> bool:
    """Whether it has GPUs, or may have: of a trainer that is not ours nothing is known."""
    known = devices(job)
    return not known or any(device != "cpu" for device in known)


def command(spec: JobSpec, layout: Layout, attempt: int, cache: Path) -> Command:
    """Argument list, folder and whole environment of the launcher.

    The environment starts from a fixed small one, not from whoever called: pct exec leaks its caller's.

    Raises:
        UsageError: a placeholder has nothing to stand for.
    """
    folder = layout.attempt(attempt).path
    release = release_folder(spec, layout)
    places = {
        "{attempt}": str(folder),
        "{root}": str(layout.root),
        "{release}": str(release),
        "{checkpoints}": str(checkpoints_folder(spec, layout.root)),
    }
    if not release.is_dir() and any("{release}" in text for text in (*spec.argv, spec.cwd, *spec.env.values())):
        raise UsageError(
            f"{release} is not there, and the command needs {{release}}",
            str(release),
            "start it with: dflash-ops deploy",
        )
    home = os.environ.get("HOME", "/")
    env = {
        "HOME": home,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **{k: os.environ[k] for k in ("USER", "LOGNAME", "SHELL") if k in os.environ},
        **DEFAULT_ENV,
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        **{k: _fill(v, places) for k, v in spec.env.items()},
        "DFLASH_ATTEMPT": str(attempt),
    }
    return Command(tuple(_fill(a, places) for a in spec.argv), _fill(spec.cwd, places), env)


def _fill(text: str, places: Mapping[str, str]) -> str:
    """Exactly the four placeholders; any other brace (JSON, a shell's ${X}) stays as it is."""
    return re.sub("|".join(map(re.escape, places)), lambda m: places[m.group()], text)
