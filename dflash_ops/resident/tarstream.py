"""Reading a tar stream of files and links, and nothing else: strict, and quick to import.

What `deploy/release.py` writes: ustar headers, with a pax header in front where a name is long or not ASCII. Every
other kind of member (hard links, devices, folders, sparse files, global headers) is refused.
"""

from __future__ import annotations

from dflash_ops.errors import TransferError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    class Stream(Protocol):
        def read(self, size: int, /) -> bytes: ...
        def readinto(self, buffer: memoryview, /) -> int: ...


BLOCK = 512
PIECE = 1 << 18

#: Longest pax header: names and links are paths.
MOST_PAX = 1 << 16


class Member:
    """A file (`link` None) or a link; its content must be read before the next one is asked for."""

    __slots__ = ("_stream", "left", "link", "name", "size")

    def __init__(self, stream: Stream, name: str, size: int, link: str | None) -> None:
        self._stream = stream
        self.name, self.size, self.link = name, size, link
        self.left = size

    def pieces(self) -> Iterator[memoryview]:
        """Its content; each piece only until the next one is asked for.

        Raises:
            TransferError: the stream ends before.
        """
        room = memoryview(bytearray(min(PIECE, self.left)))
        while self.left:
            got = self._stream.readinto(room[: self.left])
            if not got:
                raise _early()
            self.left -= got
            yield room[:got]
        if self.size % BLOCK:
            _exactly(self._stream, BLOCK - self.size % BLOCK)


def members(stream: Stream) -> Iterator[Member]:
    """Members in their order, up to the closing blocks.

    Raises:
        TransferError: the stream ends early, is damaged, or holds something that is neither a file nor a link.
    """
    pax: dict[str, str] = {}
    while True:
        header = _exactly(stream, BLOCK)
        if not header.strip(b"\0"):
            return
        if sum(header[:148]) + sum(header[156:]) + 8 * 32 != _octal(header[148:156]):
            raise TransferError("the stream is damaged: a header's sum is wrong", "tar stream", "deploy again")
        size, kind = _octal(header[124:136]), header[156:157]
        if kind == b"x":
            if size > MOST_PAX:
                raise TransferError(f"a header of {size} bytes", "tar stream")
            pax = _records(_exactly(stream, size + -size % BLOCK)[:size])
            continue
        name = _text(header[:100])
        if prefix := _text(header[345:500]):
            name = f"{prefix}/{name}"
        name, link = pax.get("path", name), pax.get("linkpath", _text(header[157:257]))
        size = int(pax.get("size", size))
        pax = {}
        if kind not in (b"0", b"\0", b"2") or (kind == b"2" and size):
            raise TransferError(f"{name!r} arrived as something else than a file", "tar stream")
        member = Member(stream, name, size, link if kind == b"2" else None)
        yield member
        if member.left:
            raise TransferError(f"{name!r} was not read to its end", "tar stream")


def _exactly(stream: Stream, count: int) -> bytes:
    """So many bytes, padding of the last piece included.

    Raises:
        TransferError: fewer came.
    """
    data = stream.read(count)
    if len(data) != count:
        raise _early()
    return data


def _early() -> TransferError:
    return TransferError("the stream ended early", "tar stream", "deploy again")


def _octal(field: bytes) -> int:
    text = field.strip(b"\0 ")
    try:
        return int(text or b"0", 8)
    except ValueError:
        raise TransferError("the stream is damaged: a number is none", "tar stream", "deploy again") from None


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _records(raw: bytes) -> dict[str, str]:
    """`27 path=some/name\\n`: length (of the whole record), key, value."""
    found: dict[str, str] = {}
    while raw:
        digits, _, _ = raw.partition(b" ")
        if not digits.isdigit() or not len(digits) < int(digits) <= len(raw):
            raise TransferError("the stream is damaged: a pax record", "tar stream", "deploy again")
        record, raw = raw[: int(digits)], raw[int(digits) :]
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
    return found
