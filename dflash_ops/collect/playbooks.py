"""Playbooks from disk: the bundled ones, then a user's own folder that adds kinds or overrides them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
            raise UsageError(f"playbooks folder {str(folder)!r} does not exist", str(place), "name a folder with *.toml files")
        if not any(place.glob("*.toml")):
            raise UsageError("the playbooks folder holds no *.toml", str(place), "see docs/playbooks.md")
        places.append(place)
    return [load_file(path) for place in places for path in sorted(place.glob("*.toml"))]


def load_file(path: Path) -> dict[str, Any]:
    """One decoded playbook; `_file` names where it came from."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ContractError(f"a playbook is no TOML: {error}", str(path), "correct the file; `dflash-ops playbooks lint` checks it") from None
    except UnicodeDecodeError as error:
        raise ContractError(f"a playbook is not UTF-8: {error}", str(path), "save it as UTF-8") from None
    document["_file"] = str(path)
    return document
