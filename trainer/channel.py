"""JSON lines over a Unix socket between the launcher and its workers. End-of-file means death, on both ends.

The socket's name is abstract (it starts with a zero byte): no file is left behind, and no path limit is met. A peer is
admitted by what the kernel says about it (SO_PEERCRED), not by what it says.
"""

from __future__ import annotations

import array
import json
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from trainer.errors import TrainerError

Message = dict[str, Any]
#: A message is a line of a few hundred bytes; a peer that sends more than this without a newline is broken.
LONGEST = 1 << 24
#: At most so many descriptors come with a message.
_DESCRIPTORS = 4


class PeerGone(TrainerError):
    """The other end of a channel is dead."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def listen() -> tuple[socket.socket, str]:
    """A listening socket in the abstract namespace, and its name without the leading zero byte."""
    name = f"dflash-{os.getpid()}-{secrets.token_hex(8)}"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    server.bind("\0" + name)
    server.listen(64)
    server.setblocking(False)
    return server, name


def peer_pid(connection: socket.socket) -> int:
    """Process id of the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", raw)[0]
    return pid


class Peer:
    """The launcher's end: never blocks. Sends what fits and keeps the rest for `flush`."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        self._in = b""
        self._out = b""
        self.closed = False

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    def send(self, message: Message) -> None:
        self._out += encode(message)
        self.flush()

    def send_with_descriptors(self, message: Message, descriptors: Sequence[int]) -> None:
        """The first message of a connection; the descriptors travel with its first byte."""
        line = encode(message)
        sent = socket.send_fds(self.socket, [line], list(descriptors))
        self._out += line[sent:]

    def flush(self) -> None:
        """Sends what the socket takes. A dead peer is found by `receive`, so it is no error here."""
        while self._out and not self.closed:
            try:
                sent = self.socket.send(self._out)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            self._out = self._out[sent:]

    def receive(self) -> list[Message]:
        """All whole messages that are there; sets `closed` at end-of-file.

        Raises:
            TrainerError: what came is no message of ours.
        """
        while not self.closed:
            try:
                got = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                got = b""
            if not got:
                self.closed = True
            self._in += got
        *lines, self._in = self._in.split(b"\n")
        if len(self._in) > LONGEST:
            raise TrainerError("a worker sent a line without an end", "worker channel", "report this as a fault")
        return [_decode(line) for line in lines]

    def close(self) -> None:
        self.closed = True
        self.socket.close()


class Channel:
    """A worker's end: blocking, one message at a time.

    Args:
        name: of the launcher's socket. parent: the launcher's pid; a wait ends when it is not our parent any more.
    """

    def __init__(self, name: str, parent: int) -> None:
        self._parent = parent
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.connect("\0" + name)
        self._in = b""
        self._descriptors: list[int] = []

    def send(self, message: Message) -> None:
        """
        Raises:
            PeerGone: the launcher is dead.
        """
        try:
            self.socket.sendall(encode(message))
        except OSError as error:
            raise PeerGone(f"the launcher is gone: {error}", "worker channel") from error

    def receive(self) -> Message:
        """The next message. The wait ends with the launcher, not by a deadline of its own.

        Raises:
            PeerGone: the launcher is dead.
        """
        while b"\n" not in self._in:
            readable, _, _ = select.select([self.socket], [], [], 5.0)
            if not readable:
                if os.getppid() != self._parent:
                    raise PeerGone("the launcher is gone", "worker channel")
                continue
            self._in += self._read()
        line, _, self._in = self._in.partition(b"\n")
        return _decode(line)

    def _read(self) -> bytes:
        items = array.array("i")
        try:
            got, ancillary, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(_DESCRIPTORS * items.itemsize))
        except OSError as error:
            raise PeerGone(f"the launcher is gone: {error}", "worker channel") from error
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                items.frombytes(data[: len(data) - len(data) % items.itemsize])
                self._descriptors += list(items)
        if not got:
            raise PeerGone("the launcher closed its end", "worker channel")
        return got

    def take_descriptor(self) -> int:
        """The next one of the descriptors that came with the first message.

        Raises:
            TrainerError: none is left.
        """
        if not self._descriptors:
            raise TrainerError(
                "a descriptor of shared memory did not arrive", "worker channel", "report this as a fault"
            )
        return self._descriptors.pop(0)


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise TrainerError(f"a message is no JSON: {error}", "worker channel", "report this as a fault") from error
    if not isinstance(message, dict):
        raise TrainerError("a message is no object", "worker channel", "report this as a fault")
    return message
