"""The single checks of preflight: each takes the request and gives one or more `Check`s with their next step."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

from dflash_ops.errors import ContractError, StartError, UsageError
from dflash_ops.resident import machine, spec
from dflash_ops.resident.preflight import Check, Needs, Request
from dflash_ops.resident.receive import explain
from dflash_ops.resident.tmux import Tmux, TmuxSilent

#: Room beyond what is asked for: logs, journal, metrics.
SPARE_BYTES = 64 << 20
SPARE_INODES = 1000

#: Seconds for one import of torch from a cold disk, and for the trainer's check of its data and checkpoint.
IMPORT_S = 180.0
TRAINER_S = 300.0

#: The trainer's exit code for a checkpoint that cannot be restored whole (docs/contracts.md).
_DAMAGED = 5

_IMPORTS = """\
import importlib, json, sys
found, cuda = {}, None
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        found[name] = [str(getattr(module, "__version__", "")), ""]
        cuda = getattr(getattr(module, "version", None), "cuda", None) if name == "torch" else cuda
    except BaseException as error:
        found[name] = ["", "%s: %s" % (type(error).__name__, error)]
said = {"python": list(sys.version_info[:3]), "executable": sys.executable, "found": found, "cuda": cuda}
print("\\n" + json.dumps(said))
"""


def _ok(name: str, what: str) -> Check:
    return Check(name, "ok", what)


def _warn(name: str, what: str, next: str) -> Check:
    return Check(name, "warn", what, next)


def _failed(name: str, what: str, next: str) -> Check:
    return Check(name, "failed", what, next)


def _skipped(name: str, what: str) -> Check:
    return Check(name, "skipped", what)


def job(request: Request) -> list[Check]:
    """What `start` would refuse in the job itself: said here, while a job that runs still does."""
    try:
        spec.check(request.spec, Path(request.spec.root))
    except (UsageError, ContractError) as error:
        return [_failed("job", f"{error.where}: {error.what}", error.next or "correct the job in the inventory")]
    return []


def root(request: Request) -> list[Check]:
    """The job's root can be made and written."""
    path = Path(request.spec.root)
    try:
        if request.touch:
            request.layout.run.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=request.layout.run, prefix=".preflight-") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
        else:
            base = machine.nearest_folder(path)
            if not base.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(base))
            if os.statvfs(base).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(base))
            if not os.access(base, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(base))
    except OSError as error:
        said = explain(error)
        return [_failed("root", f"{said.what}: {said.where or path}", said.next)]
    return [_ok("root", f"{path} can be written")]


def session(request: Request) -> list[Check]:
    """tmux is there, and no session of somebody else has the name."""
    program = shutil.which("tmux")
    if program is None:
        return [_failed("tmux", "tmux is not installed there", "install it: apt-get install tmux")]
    said = machine.ask([program, "-V"], seconds=10)
    number = said.out.strip().rpartition(" ")[2]
    if said.rc != 0 or machine.version(number.lstrip("next-")) < (3,):
        text = f"tmux is too old or does not run: {said.out.strip() or said.err.strip()}"
        return [_failed("tmux", text, "install tmux 3.0 or newer")]
    found = [_ok("tmux", f"tmux {number}")]
    name, socket = request.spec.session, request.spec.socket
    try:
        panes = Tmux(socket).panes(name)
    except (TmuxSilent, StartError) as error:
        return [*found, _failed("session", f"tmux does not answer: {error}", f"look at it: tmux -L {socket} ls")]
    if panes is None:
        return [*found, _ok("session", f"the session name {name} is free")]
    root = os.path.realpath(request.spec.root)
    if any(p.owner and os.path.realpath(p.owner) == root for p in panes):
        return [*found, _ok("session", f"session {name} is this job's own")]
    text = f"the tmux session {name!r} on socket {socket} is taken by something else"
    look = f"tmux -L {socket} attach -t '={name}'"
    next = f"look at it: {look}; end it there, or give the job another `session` in the inventory"
    return [*found, _failed("session", text, next)]


