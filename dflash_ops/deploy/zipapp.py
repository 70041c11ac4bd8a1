"""The resident as one file: a zipapp with the same bytes for the same content."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dflash_ops
from dflash_ops.errors import ReleaseError
from dflash_ops.playbooks import load_documents

#: Parts of dflash_ops that run in the container (the import contracts keep them free of all others).
PARTS = ("__init__.py", "errors.py", "contracts", "supervise", "triage", "resident")

#: The bundled playbooks as JSON: Python 3.10 reads no TOML. Examples are for tests and pages.
PLAYBOOKS = "dflash_ops/resident/playbooks.json"

MAIN = b"""\
import os, sys
if sys.version_info < (3, 10):
    sys.exit("the resident needs Python 3.10 or newer, this is " + sys.version.split()[0])
# By its real name: current.pyz may be switched while this runs, and modules are read from the file when first used.
sys.path[0] = os.path.realpath(sys.path[0])
sys.path.insert(0, sys.path[0][:-3] + sys.implementation.cache_tag + ".zip")
sys.dont_write_bytecode = True
from dflash_ops.resident.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def build_resident(dest: Path) -> str:
    """Write the zipapp to `dest`; gives its id, the first 12 hex digits of its SHA-256.

    Raises:
        ReleaseError: libtmux is not installed, or its licence is missing.
    """
    data = resident_bytes()
    beside = dest.with_name(f".{dest.name}.{os.getpid()}.tmp")
    dest.parent.mkdir(parents=True, exist_ok=True)
    beside.write_bytes(data)
    beside.replace(dest)
    return hashlib.sha256(data).hexdigest()[:12]


def resident_bytes() -> bytes:
    """The zipapp itself: sorted entries, fixed times and modes, so that equal content is equal bytes."""
    entries = {"__main__.py": MAIN, PLAYBOOKS: playbooks_bytes(), **dict(_own()), **dict(_libtmux())}
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(entries):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, entries[name])
    return b"#!/usr/bin/env python3\n" + raw.getvalue()


def playbooks_bytes(documents: Sequence[Mapping[str, Any]] | None = None) -> bytes:
    """Playbooks (the bundled ones, or `documents`) as the resident reads them."""
    kept = []
    for document in load_documents() if documents is None else documents:
        kinds = [{k: v for k, v in kind.items() if k != "example"} for kind in document.get("kind", ())]
        kept.append({**document, "kind": kinds, "_file": Path(str(document.get("_file", ""))).name})
    return json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def _own() -> Iterator[tuple[str, bytes]]:
    package = Path(dflash_ops.__file__).resolve().parent
    for part in PARTS:
        place = package / part
        paths = [place] if place.is_file() else sorted(place.rglob("*.py"))
        for path in paths:
            yield f"dflash_ops/{path.relative_to(package).as_posix()}", path.read_bytes()


def _libtmux() -> Iterator[tuple[str, bytes]]:
    """libtmux from this installation, with its licence."""
    try:
        found = importlib.metadata.distribution("libtmux")
    except importlib.metadata.PackageNotFoundError:
        raise ReleaseError(
            "libtmux is not installed here", "the operator's Python", "install dflash-ops anew with its dependencies"
        ) from None
    licences = 0
    for file in found.files or ():
        name = file.as_posix()
        if name.startswith(("libtmux/test/", "libtmux/pytest_plugin")):
            continue
        licence = ".dist-info/" in name and Path(name).name.upper().startswith(("LICENSE", "LICENCE", "COPYING"))
        licences += licence
        if licence or (name.startswith("libtmux/") and name.endswith(".py")):
            yield name, Path(str(found.locate_file(file))).read_bytes()
    if not licences:
        raise ReleaseError("libtmux's licence text is missing", str(found.locate_file("")), "install it from its wheel")
