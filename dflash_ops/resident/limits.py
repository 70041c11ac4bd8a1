"""Limits that a machine has for its processes and its GPUs, as checks of preflight.

The rule here: a limit under which the job cannot run is `failed`, one that has bitten others is `warn`, and what cannot
be known is left out.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

from dflash_ops.resident import machine
from dflash_ops.resident.preflight import Check, Needs, Request

#: Open files: (cannot run, has bitten). Each worker holds its sockets, pipes, shared memory and libraries.
FILES = (128, 1024)
#: Processes and threads: (cannot run, has bitten). torch starts some dozen threads a process.
PROCESSES = (64, 1024)

#: Least driver (major, minor) for each major version of CUDA: NVIDIA, CUDA Compatibility, minor version compatibility.
DRIVERS: Mapping[int, tuple[int, int]] = {11: (450, 80), 12: (525, 60), 13: (580, 65)}

#: Bytes that a CUDA context and its kernels take beside the tensors.
CONTEXT = 1 << 30


def ulimits(request: Request) -> list[Check]:
    """Open files and processes that a process of this user may have."""
    found = [
        _limit("open files (ulimit -n)", resource.RLIMIT_NOFILE, FILES, "LimitNOFILE, or /etc/security/limits.conf"),
        _limit("processes (ulimit -u)", resource.RLIMIT_NPROC, PROCESSES, "/etc/security/limits.conf"),
    ]
    if (most := pids_max()) is not None and most < PROCESSES[1]:
        status = "failed" if most < PROCESSES[0] else "warn"
        found.append(Check("limits", status, f"the cgroup allows {most} processes", "raise pids.max of the container"))
    said = [c for c in found if c.status != "ok"]
    return said or [Check("limits", "ok", ", ".join(c.what for c in found))]


def _limit(name: str, which: int, bounds: tuple[int, int], where: str) -> Check:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY or soft >= bounds[1]:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        return Check("limits", "ok", f"{name}: {shown}")
    status = "failed" if soft < bounds[0] else "warn"
    return Check("limits", status, f"{name}: {soft}", f"raise it to {bounds[1]} or more there ({where})")


def pids_max(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The smallest pids.max of our cgroup and those above it, None where there is none."""
    try:
        lines = (proc / "self/cgroup").read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base = cgroup
        elif "pids" in controllers.split(","):
            base = cgroup / "pids"
        else:
            continue
        folder = base / path.strip("/")
        while folder.is_relative_to(base):
            try:
                text = (folder / "pids.max").read_text("ascii").strip()
            except OSError:
                text = ""
            found += [int(text)] if text.isdigit() else []
            folder = folder.parent
    return min(found, default=None)


def driver(request: Request, cuda: str | None) -> list[Check]:
    """The driver knows the CUDA that torch was built for. `cuda`: `12.8`, None for a build without."""
    if not any(d.startswith("cuda") for d in request.devices):
        return []
    if not cuda:
        return [
            Check("driver", "failed", "torch there was built without CUDA, and GPUs are asked for",
                  "install a CUDA build of torch there, or choose cpu devices")
        ]  # fmt: skip
    found, why = machine.driver()
    if found is None:
        return [Check("driver", "skipped", f"the driver's version is not known: {why}")]
    least = DRIVERS.get(int(cuda.partition(".")[0] or 0))
    text = f"driver {found}, torch is built for CUDA {cuda}"
    if least is not None and machine.version(found)[:2] < least:
        need = f"{least[0]}.{least[1]}"
        return [
            Check("driver", "failed", f"{text}, which needs driver {need} or newer",
                  "update the driver on the (Proxmox) host, or install a torch for an older CUDA")
        ]  # fmt: skip
    return [Check("driver", "ok", text)]


def gpu_memory(request: Request, needs: Needs) -> list[Check]:
    """Each GPU has room for its worker: its weights, and what a context takes."""
    seen, _ = machine.gpus() if any(d.startswith("cuda") for d in request.devices) else (None, "")
    if seen is None or request.spec.env.get("CUDA_VISIBLE_DEVICES") is not None:
        return []  # said by `devices`, or not known which of them is meant
    by_index = {g.index: g for g in seen}
    faults, room = [], []
    for at, device in enumerate(request.devices):
        gpu = by_index.get(int(device.partition(":")[2] or 0)) if device.startswith("cuda") else None
        role = "target" if at < request.targets else "drafter"
        need = needs.target_bytes_per_worker if role == "target" else needs.drafter_bytes_per_worker
        if gpu is None or not gpu.total or need is None:
            continue
        # What the attempt that is to be replaced holds comes back.
        have = gpu.total if request.pid is not None else gpu.total - gpu.used
        text = f"GPU {gpu.index} has {_size(have)} free, the {role} needs {_size(need + CONTEXT)} and more to work in"
        if have < need + CONTEXT:
            next = "see who uses it: nvidia-smi; or choose another GPU, or a smaller model"
            faults.append(Check("gpu memory", "failed", text, next))
        room.append(have)
    if faults or not room:
        return faults
    return [Check("gpu memory", "ok", f"{_size(min(room))} or more free on each, weights fit")]


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