def interpreter(request: Request) -> tuple[list[Check], tuple[int, ...] | None]:
    """The program is there and runs; for the bundled trainer its modules import, in the versions it knows.

    The second value is the interpreter's version, None where there is none or it is not asked.
    """
    env = request.environment()
    said_name = request.interpreter if request.bundled else request.spec.argv[0]
    if "{release}" in said_name and not request.release_there:
        return [_skipped("interpreter", f"{said_name} comes with the release")], None
    if request.venv_pending:
        return [_skipped("interpreter", "checked once the environment is made")], None
    program = request.fill(said_name)
    path = shutil.which(program, path=env.get("PATH"))
    key = "`interpreter`" if request.bundled else "`command`"
    if path is None:
        there = "is not executable" if Path(program).exists() else "is not there"
        return [_failed("interpreter", f"{program} {there}", f"correct {key} of the job in the inventory")], None
    if not request.bundled:
        return [_ok("interpreter", path)], None
    said = machine.ask([path, "-c", _IMPORTS, *request.requires], seconds=IMPORT_S, env=env)
    answer = _json_line(said.out)
    if answer is None:
        why = "no answer in time" if said.rc is None and said.error is None else said.err.strip()[-300:]
        return [_failed("interpreter", f"{path} does not run as a Python: {why}", f"correct {key} of the job")], None
    python = tuple(answer["python"])
    text = f"{path}: Python {'.'.join(map(str, python))}"
    if python < (3, 10):
        return [_failed("interpreter", f"{text}, the trainer needs 3.10 or newer", f"correct {key} of the job")], None
    from dflash_ops.resident.limits import driver

    imported = _imports(request, path, answer["found"])
    fine = all(c.status == "ok" for c in imported) and "torch" in request.requires
    return [_ok("interpreter", text), *imported, *(driver(request, answer.get("cuda")) if fine else [])], python


def _imports(request: Request, path: str, answer: dict[str, list[str]]) -> list[Check]:
    faults, seen = [], []
    for name, wanted in request.requires.items():
        have, error = answer[name]
        install = f"install it there: {path} -m pip install '{name}{wanted}'"
        if error:
            faults.append(_failed("imports", f"{name} cannot be imported: {error}", install))
        elif not machine.in_range(have, wanted):
            faults.append(_failed("imports", f"{name} {have} is outside {wanted}", install))
        else:
            seen.append(f"{name} {have}")
    return faults or [_ok("imports", ", ".join(seen))]


def trainer(request: Request, config_name: str) -> tuple[list[Check], Needs]:
    """The trainer's own check of its config, data and (on resume) checkpoint."""
    if not request.release_there:
        return [_skipped("config", "checked once the release is there")], Needs()
    with tempfile.TemporaryDirectory(prefix="dflash-preflight-") as folder:
        config = Path(folder) / config_name
        config.write_text(request.config_json if config_name.endswith(".json") else request.config_toml, "utf-8")
        argv = [request.fill(request.interpreter), "-m", "trainer", "check", "--config", str(config)]
        # with `fresh` there will be none by then: they are set aside before the start
        argv += ["--checkpoints", str(request.checkpoints)] if request.begin != "fresh" else []
        # the same folder as when it runs, so that relative paths of the config mean the same
        cwd = request.spec.root if Path(request.spec.root).is_dir() else folder
        said = machine.ask(argv, seconds=TRAINER_S, env=request.environment(), cwd=cwd)
    answer = _json_line(said.out)
    if answer is None:
        why = f"no answer within {TRAINER_S:.0f} s" if said.rc is None else said.err.strip()[-600:]
        return [_failed("config", f"the trainer's check failed: {why}", "read the lines above")], Needs()
    needs = Needs.of(answer.get("needs") or {})
    errors = answer.get("errors") or []
    if answer.get("ok") and not errors:
        notes = [_warn("config", str(note), "") for note in answer.get("notes") or ()]
        return [_ok("config", "the trainer accepts its config and data"), *notes], needs
    faults = [_config_fault(request, e, f"{config}: ") for e in errors]
    return faults or [_failed("config", "the trainer refuses its config", "run its check by hand")], needs


