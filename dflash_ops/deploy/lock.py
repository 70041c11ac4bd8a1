"""A job's lock file: read and checked before anything is asked of the machine."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_ops.errors import InventoryError
from dflash_ops.inventory import Job

#: `name==version`, `name[extra]==version`, `name @ https://...`, each with markers, hashes and continued lines.
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[^\]]*\])?\s*(===?\s*[^\s;,*]+\s*(;.*|\\|--hash.*|$)|@\s*\S+)")
_OPTIONS = (
    "--index-url", "-i", "--extra-index-url", "--find-links", "-f", "--no-index", "--only-binary", "--no-binary",
    "--prefer-binary", "--pre", "--trusted-host", "--hash", "--require-hashes",
)  # fmt: skip


def read_lock(job: Job) -> str | None:
    """The text of the job's lock file, None for a job without one.

    Raises:
        InventoryError: it cannot be read, or one of its lines is not pinned: then it would be another environment
            tomorrow.
    """
    if job.venv is None:
        return None
    file = job.venv.lock
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InventoryError(
            f"the lock file cannot be read: {error}", file=job.inventory, key=f"jobs.{job.name}.venv.lock",
            fix="name a requirements file that is there",
        ) from None  # fmt: skip
    pins = 0
    for number, line in enumerate(text.splitlines(), 1):
        said = line.split(" #", 1)[0].strip()
        if not said or said.startswith("#"):
            continue
        if said.startswith("-"):
            if re.split(r"[=\s]", said, maxsplit=1)[0] not in _OPTIONS:
                raise _refused(f"an option that a lock file may not have: {said}", file, number)
            continue
        if not _PINNED.match(said):
            raise _refused(f"it is not pinned: {said}", file, number)
        pins += 1
    if not pins:
        raise _refused("it names no package", file, None)
    return text


def _refused(what: str, file: str, line: int | None) -> InventoryError:
    return InventoryError(what, file=file, line=line, fix="write NAME==VERSION, as `pip freeze` or `pip-compile` do")
