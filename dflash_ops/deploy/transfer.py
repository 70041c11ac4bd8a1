"""A release and the resident onto a machine: only what is not there, as one stream, whole or not at all."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dflash_ops.contracts import to_dict
from dflash_ops.deploy import boot
from dflash_ops.deploy.release import Built, tar_end, tar_stream
from dflash_ops.errors import TransferError
from dflash_ops.hosts.base import Host

RECEIVE = "dflash_ops.resident.receive"

#: Seconds for the question, and for what is not the transfer itself.
ASK_S = 60.0

#: Slowest way to the machine for which an upload is waited, bytes a second.
SLOWEST = 50_000

#: Slowest disk there on which files are copied from another release, bytes a second.
SLOWEST_DISK = 5_000_000

#: Called with bytes that have left, and how many there are.
OnBytes = Callable[[int, int], None]


@dataclass(frozen=True)
class Pack:
    """The resident's zipapp."""

    id: str
    content: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@cache
def build_pack() -> Pack:
    """This version's resident; built once, however many jobs are deployed."""
    from dflash_ops.deploy.zipapp import build_resident

    with tempfile.TemporaryDirectory(prefix="dflash-resident-") as folder:
        place = Path(folder) / "resident.pyz"
        id = build_resident(place)
        return Pack(id, place.read_bytes())


@dataclass(frozen=True)
class Sent:
    """What travelled; `kept` = files whose content was there already."""

    files: int
    bytes: int
    kept: int


def lacking(host: Host, python: str, pack: Pack, root: str, built: Built, *, at: str = "") -> list[int]:
    """Which files of a release must travel, as the machine says: indices."""
    request = {"root": root, "ask": to_dict(built.release)}
    deadline = ASK_S + built.bytes / SLOWEST_DISK
    said = boot.call(host, python, pack.content, RECEIVE, request, deadline=deadline, at=at)
    return list(said["lacking"])


def send(
    host: Host,
    python: str,
    pack: Pack,
    root: str,
    built: Built | None,
    *,
    only: Sequence[int] | None = None,
    resident: bool = False,
    on_bytes: OnBytes | None = None,
    at: str = "",
) -> Sent:
    """Send a release, the resident, or both.

    `only`: indices of the files that travel; the others are copied there from other releases, by content. Where such a
    copy is not possible any more (the other release was edited or removed meanwhile), those files are sent as well.
    `at`: where the resident lies there already, as in `boot.call`.

    Raises:
        TransferError: what arrived is not what left. HostError: the way there; nothing half-made is left.
    """
    wanted = None if only is None or built is None else sorted(only)
    said = _stream(host, python, pack, root, built, wanted, resident, on_bytes, at)
    if said.get("lacking"):
        wanted = sorted({*(wanted or ()), *said["lacking"]})
        said = _stream(host, python, pack, root, built, wanted, resident, on_bytes, at)
        if said.get("lacking"):
            raise TransferError(
                "files of other releases there change while they are copied", f"{host.name}: {root}", "deploy again"
            )
    extra = len(pack.content) if resident else 0
    if built is None:
        return Sent(0, extra, 0)
    files = built.release.files if wanted is None else [built.release.files[i] for i in wanted]
    return Sent(len(files), sum(f.size for f in files) + extra, len(built.release.files) - len(files))


def _stream(
    host: Host,
    python: str,
    pack: Pack,
    root: str,
    built: Built | None,
    only: Sequence[int] | None,
    resident: bool,
    on_bytes: OnBytes | None,
    at: str,
) -> dict[str, Any]:
    request = {
        "root": root,
        "token": secrets.token_hex(4),
        "release": to_dict(built.release) if built is not None else None,
        "resident": {"id": pack.id, "size": len(pack.content), "sha256": pack.sha256} if resident else None,
        "take": only is not None,
    }
    total = built.stream_bytes(only) if built is not None else 0

    def payload() -> Iterator[bytes]:
        if built is not None:
            yield from tar_stream(built, "release", only)
        yield tar_end()

    return boot.call(
        host,
        python,
        pack.content,
        RECEIVE,
        request,
        deadline=ASK_S + total / SLOWEST + (built.bytes if built is not None else 0) / SLOWEST_DISK,
        payload=payload(),
        on_bytes=(lambda sent: on_bytes(min(sent, total), total)) if on_bytes is not None else None,
        at="" if resident else at,
    )
