"""Files, folders, standard input, gz and zst, as chunks of bytes in bounded memory."""

from __future__ import annotations

import importlib
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.errors import DflashError, UsageError

CHUNK = 1 << 20
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
#: Of a folder these are read; everything else in it is left alone.
SUFFIXES = (".log", ".txt", ".out", ".err", ".json", ".gz", ".zst")


class ReadError(DflashError):
    """A file that was named could not be read to its end."""


@dataclass(frozen=True)
class Found:
    """One thing to triage: the name as given and, for a file, where it lies; kind as in triage.Source."""

    name: str
    path: Path | None
    kind: str = "log"


def expand(names: list[str]) -> tuple[list[Found], list[UsageError]]:
    """What the arguments mean: files, logs of folders, `-` for standard input; errors for what is not there."""
    found: list[Found] = []
    errors: list[UsageError] = []
    for name in names:
        if name == "-":
            found.append(Found("-", None))
            continue
        path = Path(name)
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and (p.name == "log" or p.suffix in SUFFIXES)]
            if not inside:
                errors.append(
                    UsageError(
                        f"folder {name!r} holds no log",
                        str(path),
                        f"name a file, or a folder with {', '.join(SUFFIXES)}",
                    )
                )
            found.extend(Found(str(p), p, kind_of(p)) for p in inside)
        elif path.exists():
            found.append(Found(name, path, kind_of(path)))
        else:
            errors.append(
                UsageError(f"no such file: {name}", str(path.absolute()), "check the path; `-` reads standard input")
            )
    return found, errors


def kind_of(path: Path) -> str:
    """The kind of a source by its file's name."""
    name = path.name
    if name.endswith("error.json"):
        return "error_json"
    if name == "exit.json":
        return "exit_json"
    if name.startswith(("dmesg", "kern.log", "kernel")):
        return "kernel"
    return "log"


def chunks(found: Found) -> Iterator[bytes]:
    """The bytes of one source, unpacked where it is gz or zst (told by its first bytes, not by its name).

    Raises:
        ReadError: it cannot be opened, is cut or damaged, or needs a package that is not installed.
    """
    if found.path is None:
        descriptor = sys.stdin.fileno()
        while piece := os.read(descriptor, CHUNK):
            yield piece
        return
    try:
        with found.path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(GZIP):
                yield from _gzip(found)
            elif magic.startswith(ZSTD):
                yield from _zstd(found)
            else:
                while piece := file.read(CHUNK):
                    yield piece
    except OSError as error:
        raise ReadError(
            f"cannot read {found.name}: {os.strerror(error.errno) if error.errno else error}",
            str(found.path),
            "check permissions and whether the disk answers",
        ) from None


def _gzip(found: Found) -> Iterator[bytes]:
    """A gz that ends early gives what it holds: logs are often still being written, or were cut."""
    assert found.path is not None
    unpack = zlib.decompressobj(31)  # 31: gzip's header, largest window
    with found.path.open("rb") as file:
        while raw := file.read(CHUNK >> 2):
            while raw:
                try:
                    piece = unpack.decompress(raw, CHUNK)
                except zlib.error as error:
                    raise ReadError(
                        f"{found.name} is no whole gzip: {error}", str(found.path), "unpack it by hand: gzip -dc"
                    ) from None
                if piece:
                    yield piece
                if unpack.eof:  # one member ended; rotated logs may have several in a row
                    raw = unpack.unused_data.lstrip(b"\x00")
                    if not raw.startswith(GZIP[: len(raw)]):
                        return
                    unpack = zlib.decompressobj(31)
                else:
                    raw = unpack.unconsumed_tail


def _zstd(found: Found) -> Iterator[bytes]:
    assert found.path is not None
    try:
        zstandard = importlib.import_module("zstandard")
    except ModuleNotFoundError:
        raise ReadError(
            f"{found.name} is packed with zstd, and the package zstandard is not installed",
            str(found.path),
            "pip install zstandard, or: zstd -dc FILE | dflash-ops triage -",
        ) from None
    with (
        found.path.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as reader,
    ):
        while True:
            try:
                piece = reader.read(CHUNK)
            except zstandard.ZstdError as error:
                raise ReadError(
                    f"{found.name} is no whole zstd: {error}", str(found.path), "unpack it by hand: zstd -dc"
                ) from None
            if not piece:
                return
            yield bytes(piece)
