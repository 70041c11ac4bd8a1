"""The connections of one host: shared by threads; a second one is opened where sshd allows no more sessions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from dflash_ops.errors import ConnectionLost, HostError, HostUnreachable
from dflash_ops.hosts.connect import Connection
from dflash_ops.hosts.keys import Keyring
from dflash_ops.hosts.sshconfig import Hop

#: Connections to one machine at most.
CONNECTIONS = 3

#: Seconds that making a connection may take, whatever the call's own deadline.
CONNECT_S = 30.0

#: Sessions on one connection before a second one is opened: sshd's own default is 10.
SESSIONS = 10

#: Seconds for the answer to "open a session".
OPEN_S = 12.0


class Pool:
    """Args: hops: the way. name: the host's, for messages. accept_new: as `Connection`."""

    def __init__(self, hops: Sequence[Hop], name: str, *, accept_new: bool = False) -> None:
        self._hops = hops
        self._name = name
        self._accept_new = accept_new
        self._keyring = Keyring()
        self._connections: list[Connection] = []
        self._opening = 0
        self._changed = threading.Condition()
        self._closed = False

    def take(self, until: float, late: Callable[[], HostError]) -> tuple[Connection, Any]:
        """A session (a channel, nothing started on it) and its connection; `late()` is the error for a wait too long.

        Raises:
            HostUnreachable: no connection, or a server that allows no session at all. ConnectionLost.
        """
        while True:
            connection = self._connection(until, late)
            channel = self._open(connection, until)
            if channel is not None:
                return connection, channel

    def _open(self, connection: Connection, until: float) -> Any:
        """A session on `connection`; None where it cannot be had there."""
        from paramiko.ssh_exception import ChannelException, SSHException

        try:
            wait = max(0.1, min(OPEN_S, until - time.monotonic()))
            return connection.transport.open_session(timeout=wait)
        except ChannelException as error:
            with self._changed:
                connection.sessions -= 1
                # others are open here: so many are allowed, and no more
                connection.limit = connection.sessions
                self._changed.notify_all()
            if connection.limit == 0:
                self._drop(connection)
                raise HostUnreachable(
                    f"sshd allows no session: {error.text or 'open failed'}",
                    f"host {self._name}",
                    "look at MaxSessions and ForceCommand in its sshd_config",
                ) from None
            return None
        except (SSHException, EOFError, OSError) as error:
            self._drop(connection)
            if time.monotonic() >= until:
                raise ConnectionLost(
                    "the other side does not answer any more", f"host {self._name}", "try again"
                ) from None
            raise ConnectionLost(
                f"the connection was lost: {error or 'closed by the other side'}", f"host {self._name}", "try again"
            ) from None

    def _connection(self, until: float, late: Callable[[], HostError]) -> Connection:
        """A connection with room for one more session, which is counted already."""
        with self._changed:
            while True:
                for dead in [c for c in self._connections if not c.alive]:
                    self._connections.remove(dead)
                    threading.Thread(target=dead.close, daemon=True).start()
                for one in self._connections:
                    if one.sessions < (SESSIONS if one.limit is None else one.limit):
                        one.sessions += 1
                        return one
                if self._closed or (not self._connections and not self._opening):
                    break
                if not self._opening and len(self._connections) < CONNECTIONS:
                    break
                if time.monotonic() >= until:
                    raise late()
                self._changed.wait(min(0.5, max(0.01, until - time.monotonic())))
            self._opening += 1
        try:
            made = Connection(
                self._hops,
                self._keyring,
                until=min(until, time.monotonic() + CONNECT_S),
                accept_new=self._accept_new,
            )
        except HostError as error:
            with self._changed:
                self._opening -= 1
                self._changed.notify_all()
            if f"host {self._name}" not in error.where:
                error.where = f"host {self._name}" + (f" ({error.where})" if error.where else "")
            raise
        except BaseException:
            with self._changed:
                self._opening -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._opening -= 1
            made.sessions = 1
            self._connections.append(made)
            self._changed.notify_all()
        return made

    def _drop(self, connection: Connection) -> None:
        with self._changed:
            if connection in self._connections:
                self._connections.remove(connection)
            self._changed.notify_all()
        threading.Thread(target=connection.close, daemon=True).start()

    def give_back(self, connection: Connection) -> None:
        """One session of `connection` has ended."""
        with self._changed:
            connection.sessions -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
