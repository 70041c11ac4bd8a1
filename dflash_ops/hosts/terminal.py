"""This terminal, handed over to a command behind ssh: raw, with its size, until the command ends."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

from paramiko.ssh_exception import SSHException

from dflash_ops.errors import ConnectionLost
from dflash_ops.hosts.connect import Connection

#: Seconds between looks at the connection while nothing happens.
LOOK_S = 0.5

#: Seconds to wait for an exit code after the last byte.
END_S = 3.0


def interact(connection: Connection, channel: Any, command: bytes) -> int:
    """Run `command` on a terminal of its own there; its exit code.

    Raises:
        ConnectionLost: it went away; this terminal is as it was before.
    """
    size = shutil.get_terminal_size()
    try:
        channel.get_pty(os.environ.get("TERM") or "xterm", size.columns, size.lines)
        channel.exec_command(command)
    except (SSHException, EOFError, OSError) as error:
        raise ConnectionLost(f"no terminal could be had there: {error or 'closed'}", "", "try again") from None
    channel.settimeout(0.0)
    source, out = sys.stdin.fileno(), sys.stdout.fileno()
    with _raw(source), _resizing(channel) as resized:
        _copy(connection, channel, source, out, resized)
    until = time.monotonic() + END_S
    while not channel.exit_status_ready() and time.monotonic() < until:
        time.sleep(0.01)
    if not channel.exit_status_ready() or channel.exit_status == -1:
        raise ConnectionLost("the connection was cut", "", "attach again: what ran there goes on")
    return int(channel.exit_status)


def _copy(connection: Connection, channel: Any, source: int, out: int, resized: list[bool]) -> None:
    reading = True
    while True:
        try:
            ready, _, _ = select.select([channel, source] if reading else [channel], [], [], LOOK_S)
        except InterruptedError:
            continue
        if resized and resized.pop():
            size = shutil.get_terminal_size()
            with contextlib.suppress(OSError, EOFError):
                channel.resize_pty(size.columns, size.lines)
        if channel in ready:
            connection.heard = time.monotonic()
            data = b""
            with contextlib.suppress(TimeoutError):
                data = channel.recv(65_536)
                if not data:
                    return
            _write(out, data)
        if source in ready:
            data = os.read(source, 65_536)
            if data:
                _send(connection, channel, data)
            else:
                reading = False
                channel.shutdown_write()
        if channel.closed or not connection.alive:
            return


def _send(connection: Connection, channel: Any, data: bytes) -> None:
    while data and connection.alive and not channel.closed:
        try:
            data = data[channel.send(data) :]
        except TimeoutError:
            time.sleep(0.01)
        except OSError:
            return


def _write(out: int, data: bytes) -> None:
    while data:
        data = data[os.write(out, data) :]


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Every key goes there, Ctrl-C too; put back whatever happens."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizing(channel: Any) -> Iterator[list[bool]]:
    resized: list[bool] = []
    try:
        before = signal.signal(signal.SIGWINCH, lambda *_: resized.append(True))
    except ValueError:  # not in the main thread: the size stays
        yield resized
        return
    try:
        yield resized
    finally:
        signal.signal(signal.SIGWINCH, before)
