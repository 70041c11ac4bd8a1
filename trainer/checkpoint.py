"""Checkpoints: a folder that is whole or not there, and is believed only after its hashes were checked.

    step-00000100/
        weights.safetensors   fp32 masters, the drafter's own names
        moments.safetensors   AdamW's two moments, `exp_avg.<name>` and `exp_avg_sq.<name>`
        state.json            step, plan and its cursor, data, geometry, threads, the whole run config
        manifest.json         size and sha256 of each of the others; written last
        moments-1.safetensors ... the other drafters' moments, where they are local and not averaged
        keep                  empty; there if this one stays whatever `keep_last` says

Everything is written to a hidden folder beside, fsynced, and renamed. Finding, checking and renaming need no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import CheckpointError, ConfigError

SCHEMA = 1
WEIGHTS, MOMENTS, STATE, MANIFEST = "weights.safetensors", "moments.safetensors", "state.json", "manifest.json"
#: A checkpoint with a file of this name in it is never dropped.
KEEP = "keep"
#: Seconds that the end of a run waits for old checkpoints to be removed.
REMOVE_S = 60.0
#: Called with bytes that were hashed since the last call.
Hashed = Callable[[int], None]
_PROBE = ".write-probe"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-\d+\.partial")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its folder and what state.json says."""

    path: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def batches(self) -> int:
        """Batches of the run that its weights stand for."""
        return int(self.state["batches"])


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name, -1 for any other name."""
    found = _NAME.fullmatch(path.name)
    return int(found.group(1)) if found else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first; only by name, nothing is read."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if step_of(p) >= 0 and p.is_dir()), key=step_of)


def verify(path: Path, progress: Hashed | None = None) -> Checkpoint:
    """Reads a checkpoint's manifest and state, and checks size and hash of every file.

    Args:
        progress: told each mebibyte or so how many bytes more were hashed.

    Raises:
        CheckpointError: names the file that is missing, cut or changed.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        schema = int(manifest["schema"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the manifest cannot be read: {error}", str(path / MANIFEST)) from error
    if schema > SCHEMA:
        raise CheckpointError(f"schema {schema} is newer than this trainer", str(path), "use the release that wrote it")
    if not {WEIGHTS, MOMENTS, STATE} <= files.keys():
        raise CheckpointError("the manifest does not list all files", str(path / MANIFEST))
    for name, entry in sorted(files.items()):
        file = path / name
        try:
            size = file.stat().st_size
            if size != entry["bytes"]:
                raise CheckpointError(f"{name} has {size} bytes, the manifest says {entry['bytes']}", str(file))
            if sha256(file, progress) != entry["sha256"]:
                raise CheckpointError(f"{name} does not have the hash that the manifest says", str(file))
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error}", str(file)) from error
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the manifest's entry of {name} is damaged", str(path / MANIFEST)) from error
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        checkpoint = Checkpoint(path, state)
        _ = checkpoint.step, checkpoint.batches, state["plan"]["base"], state["data"]["sha256"], state["drafter"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"state.json lacks what a resume needs: {error}", str(path / STATE)) from error
    return checkpoint


def choose(folder: Path, resume: str, progress: Hashed | None = None) -> Checkpoint | None:
    """What to start from.

    Args:
        folder: of the checkpoints. resume: "auto" (the latest, if there is one), "none", or a checkpoint's path.
        progress: as `verify` has it.

    Returns:
        A verified checkpoint, or None for a fresh start.

    Raises:
        CheckpointError: the chosen one is not whole; names the newest older one that is.
        ConfigError: "none" although there are checkpoints.
    """
    there = list_checkpoints(folder)
    if resume == "none":
        if there:
            raise ConfigError(
                f"--resume none, but there are {len(there)} checkpoints, the last {there[-1].name}",
                str(folder),
                "resume with --resume auto, or move them aside first (nothing here overwrites them)",
            )
        return None
    if resume == "auto":
        if not there:
            return None
        chosen = there[-1]
    else:
        chosen = Path(resume)
        if not chosen.is_dir() and (folder / resume).is_dir():
            chosen = folder / resume
        if not chosen.is_dir():
            raise CheckpointError("there is no such checkpoint", str(chosen), _advice(folder, there))
        if step_of(chosen) < 0 and not (chosen / MANIFEST).exists():
            raise CheckpointError("this folder is no checkpoint", str(chosen), _advice(folder, there))
    try:
        return verify(chosen, progress)
    except CheckpointError as error:
        older = [p for p in there if step_of(p) < step_of(chosen)]
        raise CheckpointError(error.what, error.where, error.next or _advice(folder, older)) from error


def _advice(folder: Path, older: Sequence[Path]) -> str:
    for path in reversed(older):
        with contextlib.suppress(CheckpointError):
            return f"the newest other one that is whole: --resume {verify(path).path}"
    return f"no other checkpoint in {folder} is whole: move them aside and start with --resume none"


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's files, as they lie there."""
    try:
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    except OSError:
        return 0  # whoever reads it will say what is wrong


def sha256(file: Path, progress: Hashed | None = None) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(folder: Path) -> list[ConfigError]:
    """Why checkpoints could not be written there, as far as permissions tell; nothing is made."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return []
    why = f"{there} cannot be written" if there.is_dir() else f"{there} is no folder"
    return [
        ConfigError(f"the checkpoints folder cannot be used: {why}", str(folder), "name a folder that can be written")
    ]


class Store:
    """The checkpoints folder of one run, locked against a second one.

    Args:
        folder: made if missing. keep_last: newest checkpoints that stay. keep_every: steps; the first checkpoint at or
            behind each multiple of it stays for ever. writes: False for a node that shares the folder with node 0,
            which alone writes it: then nothing is locked.

    Raises:
        ConfigError: another run holds it, or it cannot be written.
    """

    def __init__(self, folder: Path, keep_last: int, keep_every: int | None = None, *, writes: bool = True) -> None:
        self.folder = folder
        self.writes = writes
        self._keep = keep_last
        self._keep_every = keep_every
        self._from: Path | None = None
        self._removing: list[threading.Thread] = []
        if not writes:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / _PROBE).mkdir(exist_ok=True)
            (folder / _PROBE).rmdir()
        except BlockingIOError as error:
            raise ConfigError(
                "another run writes its checkpoints here", str(folder), "stop it first, or name another folder"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"the checkpoints folder cannot be used: {error}", str(folder), "name a folder that can be written"
            ) from error
        self._sweep()

    def close(self) -> None:
        """Lets the folder go; half-written checkpoints of this run go too."""
        if not self.writes:
            return
        for thread in self._removing:
            thread.join(REMOVE_S)
        self._sweep()
        os.close(self._lock)

    def _sweep(self) -> None:
        """Removes what a killed run was still writing: hidden, never renamed, so no checkpoint."""
        for path in self.folder.iterdir():
            if _PARTIAL.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def resumed_from(self, checkpoint: Checkpoint) -> None:
        """Remembers where this run began: newer checkpoints are another history, to be set aside at the first save."""
        self._from = checkpoint.path

    def went_back(self, step: int) -> None:
        """The run goes on from this step: newer checkpoints are of a history that it left."""
        self._from = self.folder / name_of(step)

    def begin(self, step: int, state: Mapping[str, Any]) -> Path:
        """A hidden folder to write into, with state.json in it; `seal` makes it whole.

        Raises:
            OSError: no room, or the folder cannot be written.
        """
        beside = self.folder / f".{name_of(step)}.partial"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        (beside / STATE).write_text(json.dumps({"schema": SCHEMA, **state}, indent=1) + "\n", encoding="utf-8")
        if self._stays(step):
            (beside / KEEP).touch()
        return beside

    def discard(self, beside: Path) -> None:
        """A folder from `begin` that did not become a checkpoint."""
        shutil.rmtree(beside, ignore_errors=True)

    def claim(self, step: int) -> Path:
        """The path that `publish` will give to a checkpoint of this step.

        Checkpoints of a history that this run left are set aside now, before the plan's record can speak of a
        checkpoint of the same name.
        """
        self._set_aside(step)
        return self.folder / name_of(step)

    def publish(self, beside: Path, path: Path) -> None:
        """Renames a sealed folder into place, then drops the oldest ones; their bytes go in the background."""
        beside.rename(path)
        sync(self.folder)
        gone = []
        for old in list_checkpoints(self.folder)[: -self._keep]:
            if (old / KEEP).exists():
                continue
            # Out of sight first: a half-deleted folder must not look like a checkpoint.
            gone.append(old.rename(self.folder / f".{old.name}.partial"))
        if gone:
            thread = threading.Thread(target=_remove, args=(gone,), daemon=True)
            thread.start()
            self._removing = [t for t in self._removing if t.is_alive()] + [thread]

    def _stays(self, step: int) -> bool:
        if self._keep_every is None:
            return False
        before = max((s for p in list_checkpoints(self.folder) if (s := step_of(p)) < step), default=0)
        return step // self._keep_every > before // self._keep_every

    def _set_aside(self, step: int) -> None:
        """Checkpoints of a history that this run did not take keep their content under another name."""
        base = -1 if self._from is None else step_of(self._from)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        for path in list_checkpoints(self.folder):
            if step_of(path) > base and path != self._from:
                path.rename(path.with_name(f"{path.name}.aside-{stamp}"))
                sync(self.folder)
        # From here on all that lies in the folder is of this history.
        self._from = self.folder / name_of(step)


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # what stays is hidden, and swept at the next start


def seal(beside: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds the manifest and makes all of it durable; the folder still has its hidden name.

    Args:
        beside: from `Store.begin`. files: name -> {bytes, sha256} of the tensor files, which are durable already.

    Raises:
        OSError: no room, or the folder cannot be written.
    """
    sync(beside / STATE)
    listed = {name: dict(entry) for name, entry in files.items()}
    listed[STATE] = {"bytes": (beside / STATE).stat().st_size, "sha256": sha256(beside / STATE)}
    with (beside / MANIFEST).open("w", encoding="utf-8") as opened:
        json.dump({"schema": SCHEMA, "files": listed}, opened, indent=1)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())
    sync(beside)
