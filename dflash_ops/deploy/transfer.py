"""A release and the resident onto a machine: only what is not there, as one stream, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

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


_building = threading.Lock()


def build_pack() -> Pack:
    """This version's resident; built once, however many jobs are deployed, also at one time."""
    with _building:
        return _built_pack()


@cache
def _built_pack() -> Pack:
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


class Upload:
    """A question that was answered, on whose exec a release and the resident may follow (see `question`).

    `said` is the answer.
    """

    def __init__(
        self,
        talk: boot.Talk,
        said: dict[str, Any],
        again: Callable[..., Sent],
        pack: Pack,
        root: str,
        built: Built | None,
    ) -> None:
        self.said = said
        self._talk, self._again, self._pack, self._root, self._built = talk, again, pack, root, built

    def send(
        self,
        *,
        release: bool = True,
        only: Sequence[int] | None = None,
        resident: bool = False,
        on_bytes: OnBytes | None = None,
    ) -> Sent:
        """Send the release that was asked about (`only`: as in `send`), the resident, or both; ends the exec.

        Raises:
            As `send`.
        """
        built = self._built if release else None
        wanted = None if only is None or built is None else sorted(only)
        request = _request(self._root, self._pack, None, wanted, resident)
        if built is not None:
            request["release"] = "asked"
        pieces = chain(
            [json.dumps(request).encode() + b"\n"], _counted(_payload(built, wanted), on_bytes, built, wanted)
        )
        said = self._talk.ask(pieces, deadline=_deadline(built, wanted))
        self._talk.end()
        if said["lacking"]:
            wanted = sorted({*(wanted or ()), *said["lacking"]})
            return self._again(built, only=wanted, resident=resident, on_bytes=on_bytes)
        return _sent(built, wanted, self._pack, resident)

    def end(self) -> None:
        """Nothing is to be sent."""
        self._talk.end()


@contextlib.contextmanager
def question(
    host: Host,
    python: str,
    pack: Pack,
    module: str,
    request: Mapping[str, Any],
    built: Built | None,
    *,
    root: str,
    at: str = "",
    deadline: float = ASK_S,
) -> Iterator[Upload]:
    """Ask `module` (resident.probe, or resident.receive with `ask`), on an exec that stays open for an upload.

    `at`: root under which the resident is looked for; `root` without it.

    Raises:
        As `boot.talk`.
    """
    asking = deadline + (built.bytes if built is not None else 0) / SLOWEST_DISK
    with boot.talk(
        host,
        python,
        pack.content,
        module,
        {**request, "then": True},
        at=f"{at or root}/resident/{pack.id}.pyz",
        asking=asking,
        deadline=asking + _deadline(built, None),
    ) as (talk, said):
        yield Upload(talk, said, partial(send, host, python, pack, root), pack, root, built)


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
) -> Sent:
    """Send a release, the resident, or both.

    `only`: indices of the files that travel; the others are copied there from other releases, by content. Where such a
    copy is not possible any more (the other release was edited or removed meanwhile), those files are sent as well.

    Raises:
        TransferError: what arrived is not what left. HostError: the way there; nothing half-made is left.
    """
    wanted = None if only is None or built is None else sorted(only)
    said = _stream(host, python, pack, root, built, wanted, resident, on_bytes)
    if said.get("lacking"):
        wanted = sorted({*(wanted or ()), *said["lacking"]})
        said = _stream(host, python, pack, root, built, wanted, resident, on_bytes)
        if said.get("lacking"):
            raise TransferError(
                "files of other releases there change while they are copied", f"{host.name}: {root}", "deploy again"
            )
    return _sent(built, wanted, pack, resident)


def _stream(
    host: Host,
    python: str,
    pack: Pack,
    root: str,
    built: Built | None,
    only: Sequence[int] | None,
    resident: bool,
    on_bytes: OnBytes | None,
) -> dict[str, Any]:
    return boot.call(
        host,
        python,
        pack.content,
        RECEIVE,
        _request(root, pack, built, only, resident),
        deadline=_deadline(built, only),
        payload=_counted(_payload(built, only), on_bytes, built, only),
    )


def _request(root: str, pack: Pack, built: Built | None, only: Sequence[int] | None, resident: bool) -> dict[str, Any]:
    return {
        "root": root,
        "token": secrets.token_hex(4),
        "release": built.manifest if built is not None else None,
        "resident": {"id": pack.id, "size": len(pack.content), "sha256": pack.sha256} if resident else None,
        "take": only is not None,
    }


def _payload(built: Built | None, only: Sequence[int] | None) -> Iterator[bytes]:
    if built is not None:
        yield from tar_stream(built, "release", only)
    yield tar_end()


def _deadline(built: Built | None, only: Sequence[int] | None) -> float:
    """Seconds for an upload over the slowest way and disk."""
    if built is None:
        return ASK_S
    return ASK_S + built.stream_bytes(only) / SLOWEST + built.bytes / SLOWEST_DISK


def _counted(
    pieces: Iterator[bytes], on_bytes: OnBytes | None, built: Built | None, only: Sequence[int] | None
) -> Iterator[bytes]:
    total = built.stream_bytes(only) if built is not None else 0
    sent = 0
    for piece in pieces:
        yield piece
        sent += len(piece)
        if on_bytes is not None:
            on_bytes(min(sent, total), total)


def _sent(built: Built | None, only: Sequence[int] | None, pack: Pack, resident: bool) -> Sent:
    extra = len(pack.content) if resident else 0
    if built is None:
        return Sent(0, extra, 0)
    files = built.release.files if only is None else [built.release.files[i] for i in only]
    return Sent(len(files), sum(f.size for f in files) + extra, len(built.release.files) - len(files))
