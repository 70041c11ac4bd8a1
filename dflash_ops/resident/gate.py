"""The smoke gate: does the new release take a few real steps, beside the job that it is to replace? (docs/deploy.md)

The rules here: the running job is not touched and not starved (lower priority; GPUs only where they have room to
spare), nothing outside the scratch folder is written, and what was not tried is said.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_ops.contracts import from_dict
from dflash_ops.resident import machine, spec
from dflash_ops.resident.preflight import Request

#: Bytes that a GPU must have free for a tiny worker beside the job: a CUDA context takes 0.5 GiB, kernels the rest.
GPU_FREE = 4 << 30

#: Failed gates whose folder stays, to be looked at.
KEPT = 3

#: Lines of the gate's output that are repeated when it fails.
TAIL = 15


def main(args: list[str]) -> int:
    from dflash_ops.resident.receive import say
    from dflash_ops.resident.tmux import clean_environment

    clean_environment()
    raw = sys.stdin.buffer.readline()
    return say(lambda: gate(json.loads(raw)))


def gate(data: dict[str, Any]) -> dict[str, Any]:
    """`{request, argv, config_name, deadline_s}`: a preflight request, a foreign job's gate command (or null).

    Returns:
        `{schema, ok, what, cause, log, folder, devices, not_exercised, seconds}`; `folder` is null where it passed.

    Raises:
        UsageError: a placeholder has nothing to stand for. OSError: the scratch folder cannot be written.
    """
    request = from_dict(Request, data["request"], "gate request")
    layout = request.layout
    base = layout.run / "gate"
    base.mkdir(parents=True, exist_ok=True)
    for old in sorted(p for p in base.iterdir() if p.is_dir())[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    folder = base / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"
    folder.mkdir()
    begin = time.monotonic()
    devices: list[str] = []
    if data.get("argv"):
        argv = [_fill(str(word), folder) for word in data["argv"]]
    else:
        devices = choose_devices(request)
        argv = _smoke(request, folder, str(data.get("config_name") or "run.toml"), devices)
    job = replace(
        request.spec, argv=tuple(argv), cwd=str(folder), env={k: _fill(v, folder) for k, v in request.spec.env.items()}
    )
    command = spec.command(job, layout, 0, folder / "inductor")
    env = {**command.env, "DFLASH_GATE": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    rc = _run(command.argv, env, folder, float(data["deadline_s"]))
    passed = time.monotonic() - begin
    tail = _tail(folder / "log")
    said = _said(tail) if not data.get("argv") else {}
    ok = rc == 0
    result = {
        "schema": 1,
        "ok": ok,
        "what": _what(request, said, devices, passed, foreign=bool(data.get("argv"))),
        "cause": "" if ok else _cause(folder, rc, float(data["deadline_s"])),
        "log": [] if ok else tail[-TAIL:],
        "folder": None if ok else str(folder),
        "devices": devices,
        "not_exercised": list(said.get("not_exercised") or ()),
        "seconds": round(passed, 1),
    }
    if ok:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def choose_devices(request: Request) -> list[str]:
    """The job's own devices where all of them have room to spare, else the CPU for every process."""
    cpu = ["cpu"] * len(request.devices)
    wanted = [int(d.partition(":")[2] or 0) for d in request.devices if d.startswith("cuda")]
    if len(wanted) != len(request.devices):
        return cpu
    visible = request.spec.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [v.strip() for v in visible.split(",") if v.strip()]
        if not all(n.isdigit() for n in names) or max(wanted) >= len(names):
            return cpu
        wanted = [int(names[n]) for n in wanted]
    seen, _ = machine.gpus()
    free = {g.index: g.total - g.used for g in seen or ()}
    return list(request.devices) if all(free.get(n, 0) >= GPU_FREE for n in wanted) else cpu


def _smoke(request: Request, folder: Path, config_name: str, devices: list[str]) -> list[str]:
    config = folder / config_name
    config.write_text(request.config_json if config_name.endswith(".json") else request.config_toml, "utf-8")
    if not request.targets:
        devices.insert(0, "cpu")  # it trains from features on disk; real steps at tiny size want somebody to make them
    targets = max(1, request.targets)
    return [
        request.fill(request.interpreter),
        *("-m", "trainer", "smoke", "--out", str(folder / "smoke"), "--config", str(config)),
        *("--targets", str(targets), "--drafters", str(len(devices) - targets)),
        *("--devices", ",".join(devices)),
    ]


def _fill(text: str, folder: Path) -> str:
    return text.replace("{gate}", str(folder)).replace("{attempt}", str(folder))


def _run(argv: tuple[str, ...], env: dict[str, str], folder: Path, seconds: float) -> int | None:
    """The exit code (minus the signal's number), None: it had to be ended at its deadline. Output goes to `log`."""
    with (folder / "log").open("wb") as log:
        try:
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.nice(10) and None,
            )
        except OSError as error:
            log.write(f"{argv[0]}: {error.strerror}\n".encode())
            return 127
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)


def _tail(path: Path) -> list[str]:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        return [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return []


def _said(tail: list[str]) -> dict[str, Any]:
    """The smoke's own last line."""
    for line in reversed(tail):
        if line.startswith("{"):
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and said.get("kind") == "smoke":
                    return said
    return {}


def _what(request: Request, said: dict[str, Any], devices: list[str], passed: float, *, foreign: bool) -> str:
    if foreign:
        return f"the job's own gate command, {passed:.1f} s"
    place = "the CPU" if "cpu" in devices else "the GPUs"
    count = f"{request.targets} targets and {len(request.devices) - request.targets} drafters"
    return f"{said.get('steps') or 'no'} steps with {count} on {place}, {passed:.1f} s"


def _cause(folder: Path, rc: int | None, seconds: float) -> str:
    """The earliest error.json, else how it ended."""
    from dflash_ops.resident.growing import Errors

    first = Errors(folder / "smoke/attempt/errors").first()
    if first is not None:
        return f"{first.worker}: {first.message}"
    if rc is None:
        return f"it did not end within {seconds:.0f} s"
    if rc < 0:
        with suppress(ValueError):
            return f"ended by {signal.Signals(-rc).name}"
    return f"exit code {rc}"
