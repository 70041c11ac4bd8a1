"""Playbooks from disk: the bundled ones, then a user's own folder that adds kinds or overrides them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomllib

from dflash_ops.bundle import bundled
from dflash_ops.errors import ContractError, UsageError


def load_documents(folders: Sequence[str | Path] = (), *, bundle: bool = True) -> list[dict[str, Any]]:
    """Decoded playbooks, in the order in which they count: bundled first, then each folder (later overrides earlier).

    Raises:
        UsageError: a folder does not exist or holds no .toml.
        ContractError: a file is no TOML (file and position named).
    """
    places: list[Path] = [bundled("playbooks")] if bundle else []
    for folder in folders:
        place = Path(folder).expanduser()
        if not place.is_dir():
            raise UsageError(
                f"playbooks folder {str(folder)!r} does not exist", str(place), "name a folder with *.toml files"
            )
        if not any(place.glob("*.toml")):
            raise UsageError("the playbooks folder holds no *.toml", str(place), "see docs/playbooks.md")
        places.append(place)
    files = [path for place in places for path in sorted(place.glob("*.toml"))]
    return _cached(files)


def _cached(files: list[Path]) -> list[dict[str, Any]]:
    """Decoding 200 KB of TOML takes longer than reading a log: the decoded form is kept in the user's cache folder."""
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = hashlib.sha256(repr(stats).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-ops"
    cache = folder / f"playbooks-{key}.json"
    try:
        documents: list[dict[str, Any]] = json.loads(cache.read_bytes())
        return documents
    except (OSError, ValueError):
        documents = [load_file(path) for path in files]
    # a cache that cannot be written (read-only home, full disk) costs time, nothing else
    with contextlib.suppress(OSError, TypeError):
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("playbooks-*.json"), key=lambda p: p.stat().st_mtime)[:-3]:
            old.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, suffix=".tmp") as file:
            json.dump(documents, file)
        Path(file.name).replace(cache)
    return documents


def load_file(path: Path) -> dict[str, Any]:
    """One decoded playbook; `_file` names where it came from."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ContractError(
            f"a playbook is no TOML: {error}", str(path), "correct the file; `dflash-ops playbooks lint` checks it"
        ) from None
    except UnicodeDecodeError as error:
        raise ContractError(f"a playbook is not UTF-8: {error}", str(path), "save it as UTF-8") from None
    document["_file"] = str(path)
    return document


def proof_there(path: str) -> bool:
    """Whether a `tests/file.py` or `tests/file.py::name` that a remedy names as its proof is there."""
    file, _, name = path.partition("::")
    place = bundled("playbooks").parent / file
    if not place.is_file():
        return False
    return not name or f"def {name.split('[')[0].rpartition('::')[2]}(" in place.read_text("utf-8")


def tests_at_hand() -> bool:
    """A checkout has the tests beside the playbooks, a wheel has not."""
    return (bundled("playbooks").parent / "tests").is_dir()
