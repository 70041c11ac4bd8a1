"""The connections of one host: shared by threads; a second one is opened where sshd allows no more sessions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paramiko.ssh_exception import ChannelException, SSHException

from dflash_ops.errors import ConnectionLost, HostError, HostUnreachable
from dflash_ops.hosts.connect import Connection
from dflash_ops.hosts.keys import SHARED, Keyring
from dflash_ops.hosts.sshconfig import Hop

#: Connections to one machine at most.
CONNECTIONS = 3

#: Seconds that making a connection may take, whatever the call's own deadline.
CONNECT_S = 30.0

#: Sessions on one connection before a second one is opened: sshd's own default is 10, and one that has just ended
#: counts for a moment more.
SESSIONS = 8

#: How often a session is asked for where sshd says no, and seconds in between (once, twice, ...).
REFUSALS = 4
REFUSED_S = 0.01

#: Bytes of output that the other side may send ahead of us, for each session.
WINDOW = 4 << 20

#: Seconds within which a used connection must turn out to be dead for a new one to be tried in the same call: what was
#: waited for longer is not waited for twice.
AGAIN_S = 3.0

#: Seconds for the answer to "open a session".
OPEN_S = 12.0


class Pool:
    """Connections to the last of `hops`.

    Args:
        hops: the way. name: the host's, for messages. accept_new, keyring: as `Connection`.
    """

    def __init__(
        self, hops: Sequence[Hop], name: str, *, accept_new: bool = False, keyring: Keyring | None = None
    ) -> None:
        self._hops = hops
        self._name = name
        self._accept_new = accept_new
        self._keyring = keyring if keyring is not None else SHARED
        self._connections: list[Connection] = []
        self._opening = 0
        self._changed = threading.Condition()
        self._closed = False

    def take(self, until: float, late: Callable[[], HostError]) -> tuple[Connection, Any]:
        """A session (a channel, nothing started on it) and its connection; `late()` is the error for a wait too long.

        Raises:
            HostUnreachable: no connection, or a server that allows no session at all. ConnectionLost.
        """
        began = time.monotonic()
        while True:
            connection, used = self._connection(until, late)
            try:
                channel = self._open(connection, until)
            except ConnectionLost:
                self._drop(connection)
                # One that was used before may have died in the meantime (a laptop that slept). Nothing was started
                # on it, so that a new one may be tried.
                if not used or time.monotonic() >= min(until, began + AGAIN_S):
                    raise
                continue
            except BaseException:
                self.give_back(connection)
                raise
            if channel is not None:
                return connection, channel

    def _open(self, connection: Connection, until: float) -> Any:
        """A session on `connection`; None where sshd allows no more of them there.

        Raises:
            HostUnreachable: it allows none at all. ConnectionLost.
        """
        refusal = ""
        for attempt in range(REFUSALS):
            wait = max(0.1, min(OPEN_S, until - time.monotonic()))
            began = time.monotonic()
            try:
                channel = connection.transport.open_session(window_size=WINDOW, timeout=wait)
            except (SSHException, EOFError, OSError) as error:
                # A refusal is a ChannelException, but where several threads are refused at once, paramiko tells it to
                # one of them only.
                late = time.monotonic() >= began + wait
                if not isinstance(error, ChannelException) and (late or not connection.alive):
                    silent = late or connection.gone
                    said = "the other side does not answer any more" if silent else f"the connection was lost: {error}"
                    raise ConnectionLost(said, f"host {self._name}", "try again") from None
                refusal = str(getattr(error, "text", "")) or "open failed"
                # sshd may not have counted off a session that has just ended
                time.sleep(REFUSED_S * (attempt + 1))
            else:
                connection.opened = True
                return channel
        with self._changed:
            # the others that are open here are as many as are allowed
            connection.limit = max(1, connection.sessions - 1)
            alone = connection.sessions == 1
        if alone and not connection.opened:
            raise HostUnreachable(
                f"sshd allows no session: {refusal}",
                f"host {self._name}",
                "look at MaxSessions and ForceCommand in its sshd_config",
            )
        self.give_back(connection)
        return None

    def _connection(self, until: float, late: Callable[[], HostError]) -> tuple[Connection, bool]:
        """A connection with room for one more session, which is counted already; and whether it was there before."""
        with self._changed:
            while True:
                for dead in [c for c in self._connections if not c.alive]:
                    self._connections.remove(dead)
                    threading.Thread(target=dead.close, daemon=True).start()
                for one in self._connections:
                    if one.sessions < (SESSIONS if one.limit is None else one.limit):
                        one.sessions += 1
                        return one, True
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
        return made, False

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
