"""A virtual environment from a lock file: made once for each content, beside its place, and renamed.

The rule here: `root/venvs/<id>` is whole or not there. Its id is the hash of the lock's text and of the Python that
made it, so the same lock is made once, and a changed one never changes an environment that a trainer runs from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_ops.errors import DeployError, PreflightError
from dflash_ops.resident.content import sync_folder

#: Where it says what it was made of; the folder is whole if this is there.
MARK = ".dflash-venv.json"

MAKING = ".making-"

#: Seconds for all of it: torch and its libraries are gigabytes.
DEADLINE = 3600.0

#: Lines of pip that are repeated when it fails.
TAIL = 12

_FACTS = (
    "import json, sys, sysconfig; print(json.dumps([list(sys.version_info[:3]), sys.implementation.cache_tag, "
    "sysconfig.get_platform(), sys.executable]))"
)


def main(args: list[str]) -> int:
    from dflash_ops.resident.receive import say
    from dflash_ops.resident.tmux import clean_environment

    clean_environment()
    raw = sys.stdin.buffer.readline()
    return say(lambda: make(json.loads(raw)))


def identify(python: str, lock: str) -> tuple[str, dict[str, Any]]:
    """Id of the environment that `lock` means with this Python, and the Python's facts.

    Raises:
        PreflightError: there is no such Python, or it is too old.
    """
    from dflash_ops.resident.machine import ask

    program = shutil.which(python)
    if program is None:
        raise PreflightError(f"there is no {python}", "venv.python of the job", "install it there, or name another one")
    said = ask([program, "-I", "-c", _FACTS], seconds=30)
    try:
        version, tag, platform, executable = json.loads(said.out.strip().rpartition("\n")[2])
    except ValueError:
        text = (said.err.strip() or "no answer")[-300:]
        raise PreflightError(f"{program} does not run as a Python: {text}", "venv.python of the job", "") from None
    if tuple(version) < (3, 10):
        raise PreflightError(
            f"{program} is Python {'.'.join(map(str, version))}, 3.10 or newer is needed", "venv.python of the job", ""
        )
    facts = {"version": version, "tag": tag, "platform": platform, "python": executable}
    whole = json.dumps([lock, version, tag, platform], ensure_ascii=False)
    return hashlib.sha256(whole.encode()).hexdigest()[:12], facts


def there(root: Path, id: str) -> bool:
    folder = root / "venvs" / id
    return (folder / MARK).is_file() and (folder / "bin/python").exists()


def look(root: Path, request: dict[str, Any]) -> dict[str, Any]:
    """`{id, path, there, python}` for `{python, lock}`; or `{error: {...}}`, for a question that must not fail."""
    try:
        id, facts = identify(str(request["python"]), str(request["lock"]))
    except PreflightError as error:
        return {"error": {"what": error.what, "where": error.where, "next": error.next}}
    version = ".".join(map(str, facts["version"]))
    return {"id": id, "path": str(root / "venvs" / id), "there": there(root, id), "python": version}


def make(request: dict[str, Any]) -> dict[str, Any]:
    """`{root, python, lock}` -> `{schema, id, path, made}`; what is being done is said, a JSON object a line.

    Raises:
        PreflightError: no Python, or none that can make environments.
        DeployError: pip refuses, with its last lines. Nothing is left of it.
    """
    root, lock = Path(request["root"]), str(request["lock"])
    id, facts = identify(str(request["python"]), lock)
    place = root / "venvs" / id
    place.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + DEADLINE
    with _only_one(place.parent / f".lock-{id}", end):
        made = not there(root, id)
        if made:
            for rest in place.parent.glob(f"{MAKING}{id}-*"):  # of one that was killed: the lock is ours now
                shutil.rmtree(rest, ignore_errors=True)
            beside = place.parent / f"{MAKING}{id}-{secrets.token_hex(3)}"
            try:
                _make(beside, place, lock, facts, end)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    return {"schema": 1, "id": id, "path": str(place), "made": made}


@contextmanager
def _only_one(path: Path, end: float) -> Iterator[None]:
    """Two deploys of one lock: the second one waits, and finds it made."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeployError("another deploy makes this environment and does not end", str(path), "") from None
                _say("another deploy makes it; waiting")
                time.sleep(2.0)
        yield
    finally:
        os.close(fd)


def _make(beside: Path, place: Path, lock: str, facts: dict[str, Any], end: float) -> None:
    _say(f"python {'.'.join(map(str, facts['version']))} -m venv")
    _step([facts["python"], "-I", "-m", "venv", str(beside)], end, "the environment cannot be made")
    requirements = beside / "requirements.lock"
    fd = os.open(requirements, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # an index's address may hold a token
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(lock)
    python = str(beside / "bin/python")
    pip = [python, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", "--no-color"]
    _step([*pip, "install", "--no-deps", "--progress-bar", "off", "-r", str(requirements)], end, "pip refuses the lock")
    _step([*pip, "check"], end, "the lock is not complete: what it installs does not fit together")
    requirements.unlink()
    _settle(beside, place)
    (beside / MARK).write_text(json.dumps({"schema": 1, "t": time.time(), **facts}) + "\n", "utf-8")
    _say("flushing")
    os.sync()
    if os.path.lexists(place):  # there, but not whole: never ours to use, and in the way
        shutil.rmtree(place)
    beside.rename(place)
    sync_folder(place.parent)


def _settle(beside: Path, place: Path) -> None:
    """Scripts name their interpreter by its whole path: the one that it will have."""
    old, new = os.fsencode(beside), os.fsencode(place)
    for path in [*(beside / "bin").iterdir(), beside / "pyvenv.cfg"]:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if old in content and b"\0" not in content:
            path.write_bytes(content.replace(old, new))


def _step(argv: list[str], end: float, failed: str) -> None:
    """One command, its lines told as they come.

    Raises:
        PreflightError: it cannot make environments at all. DeployError: it failed.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None

    def kill() -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    tail: list[str] = []
    timer = threading.Timer(max(1.0, end - time.monotonic()), kill)
    timer.start()
    try:
        for line in process.stdout:
            text = line.strip()
            if text:
                tail = [*tail[-TAIL + 1 :], text]
                if re.match(r"(Collecting|Downloading|Using cached|Installing|Building|Successfully|Processing)", text):
                    _say(text)
        rc = process.wait(30)
    finally:
        timer.cancel()
        kill()
        process.wait(10)
    if time.monotonic() > end:
        raise DeployError(f"{failed}: no end within {DEADLINE:.0f} s", " ".join(argv[:4]), "deploy again")
    if rc == 0:
        return
    said = "\n".join(tail)
    if "ensurepip" in said:
        raise PreflightError(f"{failed}: that Python has no venv", argv[0], "apt-get install python3-venv, there")
    raise DeployError(f"{failed} (exit code {rc})\n{said}", "venv.lock of the job", "correct the lock file")


def _say(text: str) -> None:
    print(json.dumps({"schema": 1, "progress": text[:200]}), flush=True)
