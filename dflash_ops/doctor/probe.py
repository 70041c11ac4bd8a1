"""Sent as text to the host's own python and run there: facts as one JSON line, no judgement (see judge.py).

The rule here: standard library only, syntax that any Python from 3.7 on compiles, every wait has a limit, and nothing
is changed but a probe file in the job's root (or the nearest folder above it), removed at once.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IMPORTS = """\
import importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    try:
        module = importlib.import_module(name)
        found[name] = {"version": str(getattr(module, "__version__", "")), "error": None}
    except BaseException as error:
        found[name] = {"version": "", "error": "%s: %s" % (type(error).__name__, error)}
torch = sys.modules.get("torch")
cuda = None
if torch is not None and found.get("torch", {}).get("error") is None:
    cuda = {"build": torch.version.cuda, "count": torch.cuda.device_count() if torch.version.cuda else 0}
print()
print(json.dumps({"python": list(sys.version_info[:3]), "found": found, "cuda": cuda}))
"""


def ask(argv: list[str], seconds: float) -> dict[str, Any]:
    """Run and wait at most `seconds`: rc (None = no answer), out, err. What hangs in a driver is not waited for."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return {"rc": None, "out": "", "err": str(error)}
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return {"rc": None, "out": "", "err": f"no answer within {seconds:.0f} s"}
    return {"rc": process.returncode, "out": out.decode("utf-8", "replace"), "err": err.decode("utf-8", "replace")}


def room(path: Path) -> dict[str, Any]:
    """Bytes and inodes free to this user."""
    try:
        vfs = os.statvfs(path)
    except OSError as error:
        return {"error": error.strerror}
    return {
        "free": vfs.f_bavail * vfs.f_frsize,
        "total": vfs.f_blocks * vfs.f_frsize,
        "inodes": vfs.f_favail if vfs.f_files else None,
    }


def root(path: Path) -> dict[str, Any]:
    """Whether the job's folder is there and can be written; where it is not, the nearest one above it."""
    base = path
    while not os.path.lexists(base) and base.parent != base:
        base = base.parent
    folder = base.is_dir()
    said = {"base": str(base), "exists": base == path, "folder": folder, "error": None, "read_only": False}
    said["room"] = room(base)
    if not folder:
        return said
    try:
        # access(2) says yes to root on file systems where nothing can be made; only making something tells.
        with tempfile.NamedTemporaryFile(prefix=".dflash-doctor-", dir=str(base)) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        said["error"] = error.strerror
        said["read_only"] = error.errno == errno.EROFS
    return said


def tmux(request: dict[str, Any]) -> dict[str, Any] | None:
    program = shutil.which("tmux")
    if program is None:
        return None
    said = ask([program, "-V"], 10)
    name = "=" + request["session"]
    look = ask([program, "-L", request["socket"], "list-panes", "-s", "-t", name, "-F", "#{pane_pid}"], 10)
    pids = [int(word) for word in look["out"].split() if word.isdigit()]
    return {"version": said["out"].strip(), "rc": said["rc"], "err": said["err"], "session": look["rc"], "pids": pids}


def interpreter(request: dict[str, Any]) -> dict[str, Any]:
    name = request["interpreter"]
    path = shutil.which(name, path=request["path"])
    if path is None:
        file = Path(name)
        there = "/" in name and file.exists()
        dangling = "/" in name and file.is_symlink() and not there
        return {
            "path": None,
            "why": "is a dangling link" if dangling else "cannot be executed" if there else "is not there",
        }
    if not request["imports"]:
        return {"path": path}
    said = ask([path, "-c", IMPORTS, json.dumps(request["imports"])], request["import_s"])
    try:
        answer = json.loads(said["out"].strip().rpartition("\n")[2])
    except ValueError:
        answer = None
    return {"path": path, "answer": answer, "err": said["err"][-400:]}


def gpus(question: list[str], seconds: float) -> dict[str, Any]:
    """The answer as it is: who asked reads it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"said": None, "why": "nvidia-smi is not there"}
    said = ask([program, *question], seconds)
    if said["rc"] != 0:
        first = (said["err"].strip() or said["out"].strip() or "no answer").splitlines()[0]
        return {"said": None, "why": f"nvidia-smi fails: {first}"}
    return {"said": said["out"], "why": ""}


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat, or None where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def resident(path: Path) -> dict[str, Any]:
    """What run/resident.json says, and whether that very process (pid and start time) lives."""
    try:
        said = json.loads((path / "run" / "resident.json").read_text("utf-8"))
        pid, start = int(said["pid"]), int(said["start"])
    except (FileNotFoundError, NotADirectoryError):
        return {"there": False, "alive": False, "error": None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"there": True, "alive": False, "error": f"{type(error).__name__}: {error}"}
    return {"there": True, "alive": start_ticks(pid) == start, "pid": pid, "error": None}


def wrappers(path: Path) -> list[int]:
    """Pids of this job's wrappers that live: what stands in panes of its own session."""
    pids = []
    for file in (path / "run" / "attempts").glob("*/start.json"):
        try:
            wrapper = json.loads(file.read_text("utf-8"))["wrapper"]
            if start_ticks(int(wrapper["pid"])) == int(wrapper["start"]):
                pids.append(int(wrapper["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged record claims no session
    return pids


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline().decode())
    folder = Path(request["root"])
    facts = {
        "schema": 1,
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "machine": f"{platform.node()}, {platform.system()} {platform.release()}",
        "root": root(folder),
        "shm": room(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        "tmux": tmux(request),
        "interpreter": interpreter(request),
        "gpus": gpus(request["gpu"], request["gpu_s"]),
        "resident": resident(folder),
        "wrappers": wrappers(folder),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
