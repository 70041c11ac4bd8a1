"""One command on an ssh connection, its three streams moved by one loop under deadlines.

The rule here: no read, write or wait blocks for longer than the caller says. An exit code of -1 and an early end of
the streams are a lost connection, never a result.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from paramiko import Message
from paramiko.common import cMSG_CHANNEL_DATA, cMSG_CHANNEL_REQUEST
from paramiko.ssh_exception import SSHException

from dflash_ops.errors import ConnectionLost
from dflash_ops.hosts.connect import Connection
from dflash_ops.hosts.wrap import Held

#: Bytes written at once; one huge write is quadratic in paramiko (50 MB: 15 s), and sshd takes packets of 32 KiB.
PIECE = 32_768

#: Seconds to wait for the end of the streams once the command itself has ended: a daemon may hold them for ever.
ORPHAN_S = 0.5

#: Seconds to wait for the other side to close the session once all has been said.
CLOSE_S = 0.05

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
        # No input at all is no end of input: the wrapper there takes care of it, and nothing is sent that could cross a
        # close on the way.
        self._held = stdin is None or isinstance(stdin, Held)
        self._source = _pieces(stdin)
        self._unsent = memoryview(b"")
        self._sending = stdin is not None
        self._ended_at: float | None = None
        self._bell = _Bell()
        channel.settimeout(0.0)
        channel.in_buffer.set_event(self._bell)
        channel.in_stderr_buffer.set_event(self._bell)
        _start(channel, command)

    def say(self, source: Iterator[bytes], *, last: bool) -> None:
        """More input, for a call that was begun with `Held`; with `last` its end comes behind it."""
        # behind what is still to be said
        self._source, self._sending, self._held = chain(self._source, source), True, not last

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
        left = max(0.0, until - time.monotonic())
        if self._sending:
            channel = self._channel
            with channel.out_buffer_cv:  # told when the other side has room again; output is looked for in between
                if channel.out_window_size <= 0 and not channel.closed:
                    channel.out_buffer_cv.wait(min(SEND_POLL_S, left))
                    return
        # the last words: nothing rings for an exit code
        ending = self._sending or self._ended_at is not None or self._channel.eof_received
        self._bell.event.wait(min(SEND_POLL_S if ending else POLL_S, left))

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
            if not self._sending:
                break
            if channel.closed or channel.exit_status_ready():
                self._sending = False  # it has read what it wanted; its exit code tells the rest
                break
            if not self._unsent:
                piece = next(self._source, None)
                if piece is None:
                    self._sending = not self._held and self._send(b"") < 0
                    break
                self._unsent = memoryview(piece)
                continue
            sent = self._send(self._unsent[:PIECE])
            if sent <= 0:
                break
            self._unsent = self._unsent[sent:]
            moved = True
        return moved

    def _send(self, piece: bytes | memoryview) -> int:
        """Send the beginning of `piece`, or the end of input for an empty one; gives the bytes sent, -1 for "not now".

        Not by paramiko's own `send`: that lets go of the channel before it writes, so that its thread can answer a
        close in between, and sshd ends the whole connection for data that comes behind a close.
        """
        channel, transport = self._channel, self._connection.transport
        with transport.clear_to_send_lock:
            if not transport.active or not transport.clear_to_send.is_set():
                return -1  # all is over, or keys are being exchanged
            with channel.lock:
                if channel.closed or channel.eof_sent:
                    return 0
                if piece:
                    size = min(len(piece), int(channel.out_window_size), int(channel.out_max_packet_size) - 64)
                    if size <= 0:
                        return -1
                    message = Message()
                    message.add_byte(cMSG_CHANNEL_DATA)
                    message.add_int(channel.remote_chanid)
                    message.add_string(bytes(piece[:size]))
                    channel.out_window_size -= size
                else:
                    size, message = 0, channel._send_eof()
                try:
                    transport._send_message(message)
                except (SSHException, EOFError, OSError):
                    return 0  # the next look at the connection says what happened
                return size

    def _over(self) -> bool:
        channel = self._channel
        if not channel.exit_status_ready() or channel.exit_status == -1:
            return False
        now = time.monotonic()
        if self._ended_at is None:
            self._ended_at = now
        if channel.recv_ready() or channel.recv_stderr_ready():
            return False
        # closed, not only at its end: until then sshd counts the session
        return bool(channel.closed) or now >= self._ended_at + (CLOSE_S if channel.eof_received else ORPHAN_S)

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