def _config_fault(request: Request, error: Any, ours: str) -> Check:
    """One error of the trainer: a text, or an object with what, where and next.

    A key is named as it stands in the inventory, not in our file (`ours`), which is gone by then; of a checkpoint that
    is damaged the next step is said in this tool's words.
    """
    theirs = f"jobs.{request.spec.job}.trainer."
    fix = "correct the job's trainer tables, or use --set"
    if not isinstance(error, dict):
        return _failed("config", str(error).replace(ours, theirs), fix)
    where = str(error.get("where") or "").replace(ours, theirs)
    what = str(error.get("what") or error)
    text = f"{where}: {what}" if where else what
    if error.get("exit_code") == _DAMAGED and where.startswith(f"{request.checkpoints}/step-"):
        damaged = request.checkpoints / Path(where).relative_to(request.checkpoints).parts[0]
        aside = request.layout.aside
        move = shlex.join(["mkdir", "-p", str(aside)]) + " && " + shlex.join(["mv", str(damaged), f"{aside}/"])
        return _failed("checkpoint", text, f"set it aside, then --resume takes the newest other one: {move}")
    return _failed("config", text, str(error.get("next") or fix))


def devices(request: Request) -> list[Check]:
    """Every CUDA device that is asked for exists."""
    wanted = sorted({int(d.partition(":")[2] or 0) for d in request.devices if d.startswith("cuda")})
    if not wanted:
        return [_ok("devices", f"{len(request.devices)} processes on the CPU")] if request.devices else []
    seen, why = machine.gpus()
    if seen is None:
        return [
            _failed(
                "devices",
                f"GPUs {_list(wanted)} are asked for, but {why}",
                "make the driver and its tools visible there, or choose cpu devices",
            )
        ]
    visible = request.spec.env.get("CUDA_VISIBLE_DEVICES")
    count = len([v for v in visible.split(",") if v.strip()]) if visible is not None else len(seen)
    if missing := [n for n in wanted if n >= count]:
        bound = " (env.CUDA_VISIBLE_DEVICES of the job counts)" if visible is not None else ""
        return [
            _failed(
                "devices",
                f"GPUs {_list(missing)} are not there: {count} are visible{bound}",
                "choose others with --target-gpus and --drafter-gpus",
            )
        ]
    found = [_ok("devices", f"GPUs {_list(wanted)} of {count}")]
    busy = [g for g in seen if g.index in wanted and g.total and g.used > g.total // 20]
    if busy and request.pid is None and visible is None:
        text = ", ".join(f"GPU {g.index} has {size(g.used)} of {size(g.total)} in use" for g in busy)
        found.append(_warn("devices", text, "see who: nvidia-smi; a trainer left over would take its memory"))
    return found


def disk(request: Request, needs: Needs) -> list[Check]:
    """Room for the release and two checkpoints: the old one stays until the new one is whole."""
    one = needs.checkpoint_bytes or 0
    places: dict[int, tuple[Path, int, int]] = {}
    for path, bytes, inodes in (
        (Path(request.spec.root), request.send_bytes + SPARE_BYTES, request.send_files + SPARE_INODES),
        (request.checkpoints, 2 * one, 0),
    ):
        base = machine.nearest_folder(path)
        try:
            device = base.stat().st_dev
        except OSError:
            continue
        before = places.get(device, (path, 0, 0))
        places[device] = (before[0], before[1] + bytes, before[2] + inodes)
    found = []
    for path, bytes, inodes in places.values():
        free = machine.room(path)
        if free is None:
            found.append(_skipped("disk", f"the free room of {path} cannot be read"))
        elif free.bytes < bytes:
            found.append(
                _failed(
                    "disk",
                    f"{size(free.bytes)} free at {path}, {size(bytes)} needed",
                    "free some space there, or choose another `root` or `checkpoints`",
                )
            )
        elif free.inodes is not None and free.inodes < inodes:
            found.append(
                _failed(
                    "disk",
                    f"{free.inodes} inodes free at {path}, {inodes} needed",
                    "remove small files there, or choose another `root`",
                )
            )
        else:
            found.append(_ok("disk", f"{size(free.bytes)} free at {path}, {size(bytes)} needed"))
    return found


def shared_memory(request: Request, needs: Needs) -> list[Check]:
    """/dev/shm (or the config's `ring.dir`) holds the ring and the drafters' averages."""
    if needs.ring_bytes is None:
        return []
    place = Path(str(needs.said.get("ring_dir") or "/dev/shm"))
    free = machine.room(place) if place.is_dir() else None
    if free is None:
        return [_failed("shm", f"there is no {place}", f"mount a tmpfs at {place} in the container")]
    # The ring of the attempt that is to be replaced is still in there, and goes with it.
    have = free.total if request.pid is not None else free.bytes
    need = needs.ring_bytes + (needs.average_bytes or 0)
    if have < need:
        return [
            _failed(
                "shm",
                f"{place} has {size(have)}, ring and averages need {size(need)}",
                "make /dev/shm larger (lxc.mount.entry = tmpfs dev/shm tmpfs size=...), "
                "or the ring smaller (--set ring.slots=...)",
            )
        ]
    return [_ok("shm", f"{place} has {size(have)}, ring and averages need {size(need)}")]


def memory(request: Request, needs: Needs) -> list[Check]:
    """Host memory for the ring, the last average, and the models of workers that run on the CPU."""
    if needs.average_bytes is None and needs.ring_bytes is None:
        return []
    roles = [("target", d) for d in request.devices[: request.targets]]
    roles += [("drafter", d) for d in request.devices[request.targets :]]
    targets = sum(r == "target" and d == "cpu" for r, d in roles)
    drafters = sum(r == "drafter" and d == "cpu" for r, d in roles)
    need = (needs.average_bytes or 0) + (needs.ring_bytes or 0)
    need += targets * (needs.target_bytes_per_worker or 0) + drafters * (needs.drafter_bytes_per_worker or 0)
    have, bound = machine.available_memory()
    if have is None:
        return [_skipped("memory", "the free memory cannot be read")]
    if request.pid is not None:
        have += machine.tree_memory(request.pid)
    text = f"{size(have)} of memory by {bound}, {size(need)} needed"
    if have < need:
        return [
            _failed(
                "memory",
                text,
                "end what else runs there, raise the container's memory limit, or use fewer workers or ring slots",
            )
        ]
    return [_ok("memory", text)]


def checkpoints(request: Request) -> list[Check]:
    """Checkpoints that are there are neither resumed from nor left behind by accident."""
    folder = request.checkpoints
    try:
        names = sorted(e.name for e in os.scandir(folder) if not e.name.startswith("."))
    except FileNotFoundError:
        names = []
    except OSError as error:
        return [_failed("checkpoints", f"{folder} cannot be read: {error.strerror}", "correct `checkpoints`")]
    if request.bundled:
        names = [n for n in names if n.startswith("step-")]
    if not names:
        note = " (nothing to resume from: it starts at step 0)" if request.begin == "resume" else ""
        return [Check("checkpoints", "warn" if note else "ok", f"no checkpoint in {folder}{note}")]
    text = f"{len(names)} in {folder}, the newest is {names[-1]}"
    if request.begin == "resume":
        return [_ok("checkpoints", f"resumes: {text}")]
    if request.begin == "fresh":
        return [_ok("checkpoints", f"to be set aside, whole: {text}")]
    return [
        _failed(
            "checkpoints",
            f"there are checkpoints of an earlier run: {text}",
            "--resume goes on from the newest; --fresh sets them aside (nothing is deleted) and starts at step 0",
        )
    ]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def size(count: int) -> str:
    """Bytes for people: 512 B, 3.1 MiB, 20.0 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _json_line(text: str) -> dict[str, Any] | None:
    """The object on the last line: libraries may print above it."""
    last = text.strip().rpartition("\n")[2]
    try:
        value = json.loads(last)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
