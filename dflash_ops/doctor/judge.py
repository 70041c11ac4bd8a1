"""Pure: facts of a machine (probe.py) and a job -> checks with their next step."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from dflash_ops.doctor.report import Check, fail, ok, skip, warn
from dflash_ops.inventory import Job
from dflash_ops.resident.machine import in_range, version
from dflash_ops.view.text import size

Facts = Mapping[str, Any]

#: Below the first, nothing can be deployed (logs, journal and the release take some); below the second, say so.
LEAST_DISK = 64 << 20
LOW_DISK = 2 << 30
LEAST_INODES = 1000

#: The ring of the smallest run takes less; of a real one, more (preflight of `deploy` has the true number).
LOW_SHM = 64 << 20


def machine(facts: Facts, job: Job) -> tuple[Check, ...]:
    """The host: python, tmux, disk, shared memory, GPUs."""
    return (*_python(facts), *_tmux(facts), *_shm(facts, job), *_gpus(facts, job))


def job(facts: Facts, job: Job, requires: Mapping[str, str]) -> tuple[Check, ...]:
    """The job on its host: interpreter, imports, root, session, resident."""
    return (*_interpreter(facts, job, requires), *_root(facts, job), *_session(facts, job), *_resident(facts))


def _python(facts: Facts) -> list[Check]:
    have = ".".join(map(str, facts["python"]))
    text = f"Python {have} ({facts['executable']}) on {facts['machine']}"
    if tuple(facts["python"]) < (3, 10):
        return [
            fail(
                "python",
                f"{text}: the resident needs 3.10 or newer",
                "install a newer one and name it as the host's `python`",
            )
        ]
    return [ok("python", text)]


def _tmux(facts: Facts) -> list[Check]:
    said = facts["tmux"]
    install = "install tmux 3.0 or newer there: apt-get install tmux"
    if said is None:
        return [fail("tmux", "tmux is not installed", install)]
    if said["rc"] != 0 or not said["version"]:
        return [fail("tmux", f"tmux does not run: {said['err'].strip() or 'no answer'}", install)]
    number = said["version"].rpartition(" ")[2].removeprefix("next-")
    if version(number) < (3,):
        return [fail("tmux", f"{said['version']} is too old", install)]
    return [ok("tmux", said["version"])]


def _shm(facts: Facts, job: Job) -> list[Check]:
    if job.trainer is None:
        return []
    room = facts["shm"]
    if room is None or "free" not in room:
        return [fail("shm", "there is no /dev/shm, where the ring lies", "mount a tmpfs at /dev/shm (or set ring.dir)")]
    text = f"/dev/shm has {size(room['free'])} free of {size(room['total'])}"
    if room["free"] < LOW_SHM:
        return [warn("shm", text, "make it larger (a tmpfs with size=...), or set ring.slots lower")]
    return [ok("shm", text)]


def _gpus(facts: Facts, job: Job) -> list[Check]:
    found, why = facts["gpus"]["list"], facts["gpus"]["why"]
    devices = (*job.trainer.target_devices, *job.trainer.drafter_devices) if job.trainer is not None else ()
    wanted = sorted({int(d.partition(":")[2]) for d in devices if d.startswith("cuda:")})
    if not wanted:
        if found is None:
            return [ok("gpus", f"none is needed ({why})" if devices else f"none is seen ({why})")]
        return [ok("gpus", f"{_kinds(found)}; the job uses the CPU" if devices else _kinds(found))]
    if found is None:
        return [
            fail("gpus", f"GPUs {_list(wanted)} are asked for, but {why}", "make the driver visible there, or use cpu")
        ]
    visible = job.env.get("CUDA_VISIBLE_DEVICES")
    count = len([v for v in visible.split(",") if v.strip()]) if visible is not None else len(found)
    if missing := [n for n in wanted if n >= count]:
        bound = ", as CUDA_VISIBLE_DEVICES in the job's env says" if visible is not None else ""
        return [
            fail(
                "gpus",
                f"GPUs {_list(missing)} are asked for, but {count} are there{bound}",
                "correct target_devices and drafter_devices of the job",
            )
        ]
    checks = [ok("gpus", f"{_list(wanted)} of {_kinds(found)}")]
    used = [g for g in found if g["index"] in wanted and g["total"] and (g["used"] or 0) > g["total"] // 20]
    if used and visible is None and not facts["wrappers"]:
        text = ", ".join(f"GPU {g['index']} has {size(g['used'])} of {size(g['total'])} in use" for g in used)
        checks.append(warn("gpus", text, "see by whom: nvidia-smi"))
    return checks


def _kinds(found: list[dict[str, Any]]) -> str:
    """`8 x NVIDIA H200`, or `no GPU`."""
    names = [g["name"] for g in found]
    return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or "no GPU"


def _interpreter(facts: Facts, job: Job, requires: Mapping[str, str]) -> list[Check]:
    said = facts["interpreter"]
    if job.command is not None:
        program = job.command[0]
        if "{" in program:
            return [skip("command", f"{program} is known at deploy only")]
        if said["path"] is None:
            return [fail("command", f"{program} {said['why']}", f"correct `command` of job {job.name}")]
        return [ok("command", said["path"])]
    correct = f"correct `interpreter` of job {job.name}: a Python that has the trainer's packages"
    if said["path"] is None:
        return [fail("interpreter", f"{job.interpreter} {said['why']}", correct)]
    path, answer = said["path"], said["answer"]
    if answer is None:
        why = said["err"].strip().splitlines()[-1:] or ["no answer"]
        return [fail("interpreter", f"{path} does not run as a Python: {why[0]}", correct)]
    text = f"Python {'.'.join(map(str, answer['python']))} ({path})"
    if tuple(answer["python"]) < (3, 10):
        return [fail("interpreter", f"{text}: the trainer needs 3.10 or newer", correct)]
    return [ok("interpreter", text), *_imports(path, answer, requires), *_cuda(answer, job)]


def _imports(path: str, answer: Mapping[str, Any], requires: Mapping[str, str]) -> list[Check]:
    pip = f"{shlex.quote(path)} -m pip install"
    checks: list[Check] = []
    good: list[str] = []
    missing: list[str] = []
    for name, wanted in requires.items():
        one = answer["found"][name]
        if one["error"] is None and in_range(one["version"], wanted):
            good.append(f"{name} {one['version']}")
        elif one["error"] is None:
            checks.append(fail("imports", f"{name} {one['version']} is outside {wanted}", f"{pip} '{name}{wanted}'"))
        elif one["error"].startswith("ModuleNotFoundError") and f"'{name}'" in one["error"]:
            missing.append(name)
        else:
            checks.append(
                fail(
                    "imports",
                    f"{name} does not import: {one['error'][:200]}",
                    f"{pip} --force-reinstall '{name}{wanted}'",
                )
            )
    if missing:
        words = " ".join(f"'{name}{requires[name]}'" for name in missing)
        checks.insert(0, fail("imports", f"not installed there: {', '.join(missing)}", f"{pip} {words}"))
    if good:
        checks.append(ok("imports", ", ".join(good)))
    return checks


def _cuda(answer: Mapping[str, Any], job: Job) -> list[Check]:
    """torch itself sees the GPUs that the job is to use: nvidia-smi alone does not tell."""
    devices = (*job.trainer.target_devices, *job.trainer.drafter_devices) if job.trainer is not None else ()
    cuda = answer["cuda"]
    if cuda is None or not any(d.startswith("cuda:") for d in devices):
        return []
    if cuda["build"] is None:
        return [fail("torch", "this torch is a build without CUDA", "install a torch with CUDA into that interpreter")]
    if cuda["count"] == 0:
        return [
            fail(
                "torch",
                f"torch (CUDA {cuda['build']}) sees no GPU",
                "see why: python -c 'import torch; torch.cuda.init()' there; the driver may be too old for it",
            )
        ]
    return [ok("torch", f"CUDA {cuda['build']}, {cuda['count']} GPUs")]


def _root(facts: Facts, job: Job) -> list[Check]:
    said, room = facts["root"], facts["root"]["room"]
    base = said["base"]
    if not said["folder"]:
        return [
            fail("root", f"{base} is a file, no folder", f"correct `root` of job {job.name}, or move the file away")
        ]
    if said["error"] is not None:
        if said["read_only"]:
            why = f"{base} cannot be written: the file system is mounted read-only"
            return [fail("root", why, f"mount it writable, or choose another `root` for job {job.name}")]
        why = f"{base} cannot be written: {said['error']}"
        return [fail("root", why, f"give the user there the right to write it, or correct `root` of job {job.name}")]
    text = job.root if said["exists"] else f"{job.root} (not there yet; deploy makes it)"
    if "free" not in room:
        return [ok("root", text), skip("disk", f"free space is not known: {room['error']}")]
    checks = [ok("root", text)]
    free = f"{size(room['free'])} free at {base}"
    if room["free"] < LEAST_DISK or (room["inodes"] is not None and room["inodes"] < LEAST_INODES):
        few = f", {room['inodes']} inodes" if room["inodes"] is not None and room["inodes"] < LEAST_INODES else ""
        return [*checks, fail("disk", f"only {free}{few}", "make room there, or choose another `root`")]
    if room["free"] < LOW_DISK:
        return [*checks, warn("disk", f"only {free}", "two checkpoints must fit; make room, or choose another `root`")]
    return [*checks, ok("disk", free)]


def _session(facts: Facts, job: Job) -> list[Check]:
    tmux = facts["tmux"]
    if tmux is None:
        return []
    attach = f"tmux -L {shlex.quote(job.socket)} attach -t {shlex.quote('=' + job.session)}"
    if tmux["session"] is None:
        return [
            fail(
                "session",
                f"the tmux server on socket {job.socket} does not answer",
                f"look at it: tmux -L {shlex.quote(job.socket)} ls",
            )
        ]
    if tmux["session"] != 0:
        return [ok("session", f"the name {job.session} is free on tmux socket {job.socket}")]
    if set(tmux["pids"]) & set(facts["wrappers"]):
        return [ok("session", f"{job.session} is up, the job's own; to look: {attach}")]
    if facts["resident"]["there"]:
        return [ok("session", f"{job.session} is up, nothing runs in it; to look: {attach}")]
    return [
        fail(
            "session",
            f"the tmux session {job.session} on socket {job.socket} is somebody else's",
            f"look at it: {attach}; end it there, or give the job another `session`",
        )
    ]


def _resident(facts: Facts) -> list[Check]:
    said = facts["resident"]
    if said["error"] is not None:
        return [
            fail("resident", f"run/resident.json is damaged: {said['error']}", "dflash-ops status shows what is known")
        ]
    if said["alive"]:
        return [ok("resident", f"runs, pid {said['pid']}")]
    if facts["wrappers"]:
        return [warn("resident", "the job runs, its resident does not", "start it again: dflash-ops status")]
    return [ok("resident", "not running; deploy starts it")]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
