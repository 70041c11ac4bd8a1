"""One command on an ssh connection, its three streams moved by one loop under deadlines.

The rule here: no read, write or wait blocks for longer than the caller says. An exit code of -1 and an early end of
the streams are a lost connection, never a result.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from dflash_ops.errors import ConnectionLost
from dflash_ops.hosts.connect import Connection
from dflash_ops.hosts.wrap import Held

#: Bytes written at once; one huge write is quadratic in paramiko (50 MB: 15 s), and sshd takes packets of 32 KiB.
PIECE = 32_768

#: Seconds to wait for the end of the streams once the command itself has ended: a daemon may hold them for ever.
ORPHAN_S = 0.5

#: Seconds between looks where nothing wakes us (the send window, a silent peer).
SEND_POLL_S = 0.004
POLL_S = 0.25


class _Bell:
    """Rung by paramiko when output has come; we alone take it back, before we look."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def set(self) -> None:
        self.event.set()

    def set_forever(self) -> None:
        self.event.set()

    def clear(self) -> None:
        """paramiko clears when one of the two streams is empty; the other may not be."""


class Call:
    """A running command. `stdout` and `stderr` are what came and was not yet taken."""

    def __init__(
        self, connection: Connection, channel: Any, command: bytes, stdin: bytes | Iterable[bytes] | None
    ) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._connection = connection
        self._channel = channel
        self._held = isinstance(stdin, Held)
        self._source = _pieces(stdin)
        self._unsent = memoryview(b"")
        self._sending = True
        self._ended_at: float | None = None
        self._bell = _Bell()
        channel.settimeout(0.0)
        channel.in_buffer.set_event(self._bell)
        channel.in_stderr_buffer.set_event(self._bell)
        _start(channel, command)

    def turn(self, until: float) -> bool:
        """Move what can be moved, waiting no longer than the monotonic time `until`; False once all is over.

        Raises:
            ConnectionLost: the connection went away, or its peer is silent.
        """
        self._bell.event.clear()
        moved = self._read()
        moved = self._write() or moved
        if self._over():
            self._read()
            return False
        if moved:
            self._connection.heard = time.monotonic()
            return True
        if self._connection.silent:
            raise _lost("the other side does not answer any more")
        if not self._connection.transport.is_active():
            self._read()
            if self._over():
                return False
            raise _lost("the connection was cut")
        if self._channel.closed and self._channel.exit_status == -1:
            raise _lost("the other side ended the session without an exit code")
        self._wait(until)
        return True

    def _wait(self, until: float) -> None:
        wait = SEND_POLL_S if self._sending else POLL_S
        if self._ended_at is not None or self._channel.eof_received:
            wait = SEND_POLL_S  # the last words: nothing rings for an exit code
        self._bell.event.wait(max(0.0, min(wait, until - time.monotonic())))

    def _read(self) -> bool:
        moved = False
        channel = self._channel
        while channel.recv_ready():
            self.stdout += channel.recv(1 << 20)
            moved = True
        while channel.recv_stderr_ready():
            self.stderr += channel.recv_stderr(1 << 20)
            moved = True
        return moved

    def _write(self) -> bool:
        moved = False
        channel = self._channel
        # a bounded turn: output must be read in between
        for _ in range(32):
            if not self._sending or channel.closed or not channel.send_ready():
                break
            if not self._unsent:
                piece = next(self._source, None)
                if piece is None:
                    self._sending = False
                    if not self._held:
                        with contextlib.suppress(OSError, EOFError):
                            channel.shutdown_write()
                    break
                self._unsent = memoryview(piece)
                continue
            try:
                sent = channel.send(bytes(self._unsent[:PIECE]))
            except (OSError, EOFError):  # TimeoutError is one: no window after all
                break
            self._unsent = self._unsent[sent:]
            moved = moved or sent > 0
        if channel.closed or (self._sending and channel.exit_status_ready()):
            self._sending = False  # it has read what it wanted; its exit code tells the rest
        return moved

    def _over(self) -> bool:
        channel = self._channel
        if not channel.exit_status_ready() or channel.exit_status == -1:
            return False
        now = time.monotonic()
        if self._ended_at is None:
            self._ended_at = now
        if channel.recv_ready() or channel.recv_stderr_ready():
            return False
        return bool(channel.eof_received or channel.closed) or now >= self._ended_at + ORPHAN_S

    @property
    def rc(self) -> int:
        """Only once it is over."""
        return int(self._channel.exit_status)

    def close(self) -> None:
        """Close the session; the wrapper on the other side ends the command."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()
        close = getattr(self._source, "close", None)
        if close is not None:
            close()


def _start(channel: Any, command: bytes) -> None:
    """Ask for `command` and do not wait for the answer: that is one round trip less, and nothing that could block for
    ever as paramiko's own exec_command does. A server that says no closes the channel, which ends without exit code.
    """
    from paramiko import Message
    from paramiko.common import cMSG_CHANNEL_REQUEST
    from paramiko.ssh_exception import SSHException

    message = Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exec")
    message.add_boolean(True)
    message.add_string(command)
    try:
        channel.transport._send_user_message(message)
    except (SSHException, EOFError, OSError) as error:
        raise _lost(f"the command could not be started: {error or 'the connection was cut'}") from None


def _lost(what: str) -> ConnectionLost:
    return ConnectionLost(what, "", "look before you repeat: what the command did until then is done")


def _pieces(stdin: bytes | Iterable[bytes] | None) -> Iterator[bytes]:
    if stdin is None:
        return iter(())
    return iter((bytes(stdin),)) if isinstance(stdin, (bytes, bytearray, memoryview)) else iter(stdin)
